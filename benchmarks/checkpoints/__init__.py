"""Checkpoints that other libraries write, and models of GPT-2's size."""
