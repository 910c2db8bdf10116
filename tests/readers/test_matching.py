"""Which state belongs to which parameter: right by identity or by name, and refused wherever it would be a guess."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesadam.errors import MatchError
from bayesadam.readers import Curvature, read_optimizer, read_state_dict
from cases import mlp, train, trained
from floats import assert_close

# Equal shapes ('0.bias' and '2.bias', '2.weight' square) are what order alone cannot tell apart.
SIZES = (3, 4, 4, 1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 3) -> None:
    train(model, optimizer, steps=times)


def kept(optimizer: torch.optim.Optimizer, parameter: Tensor, beta: float = 0.999) -> Tensor:
    """Adam's own second moment, bias-corrected in float64."""
    state = optimizer.state[parameter]
    return (state["exp_avg_sq"].double() / (1 - beta ** float(state["step"]))).float()


def assert_is_adams(model: nn.Module, optimizer: torch.optim.Optimizer, curvature: Curvature) -> None:
    """Every parameter of the model has its own moment, by name."""
    parameters = dict(model.named_parameters())
    assert list(curvature.second_moment) == list(parameters)
    for name, v in curvature.second_moment.items():
        assert_close(v, kept(optimizer, parameters[name]))


def decay_groups(model: nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    """Weights with decay, then biases without: the order of Hugging Face's Trainer, not the model's."""
    items = list(model.named_parameters())
    weights, biases = [i for i in items if i[1].dim() > 1], [i for i in items if i[1].dim() == 1]
    groups = [(weights, 0.1), (biases, 0.0)]
    return [{"params": g if named else [p for _, p in g], "weight_decay": decay} for g, decay in groups]


# --- live optimisers ------------------------------------------------------------------------------------------------


def test_groups_keep_their_own_settings() -> None:
    model = mlp(*SIZES)
    optimizer = torch.optim.AdamW(decay_groups(model))
    optimizer.param_groups[1]["betas"] = (0.9, 0.9)
    step(model, optimizer)
    curvature = read_optimizer(model, optimizer)
    assert list(curvature.second_moment) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        decayed = name.endswith("weight")
        assert curvature.weight_decay[name] == (0.1 if decayed else 0.0)
        assert_close(curvature.second_moment[name], kept(optimizer, parameter, beta=0.999 if decayed else 0.9))


def test_two_optimisers_share_a_model() -> None:
    model = mlp(*SIZES)
    first = torch.optim.Adam([p for n, p in model.named_parameters() if n.endswith("weight")])
    second = torch.optim.RMSprop([p for n, p in model.named_parameters() if n.endswith("bias")])
    step(model, first)
    step(model, second)
    curvature = read_optimizer(model, [first, second])
    assert curvature.reader == {
        name: "adam" if name.endswith("weight") else "rmsprop" for name, _ in model.named_parameters()
    }
    alone = read_optimizer(model, first)
    assert all(torch.equal(v, curvature.second_moment[name]) for name, v in alone.second_moment.items())
    assert set(alone.omitted.values()) == {"not in the optimiser"}


def test_frozen_parameters_are_left_out() -> None:
    model = mlp(*SIZES)
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    # Frozen only now: it has a second moment, but it is no longer trained.
    model[4].bias.requires_grad_(False)
    curvature = read_optimizer(model, optimizer)
    frozen = "frozen (requires_grad is False)"
    assert curvature.omitted == {"2.weight": frozen, "4.bias": frozen}
    assert not curvature.second_moment.keys() & curvature.omitted.keys()


@pytest.mark.parametrize("optimizer_type", [torch.optim.Adam, torch.optim.Adagrad])
def test_a_parameter_that_never_got_a_gradient_is_left_out(optimizer_type: type[torch.optim.Optimizer]) -> None:
    model = mlp(*SIZES)
    model.unused = nn.Parameter(torch.ones(2))
    optimizer = optimizer_type(model.parameters())
    inputs = torch.randn(4, 3)
    for _ in range(3):
        optimizer.zero_grad()
        nn.Sequential.forward(model, inputs).square().mean().backward()
        optimizer.step()
    live = read_optimizer(model, optimizer)
    saved = read_state_dict(model, optimizer.state_dict(), optimizer=optimizer_type.__name__)
    for curvature in (live, saved):
        assert curvature.omitted == {"unused": "never received a gradient"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("saved", [False, True])
def test_tied_weights_are_counted_once(saved: bool) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    curvature = read_state_dict(model, optimizer.state_dict()) if saved else read_optimizer(model, optimizer)
    assert list(curvature.second_moment) == ["first.weight", "first.bias", "second.bias"]
    assert_is_adams(model, optimizer, curvature)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_moments_are_single_precision_or_better(dtype: torch.dtype, expected: torch.dtype) -> None:
    model, optimizer = trained(*SIZES, dtype=dtype)
    curvature = read_optimizer(model, optimizer)
    for name, parameter in model.named_parameters():
        v = curvature.second_moment[name]
        assert v.dtype == expected
        stored = optimizer.state[parameter]["exp_avg_sq"].to(expected)
        assert_close(v, stored / (1 - 0.999**20), rtol=1e-6)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.compile,
        lambda model: torch.compile(nn.DataParallel(model)),
        lambda model: nn.DataParallel(torch.compile(model)),
    ],
    ids=["parallel", "compiled", "compiled-parallel", "parallel-compiled"],
)
def test_a_wrapped_model_keeps_its_own_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp(*SIZES)
    wrapped = wrap(model)
    optimizer = torch.optim.Adam(wrapped.parameters())
    step(model, optimizer)
    assert_is_adams(model, optimizer, read_optimizer(wrapped, optimizer))
    assert_is_adams(model, optimizer, read_state_dict(wrapped, optimizer.state_dict()))


