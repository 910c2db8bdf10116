"""Gaussians over a model's weights, and mixtures of them: `gaussian`, `posterior`, `mixture`."""
