"""Bandits: agents beside other packages, their pace, off-policy estimates."""