class Accelerated(torch.optim.Optimizer):
    """As in Accelerate: an optimiser by class, that keeps the real one and shows its groups and state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


def lightning(optimizer: torch.optim.Optimizer) -> Any:
    """As in Lightning: no optimiser by class."""
    return SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups, state=optimizer.state)


@pytest.mark.parametrize("wrap", [Accelerated, lightning, lambda o: lightning(Accelerated(o))])
def test_an_optimiser_inside_a_trainers_wrapper_is_found(wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
    model, optimizer = trained(*SIZES)
    assert_is_adams(model, optimizer, read_optimizer(model, wrap(optimizer)))
    assert_is_adams(model, optimizer, read_optimizer(model, [wrap(optimizer)]))


# --- live optimisers, refused ---------------------------------------------------------------------------------------


def test_the_optimiser_of_another_model_is_refused() -> None:
    model, optimizer = trained(*SIZES)
    with pytest.raises(MatchError, match=r"no parameter of Adam belongs to this Sequential.*from_state_dict"):
        read_optimizer(copy.deepcopy(model), optimizer)


@pytest.mark.parametrize("given", [{"state": {}, "param_groups": []}, None, "adam"], ids=["state-dict", "none", "text"])
def test_what_is_no_optimiser_is_refused(given: object) -> None:
    with pytest.raises(
        MatchError, match=rf"got {type(given).__name__}; for a saved state use Posterior.from_state_dict"
    ):
        read_optimizer(mlp(2, 1), given)


def test_a_parameter_in_two_optimisers_is_refused() -> None:
    model, first = trained(*SIZES)
    second = torch.optim.RMSprop(model[0].parameters())
    step(model, second)
    with pytest.raises(MatchError, match=r"'0.weight' is trained by two of the optimisers given: pass one"):
        read_optimizer(model, [first, second])


def test_a_parameter_without_values_is_refused() -> None:
    model, optimizer = trained(*SIZES)
    with pytest.raises(MatchError, match=r"'0.weight' is on the meta device and has no values: materialise the model"):
        read_state_dict(model.to("meta"), optimizer.state_dict())


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_moments_that_cannot_be_are_refused(bad: float, saved: bool) -> None:
    model, optimizer = trained(*SIZES)
    optimizer.state[model[2].weight]["exp_avg_sq"][1, 2] = bad
    message = rf"second moment of parameter '2.weight' \('exp_avg_sq'\) ranges from .*{bad:g}.*checkpoint before that"
    with pytest.raises(MatchError, match=message):
        read_state_dict(model, optimizer.state_dict()) if saved else read_optimizer(model, optimizer)


@pytest.mark.parametrize("steps", [float("nan"), 0.5])
def test_a_step_count_that_cannot_be_is_refused(steps: float) -> None:
    model, optimizer = trained(*SIZES)
    optimizer.state[model[2].weight]["step"].fill_(steps)
    with pytest.raises(MatchError, match=f"parameter '2.weight' has a step count of {steps}"):
        read_optimizer(model, optimizer)


# --- saved states ---------------------------------------------------------------------------------------------------


def test_names_that_are_passed_win_over_those_in_the_state() -> None:
    model = mlp(*SIZES)
    optimizer = torch.optim.Adam(model.named_parameters())
    step(model, optimizer)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["param_names"] = [f"old.{n}" for n, _ in model.named_parameters()]
    names = [name for name, _ in model.named_parameters()]
    assert_is_adams(model, optimizer, read_state_dict(model, saved, param_names=names))


# --- saved states, refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["0.weight"], r"param_names gives 1 names for the 2 parameters"),
        (["0.weight", "0.wait"], r"by param_names, \['0.wait'\] are not among the weights"),
        (["0.weight", "0.weight"], r"by param_names, \['0.weight'\] are .* twice"),
        (["0.bias", "0.weight"], r"'0.weight' has shape \(1,\), the parameter \(1, 3\).*names are in another order"),
    ],
    ids=["short", "unknown", "twice", "swapped"],
)
def test_names_that_do_not_fit_are_refused(names: list[str], message: str) -> None:
    model, optimizer = trained(3, 1)
    with pytest.raises(MatchError, match=message):
        read_state_dict(model, optimizer.state_dict(), param_names=names)


@pytest.mark.parametrize("keys", [[0], [0, 1, 1]], ids=["unlisted", "repeated"])
def test_an_inconsistent_state_dict_is_refused(keys: list[int]) -> None:
    model, optimizer = trained(3, 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"] = keys
    with pytest.raises(MatchError, match=r"inconsistent: keys \[1\] are repeated or in no group"):
        read_state_dict(model, saved)


def test_a_state_dict_without_groups_is_refused() -> None:
    with pytest.raises(MatchError, match="leaves no parameter to read: 2 not in the optimiser"):
        read_state_dict(mlp(3, 1), {"state": {}, "param_groups": []})


@pytest.mark.parametrize(("place", "entry"), [("state", "step"), ("group", "betas")])
def test_a_state_without_what_the_correction_needs_is_refused(place: str, entry: str) -> None:
    model, optimizer = trained(3, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    del (saved["state"][0] if place == "state" else saved["param_groups"][0])[entry]
    with pytest.raises(MatchError, match=f"reader 'adam' finds no '{entry}' for parameter '0.weight'"):
        read_state_dict(model, saved)
