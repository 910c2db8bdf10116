"""Small networks trained as a stack: their recipe, their random numbers, their step, and the rules they learn by."""

from bayesadam.engine.network import Network
from bayesadam.engine.rules import Rule
from bayesadam.engine.stack import Stack, train
from bayesadam.engine.streams import Streams

__all__ = ["Network", "Rule", "Stack", "Streams", "train"]
