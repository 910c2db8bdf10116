"""Walks through a network and its copy: odd inputs are told, and nothing is left of a walk that ends early."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesadam.compress.walking import Walk
from bayesadam.errors import BayesAdamWarning, MatchError
from cases import mlp, state_of
from compress.cases_compress import twice


def walked(model: nn.Module, inputs: Any, visit: Any = None, forward: Any = None, small: Any = None) -> None:
    visit = visit or (lambda matrix, w, moments: w)
    weights = [name for name, p in model.named_parameters() if p.dim() > 1]
    Walk.of(model, inputs, weights, forward).through(small or copy.deepcopy(model), visit, "testing")


def raising(at: int) -> Any:
    """A forward that raises at its call of this number."""
    calls: list[None] = []

    def forward(model: nn.Module, x: Tensor) -> Any:
        calls.append(None)
        if len(calls) == at:
            raise KeyError("the network's own")
        return model(x)

    return forward


def failing(matrix: Any, w: Any, moments: Any) -> Any:
    raise KeyError("the visitor's own")


@pytest.mark.parametrize(
    ("at", "keys", "match"),
    [
        *((at, {}, "the network's own") for at in range(1, 9)),
        (0, {"visit": failing}, "the visitor's own"),
        (0, {"inputs": torch.full((150, 4), torch.nan)}, "are not finite: look for NaN in the network's inputs"),
        (0, {"inputs": torch.full((150, 4), torch.inf)}, r"of 'layer\.weight' are not finite"),
        (0, {"inputs": torch.ones(150, 4)}, "all inputs are the same"),
        (0, {"inputs": torch.zeros(150, 5)}, r"does not run on these inputs .*forward=lambda"),
        (
            0,
            {"inputs": (torch.zeros(150, 4), torch.zeros(150))},
            r"without targets, or a loader of \(inputs, targets\)",
        ),
        (0, {"inputs": torch.zeros(0, 4)}, "the batch is empty"),
        (0, {"inputs": iter([])}, "there are no inputs"),
        (0, {"inputs": "x"}, "no tensor with a batch dimension"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_left_of_a_walk_that_fails(at: int, keys: dict[str, Any], match: str, training: bool) -> None:
    model, small = twice().train(training), twice().train(training)
    threads, before = threading.enumerate(), (state_of(model), state_of(small)["hooks"])
    with pytest.raises((MatchError, KeyError), match=match) as caught:
        walked(model, **{"inputs": torch.randn(150, 4), "forward": raising(at) if at else None, "small": small, **keys})
    assert threading.enumerate() == threads
    assert (state_of(model), state_of(small)["hooks"]) == before
    assert all(module.training == training for module in small.modules())
    assert caught.value.__traceback__ is not None


def test_too_few_inputs_are_told_with_how_many_would_do() -> None:
    model = mlp(400, 250, 2)
    worst = r"0\.weight \(20 positions, 40 would do\), 2\.weight \(20 positions, 25 would do\): give more examples"
    with pytest.warns(BayesAdamWarning, match=f"^too few inputs for {worst}"):
        walked(model, torch.randn(20, 400))
    batch = {"input": torch.randn(30, 2, 400), "attention_mask": torch.tensor([[1, 0]] * 30)}
    with pytest.warns(BayesAdamWarning, match=r"^too few inputs for 0\.weight \(30 positions, 40 would do\): give"):
        walked(model, batch, forward=lambda model, batch: model(batch["input"]))
    walked(model, torch.randn(40, 400))
    with pytest.warns(BayesAdamWarning, match=r"^19 inputs say little of any layer"):
        walked(mlp(3, 4, 2), torch.randn(19, 3))


def seen_by_walk(model: nn.Module, inputs: Any, forward: Any = None) -> dict[str, float]:
    """The number of positions of each matrix, in the order of the walk."""
    seen: dict[str, float] = {}

    def visit(matrix: Any, w: Tensor, moments: Any) -> Tensor:
        seen[matrix.name] = moments.n
        assert not w.requires_grad
        assert not moments.a.requires_grad
        return w

    walked(model, inputs, visit, forward)
    return seen


def test_of_an_endless_loader_the_first_examples_count() -> None:
    batches = iter(lambda: (torch.randn(500, 3), torch.zeros(500)), None)
    assert seen_by_walk(mlp(3, 4, 2), batches) == {"0.weight": 4128, "2.weight": 4128}


def test_a_layer_without_positions_keeps_its_weights() -> None:
    with pytest.warns(BayesAdamWarning, match=r"layer\.weight \(0 positions, 1 would do\)"):
        seen = seen_by_walk(twice(), torch.randn(20, 4), lambda m, x: m.head(x) + m.layer(x[:0]).sum())
    assert seen == {"head.weight": 20, "layer.weight": 0}


def test_passes_run_in_the_networks_order_on_its_device_without_gradients() -> None:
    x, model = torch.randn(300, 4), mlp(4, 5, 6, 2)
    with torch.inference_mode(), torch.device("meta"):
        assert list(seen_by_walk(model, x)) == ["0.weight", "2.weight", "4.weight"]
