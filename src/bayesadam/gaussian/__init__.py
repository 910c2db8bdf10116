"""Covariance structures: diagonal, Kronecker, low-rank."""
