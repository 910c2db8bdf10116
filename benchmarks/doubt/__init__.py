"""Doubt: classes, error bars, guarantees, drift."""
