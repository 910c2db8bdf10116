"""Training on new data that stays near what a posterior knows."""

from bayesadam.anchoring.handle import Anchor, anchor

__all__ = ["Anchor", "anchor"]
