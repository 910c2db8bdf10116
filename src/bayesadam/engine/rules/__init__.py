"""One module per rule, each with the same few functions; `RULES` is their registry."""

from collections.abc import Mapping

from bayesadam.engine.rules.adam import Adam
from bayesadam.engine.rules.bbb import BayesByBackprop
from bayesadam.engine.rules.dropout import Dropout
from bayesadam.engine.rules.ivon import IVON
from bayesadam.engine.rules.rule import Gaussian, Rule
from bayesadam.engine.rules.swag import SWAG
from bayesadam.engine.rules.vadam import Vadam

RULES: Mapping[str, type[Rule]] = {
    "adam": Adam,
    "mc-dropout": Dropout,
    "bbb": BayesByBackprop,
    "vadam": Vadam,
    "ivon": IVON,
    "swag": SWAG,
}

__all__ = ["IVON", "RULES", "SWAG", "Adam", "BayesByBackprop", "Dropout", "Gaussian", "Rule", "Vadam"]
