"""Models from the package index, with the state of the optimiser that trained them."""
