"""Pruning beside other methods."""
