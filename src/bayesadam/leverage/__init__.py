"""Leverage: how far each layer has to extrapolate for an input, which one forward pass tells."""

from bayesadam.leverage.leverage import Leverage, Ratios, from_inputs, from_structure
from bayesadam.predict.tap import Layer, layers_of, observed, tapped

__all__ = ["Layer", "Leverage", "Ratios", "from_inputs", "from_structure", "layers_of", "observed", "tapped"]
