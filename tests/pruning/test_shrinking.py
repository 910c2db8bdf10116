"""Shrinking takes out what does nothing, on a table of networks, and never changes the function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bayesadam.errors import MatchError, SettingError
from bayesadam.pruning import neuron_masks, prune, pruning_masks, shrink, weight_scores
from bayesadam.pruning.units import ranked_units
from cases import mlp, quick_of
from floats import approx, assert_close
from pruning.cases_pruning import posterior_of, removed


class Calls(nn.Module):
    """Named layers and a forward pass given as a function of them and the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.steps = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(self, x)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def kill(model: nn.Module, **rows: list[int]) -> None:
    """Set incoming weights of units to 0 (`layer=[units]`), or columns that read them (`layer_out=[columns]`)."""
    with torch.no_grad():
        for key, units in rows.items():
            weight = model.get_submodule(key.removesuffix("_out")).weight
            if key.endswith("_out"):
                weight[:, units] = 0.0
            else:
                weight[units] = 0.0


def randomise(model: nn.Module, seed: int) -> None:
    """Weights of order one everywhere, norms' statistics too, so that a mistake shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
                tensor.copy_(noise.abs() + 0.5 if name.endswith("running_var") else noise)


def assert_same_function(small: nn.Module, model: nn.Module, x: Tensor) -> None:
    """On the example and beyond it, in evaluation."""
    small, model = copy.deepcopy(small).eval(), copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(99)
    for factor in (1.0, -3.0, 10.0):
        other = x + factor * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        expected, got = model(other), small(other)
        assert_close(got, expected, rtol=1e-9, atol=1e-12)


# --- a table of networks ----------------------------------------------------------------------------------------------

BATCH = (3,)


def conv_net(pool: nn.Module, *, padding: int = 0, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    body = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=padding), activation(), nn.Conv2d(6, 5, 3, padding=padding), activation(), pool
    )
    with torch.no_grad():
        features = body(torch.zeros(1, 2, 10, 10)).numel()
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(features, 4), activation(), nn.Linear(4, 3))


def residual(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    return m.c(h + m.b(h))


def branches(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.b(h) + m.c(h * 2 + 1)


def viewed(m: Any, x: Tensor) -> Tensor:
    h = F.max_pool2d(F.relu(m.a(x)), 2)
    return m.b(F.dropout(h.view(h.size(0), -1), training=m.training))


def fixed_view(m: Any, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(x)).view(-1, 5 * 4 * 4))


def averaged(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(m.norm(m.a(x)))
    return m.b(h.mean(dim=(2, 3)))


def sequence_flattened(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.flatten(torch.sigmoid(m.a(x)), 1))


def attended(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    return m.b(torch.softmax(h, dim=-1))


def weight_read(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.relu(m.a(x))) + m.a.weight.sum()


def shape_read(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    return m.b(h) / h.shape[1]


def size_read(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    return m.b(h) / h.size(1)


def pooled(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)).mean(1))


def pooled_in_place(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.mean(torch.tanh(m.a(x)), 1, keepdim=True))


def transposed(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.relu(m.a(x)).transpose(1, 2))


def summed_up(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.sigmoid(m.a(x)).cumsum(1))


def flipped(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.relu(m.a(x)).flip(-1))


def normalised(m: Any, x: Tensor) -> Tensor:
    return m.b(F.normalize(m.a(x), dim=-1))


def batch_read(m: Any, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))
    batch, _ = h.shape
    return m.b(h) * batch


def tied_net() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    )
    model[4].weight = model[2].weight
    return model


def reused_net() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(6, 2))


def hooked_net() -> nn.Module:
    model = mlp(4, 6, 2, activation=nn.ReLU)
    model[1].register_forward_hook(lambda module, args, out: out + out.flip(1))
    return model


def parametrised_net() -> nn.Module:
    model = mlp(4, 6, 2, activation=nn.ReLU)
    parametrizations.weight_norm(model[0])
    return model


# name: network, shape of one example, units made constant or unread, hidden widths expected (None: not one unit goes).
Case = tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, list[int]], dict[str, int] | None]
TABLE: dict[str, Case] = {
    **{
        f"mlp-{kind.__name__}": (
            lambda k=kind: mlp(4, 6, 5, 2, activation=k),
            (4,),
            {"2_out": [1, 3], "4_out": [0]},
            {"0": 4, "2": 4},
        )
        for kind in (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.Softplus, nn.LeakyReLU)
    },
    "no-bias": (
        lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.Sigmoid(), nn.Linear(6, 2, bias=False)),
        (4,),
        {"2_out": [0, 1, 3]},
        {"0": 3},
    ),
    "sequence": (lambda: mlp(4, 6, 2), (7, 4), {"2_out": [0, 1, 3]}, {"0": 3}),
    "sequence-flattened": (
        lambda: Calls(sequence_flattened, a=nn.Linear(4, 6), b=nn.Linear(42, 2)),
        (7, 4),
        {"b_out": [6 * place + unit for place in range(7) for unit in (1, 3)]},
        {"a": 4},
    ),
    "conv": (
        lambda: conv_net(nn.MaxPool2d(2)),
        (2, 10, 10),
        {"2_out": [1, 2], "6_out": [3, *range(36, 45)], "8_out": [2]},
        {"0": 4, "2": 4, "6": 3},
    ),
    "conv-avg": (
        lambda: conv_net(nn.AvgPool2d(2), activation=nn.Sigmoid),
        (2, 10, 10),
        {"2_out": [1, 2], "6_out": [*range(36, 45)]},
        {"0": 4, "2": 4},
    ),
    "conv-avg-whole": (
        lambda: conv_net(nn.AdaptiveAvgPool2d(1), activation=nn.Tanh),
        (2, 10, 10),
        {"6_out": [4]},
        {"0": 6, "2": 4},
    ),
    "conv-padded": (
        lambda: conv_net(nn.MaxPool2d(2), padding=1, activation=nn.Sigmoid),
        (2, 10, 10),
        {"2_out": [2]},
        {"0": 5},
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 2), nn.ELU(), nn.MaxPool3d(2), nn.Conv3d(4, 3, 1, padding="same")),
        (1, 6, 6, 6),
        {"3_out": [1, 2]},
        {"0": 2},
    ),
    "batch-norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(), nn.Conv2d(6, 3, 3)),
        (2, 8, 8),
        {"4_out": [0, 1, 5]},
        {"0": 3, "1": 3},
    ),
    "batch-norm-mlp": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3)
        ),
        (4,),
        {"4_out": [0, 1, 5]},
        {"0": 3},
    ),
    "batch-norm-after-flatten": (
        lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.Flatten(), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 2)),
        (1, 5),
        {"4_out": [4, 5, 6, 7]},
        {"0": 2, "2": 8},
    ),
    "layer-norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)),
        (4,),
        {"0": [0], "2_out": [1]},
        None,
    ),
    "residual": (
        lambda: Calls(residual, a=nn.Linear(4, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 2)),
        (4,),
        {"a": [0], "b": [1], "c_out": [2]},
        None,
    ),
    "branches": (
        lambda: Calls(branches, a=nn.Linear(4, 6), b=nn.Linear(6, 2), c=nn.Linear(6, 2)),
        (4,),
        # Read by one of the two: it stays.
        {"b_out": [0, 1, 2], "c_out": [0, 1, 3]},
        {"a": 4},
    ),
    "viewed": (
        lambda: Calls(viewed, a=nn.Conv2d(1, 5, 3), b=nn.Linear(20, 2)),
        (1, 6, 6),
        {"b_out": [*range(8)]},
        {"a": 3},
    ),
    "fixed-view": (
        lambda: Calls(fixed_view, a=nn.Conv2d(1, 5, 3), b=nn.Linear(80, 2)),
        (1, 6, 6),
        {"b_out": [*range(32)]},
        None,
    ),
    "averaged": (
        lambda: Calls(averaged, a=nn.Conv2d(1, 5, 3), norm=nn.BatchNorm2d(5), b=nn.Linear(5, 2)),
        (1, 6, 6),
        {"b_out": [0, 1]},
        {"a": 3, "norm": 3},
    ),
    "softmax": (lambda: Calls(attended, a=nn.Linear(4, 5), b=nn.Linear(5, 2)), (4,), {"a": [0], "b_out": [1]}, None),
    "weight-read": (
        lambda: Calls(weight_read, a=nn.Linear(4, 5), b=nn.Linear(5, 2)),
        (4,),
        {"a": [0], "b_out": [1]},
        None,
    ),
    "shape-read": (
        lambda: Calls(shape_read, a=nn.Linear(4, 5), b=nn.Linear(5, 2)),
        (4,),
        {"a": [0], "b_out": [1]},
        None,
    ),
    "size-read": (lambda: Calls(size_read, a=nn.Linear(4, 5), b=nn.Linear(5, 2)), (4,), {"a": [0], "b_out": [1]}, None),
    "pooled": (lambda: Calls(pooled, a=nn.Linear(4, 5), b=nn.Linear(5, 2)), (7, 4), {"b_out": [0, 1]}, {"a": 3}),
    "pooled-in-place": (
        lambda: Calls(pooled_in_place, a=nn.Linear(4, 5), b=nn.Linear(5, 2)),
        (7, 4),
        {"b_out": [0, 1]},
        {"a": 3},
    ),
    "transposed-input": (
        lambda: Calls(transposed, a=nn.Linear(4, 6), b=nn.Conv1d(6, 2, 3)),
        (7, 4),
        {"b_out": [0, 1, 3]},
        {"a": 3},
    ),
    "summed-up": (
        lambda: Calls(summed_up, a=nn.Linear(4, 6), b=nn.Linear(6, 2)),
        (7, 4),
        {"b_out": [0]},
        {"a": 5},
    ),
    **{
        step.__name__: (
            lambda step=step: Calls(step, a=nn.Linear(4, 6), b=nn.Linear(6, 2)),
            (4,),
            {"a": [0], "b_out": [1]},
            None,
        )
        for step in (flipped, normalised)
    },
    "batch-read": (
        lambda: Calls(batch_read, a=nn.Linear(4, 5), b=nn.Linear(5, 2)),
        (4,),
        {"b_out": [0, 1]},
        {"a": 3},
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 1)
        ),
        (2, 8, 8),
        {"0": [1], "2": [2]},
        None,
    ),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Conv2d(6, 2, 1)
        ),
        (2, 8, 8),
        {"0": [1], "2": [2], "4_out": [3]},
        None,
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)
        ),
        (2, 8, 8),
        {"0": [1], "4_out": [3]},
        None,
    ),
    "tied": (tied_net, (4,), {"2_out": [2]}, None),
    "reused": (reused_net, (4,), {"2_out": [2]}, None),
    "hooked": (hooked_net, (4,), {"0": [1], "2_out": [2]}, None),
    "parametrised": (parametrised_net, (4,), {"2_out": [2]}, None),
    "one-layer": (lambda: nn.Sequential(nn.Linear(4, 6)), (4,), {"0": [1, 2]}, None),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.PReLU(6), nn.Linear(6, 2)), (4,), {"2_out": [1]}, None),
}


def prepared(case: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    make, shape, dead, _ = TABLE[case]
    model = make().double()
    if case != "parametrised":
        randomise(model, seed)
    kill(model, **dead)
    return model, torch.randn(BATCH + shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("case", TABLE)
def test_the_function_stays_and_the_widths_are_known(case: str) -> None:
    model, x = prepared(case)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = shrink(model, example_input=x)
    assert_same_function(small, model, x)
    widths = TABLE[case][3]
    if widths is None:
        assert shapes(small) == shapes(model)
    else:
        for name, width in widths.items():
            layer = small.get_submodule(name)
            assert len(layer.weight) == width, name
            assert (
                getattr(layer, "out_features", getattr(layer, "out_channels", getattr(layer, "num_features", 0)))
                == width
            )
    # The original is what it was, and shares no memory with the new one.
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not {p.data_ptr() for p in small.parameters()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("seed", quick_of(range(5), 0, 3))
@pytest.mark.parametrize("case", [name for name, row in TABLE.items() if name != "parametrised"])
def test_random_masks_never_change_the_function(case: str, seed: int) -> None:
    model, x = prepared(case, seed)
    generator = torch.Generator().manual_seed(seed)
    rate = 0.55 + 0.08 * seed
    masks = {name: torch.rand(p.shape, generator=generator) > rate for name, p in model.named_parameters()}
    pruned = prune(model, masks, inplace=False)
    small = shrink(model, masks, example_input=x)
    assert_same_function(small, pruned, x)
    # At a fixed point: what is left has nothing to take out.
    assert shapes(shrink(small, example_input=x)) == shapes(small)


def test_a_chain_of_dead_units_falls_one_after_the_other() -> None:
    # The last hidden layer is read at one unit alone; it reads two of the layer before, they three of the first.
    model = mlp(3, 8, 8, 8, 2).double()
    kill(model, **{"6_out": list(range(1, 8))})
    with torch.no_grad():
        model[4].weight[0, 2:] = 0.0
        model[2].weight[:2, 3:] = 0.0
    x = torch.randn(5, 3, dtype=torch.float64)
    small = shrink(model, example_input=x)
    assert [tuple(small[i].weight.shape) for i in (0, 2, 4, 6)] == [(3, 3), (2, 3), (1, 2), (2, 1)]
    assert_same_function(small, model, x)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid])
def test_a_layer_that_is_dead_altogether_keeps_one_unit(activation: type[nn.Module]) -> None:
    model = mlp(3, 4, 5, 2, activation=activation).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    everything = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    small = shrink(model, everything, example_input=x)
    assert [tuple(small[i].weight.shape) for i in (0, 2, 4)] == [(1, 3), (1, 1), (2, 1)]
    assert_same_function(small, prune(model, everything, inplace=False), x)


def test_modes_gradients_and_types_are_kept() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)).to(dtype)
        model[1].eval()
        model[0].weight.requires_grad_(False)
        kill(model, **{"4_out": [0, 1]})
        small = shrink(model, example_input=torch.randn(3, 4, dtype=dtype))
        assert [m.training for m in small.modules()] == [m.training for m in model.modules()]
        assert {p.dtype for p in small.parameters()} == {dtype}
        assert not small[0].weight.requires_grad
        assert small[0].bias.requires_grad
        assert small[1].num_batches_tracked == model[1].num_batches_tracked
        assert small[1].running_mean.shape == (6,)


def test_arguments_may_be_several_or_left_at_their_defaults() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
            h = torch.relu(self.a(x))
            if mask is not None:
                h = h * mask
            return {"out": self.b(h) * scale}

    model = Several()
    kill(model, b_out=[1])
    x = torch.randn(2, 3)
    for example in (x, (x,)):
        assert len(shrink(model, example_input=example).a.weight) == 4
    # A second tensor is multiplied in: not understood, so left alone.
    assert len(shrink(model, example_input=(x, torch.ones(5))).a.weight) == 5


def test_wrapped_models_come_back_unwrapped() -> None:
    model = mlp(3, 4, 2)
    kill(model, **{"2_out": [1]})
    wrapped = nn.DataParallel(model)
    # It moves the model to a GPU where there is one.
    small = shrink(wrapped, example_input=torch.randn(2, 3, device=model[0].weight.device))
    assert isinstance(small, nn.Sequential)
    assert len(small[0].weight) == 3


def test_what_cannot_be_traced_says_so() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(x) if x.sum() > 0 else m.b(x)

    model = Calls(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    with pytest.raises(SettingError, match=r"torch\.fx cannot trace Calls.*control flow"):
        shrink(model, example_input=torch.randn(2, 3))
    with pytest.raises(SettingError, match="empty tensor"):
        shrink(mlp(3, 4, 2), example_input=torch.randn(0, 3))


def test_a_function_that_changed_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp(3, 4, 2, activation=nn.Sigmoid)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setitem(shrink.__globals__, "_take_out", lambda units: bool(units.layer.weight.zero_().any()))
    with pytest.raises(MatchError, match="does not compute the same"):
        shrink(model, example_input=torch.randn(2, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_masks_are_checked_before_anything() -> None:
    with pytest.raises(MatchError, match="is of no parameter"):
        shrink(mlp(3, 4, 2), {"9.weight": torch.ones(1, dtype=torch.bool)}, example_input=torch.randn(2, 3))


# --- whole units ------------------------------------------------------------------------------------------------------


def unit_sums(posterior: Any, ranking: Any) -> dict[str, list[float]]:
    """The reference for an MLP: loops over units and their weights."""
    scores = weight_scores(posterior, ranking)
    totals: dict[str, list[float]] = {}
    for layer, reader in (("0", "2"), ("2", "4")):
        rows, columns = scores[f"{layer}.weight"], scores[f"{reader}.weight"]
        totals[f"{layer}.weight"] = [
            sum(rows[u].tolist()) + float(scores[f"{layer}.bias"][u]) + sum(columns[:, u].tolist())
            for u in range(len(rows))
        ]
    return totals


@pytest.mark.parametrize("ranking", ["snr", "magnitude", lambda theta, v: theta.abs() + v])
def test_a_units_score_is_the_sum_of_all_that_goes_with_it(ranking: Any) -> None:
    posterior = posterior_of(mlp(4, 7, 6, 2))
    found = ranked_units(posterior, ranking, (), torch.randn(2, 4))[1]
    expected = unit_sums(posterior, ranking)
    assert found.keys() == expected.keys()
    for name, totals in expected.items():
        assert found[name].tolist() == approx(totals, rel=1e-5)


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_whole_units_go_and_the_network_shrinks_by_them(fraction: float, scope: Any) -> None:
    posterior = posterior_of(mlp(4, 7, 6, 2).double())
    x = torch.randn(3, 4, dtype=torch.float64)
    masks = neuron_masks(posterior, fraction, scope=scope, example_input=x)
    totals = unit_sums(posterior, "snr")
    best = {name: max(range(len(scores)), key=scores.__getitem__) for name, scores in totals.items()}
    gone: set[tuple[str, int]] = set()
    for names in [list(totals)] if scope == "global" else [[name] for name in totals]:
        count = round(fraction * sum(len(totals[name]) for name in names))
        open_units = [(name, u) for name in names for u in range(len(totals[name])) if u != best[name]]
        gone |= set(sorted(open_units, key=lambda unit: totals[unit[0]][unit[1]])[:count])
    for layer, reader in (("0", "2"), ("2", "4")):
        for u in range(len(masks[f"{layer}.weight"])):
            kept = (f"{layer}.weight", u) not in gone
            assert bool(masks[f"{layer}.bias"][u]) == kept
            if not kept:
                assert not masks[f"{layer}.weight"][u].any()
                assert not masks[f"{reader}.weight"][:, u].any()
    small = shrink(posterior.model, masks, example_input=x)
    lost = [7 - len(small[0].weight), 6 - len(small[2].weight)]
    assert lost == [sum(name == f"{layer}.weight" for name, _ in gone) for layer in ("0", "2")]
    assert_same_function(small, prune(posterior.model, masks, inplace=False), x)
    if fraction == 0:
        assert removed(masks) == 0


@pytest.mark.parametrize("case", ["conv", "batch-norm", "sequence-flattened", "viewed", "averaged", "branches"])
def test_units_of_every_layout_can_go(case: str) -> None:
    make, shape, _, _ = TABLE[case]
    model = make().double()
    randomise(model, 1)
    x = torch.randn(BATCH + shape, dtype=torch.float64)
    modes = [m.training for m in model.modules()]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    posterior = posterior_of(model)
    scores = ranked_units(posterior, "snr", (), x)[1]
    masks = neuron_masks(posterior, 0.5, example_input=x)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    small = shrink(model, masks, example_input=x)
    total = sum(len(score) for score in scores.values())
    left = sum(len(small.get_parameter(name)) for name in scores)
    assert left == total - round(0.5 * total)
    assert_same_function(small, prune(model, masks, inplace=False), x)


def test_excluded_layers_and_those_outside_the_posterior_keep_their_units() -> None:
    model, x = mlp(4, 7, 6, 2), torch.randn(2, 4)
    assert ranked_units(posterior_of(model), "snr", "0.weight", x)[1].keys() == {"2.weight"}
    # Without the second layer's weight neither its own units nor those it reads can go.
    partial = posterior_of(model, names=["0.weight", "0.bias", "4.weight"])
    assert ranked_units(partial, "snr", (), x)[1] == {}
    masks = neuron_masks(partial, 1.0, example_input=x)
    assert removed(masks) == 0


def test_unit_masks_are_for_every_parameter_as_weight_masks_are() -> None:
    posterior = posterior_of(mlp(4, 7, 2))
    assert neuron_masks(posterior, 0.5, example_input=torch.randn(2, 4)).keys() == pruning_masks(posterior, 0.5).keys()
    with pytest.raises(SettingError, match="fraction"):
        neuron_masks(posterior, 2.0, example_input=torch.randn(2, 4))
    with pytest.raises(SettingError, match="scope"):
        neuron_masks(posterior, 0.5, scope="unit", example_input=torch.randn(2, 4))  # type: ignore[arg-type]
