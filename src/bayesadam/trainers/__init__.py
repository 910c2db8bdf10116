"""Callbacks that read the posterior off a trainer's own optimiser: `lightning` and `huggingface`, each with its package."""
