"""Leverage: how far each layer has to extrapolate for an input, which one forward pass tells."""

from bayesadam.leverage.layers import Layer, layer_inputs, layers_of, observed
from bayesadam.leverage.leverage import Leverage, Ratios, from_inputs, from_structure

__all__ = ["Layer", "Leverage", "Ratios", "from_inputs", "from_structure", "layer_inputs", "layers_of", "observed"]
