"""The work of the commands that are not of the paper: on a saved file, and the demo."""
