"""Callbacks that read the posterior off a trainer's own optimiser, for Lightning and for Hugging Face's Trainer."""
