"""SOAP against its equations, written out slowly in numpy, and against what they promise."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bayesadam.errors import MatchError, SettingError, StateError
from bayesadam.optim.soap import SOAP
from bayesadam.posterior import Posterior
from bayesadam.readers import read_optimizer
from bayesadam.readers.match import match_optimizers, match_state_dict
from bayesadam.readers.rotated import SOAP_READER, Rotated
from cases import mlp
from floats import assert_close, close

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def gradients(steps: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Gradients of full rank, with directions and scales to be found."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape[0], shape[0], generator=generator, dtype=torch.float64)
    return (rows @ torch.randn(steps, shape[0], int(np.prod(shape[1:])), generator=generator, dtype=torch.float64)).view(
        steps, *shape
    ).to(dtype)  # fmt: skip


def follow(parameter: nn.Parameter, optimizer: SOAP, given: Tensor) -> None:
    for gradient in given:
        parameter.grad = gradient.to(parameter).clone()
        optimizer.step()


def started(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu", **settings: Any) -> Any:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    parameter = nn.Parameter(start.to(device, dtype))
    return parameter, SOAP([parameter], **settings)


# --- the equations ----------------------------------------------------------------------------------------------


def rotated(q_left: np.ndarray, x: np.ndarray, q_right: np.ndarray) -> np.ndarray:
    """Q_Lᵀ X Q_R, entry by entry."""
    m, n = x.shape
    out = np.zeros((m, n))
    for i, j in itertools.product(range(m), range(n)):
        out[i, j] = sum(q_left[a, i] * x[a, b] * q_right[b, j] for a in range(m) for b in range(n))
    return out


def covariance(x: np.ndarray) -> np.ndarray:
    """X Xᵀ, entry by entry."""
    return np.array([[sum(p * q for p, q in zip(a, b, strict=True)) for b in x] for a in x])


def gram_schmidt(s: np.ndarray) -> np.ndarray:
    """The orthogonal factor of S, column after column; twice, for the last digits."""
    columns: list[np.ndarray] = []
    for column in s.T:
        for _ in range(2):
            for q in columns:
                column = column - (q @ column) * q
        columns.append(column / np.sqrt(column @ column))
    return np.stack(columns, axis=1)


def reference(
    w: np.ndarray, given: np.ndarray, q_left: np.ndarray | None, q_right: np.ndarray | None, settings: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The paper's Algorithms 3 and 4 in float64, M in the space of the weights; a basis of None stays the identity."""
    (b1, b2), eta, eps, decay = settings["betas"], settings["lr"], settings["eps"], settings["weight_decay"]
    bs = b2 if settings.get("shampoo_beta") is None else settings["shampoo_beta"]
    fixed_left, fixed_right = q_left is None, q_right is None
    q_left = np.eye(w.shape[0]) if q_left is None else q_left
    q_right = np.eye(w.shape[1]) if q_right is None else q_right
    m, v = np.zeros_like(w), np.zeros_like(w)
    left, right = (1 - bs) * covariance(given[0]), (1 - bs) * covariance(given[0].T)
    for t, g in enumerate(given[1:], start=1):
        turned = rotated(q_left, g, q_right)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * turned**2
        u = (rotated(q_left, m, q_right) / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - eta * decay * w - eta * rotated(q_left.T, u, q_right.T)
        if t % settings.get("statistics_every", 1) == 0:
            left = bs * left + (1 - bs) * covariance(g)
            right = bs * right + (1 - bs) * covariance(g.T)
        if t % settings["precondition_every"] == 0:
            if not fixed_left:
                order = sorted(range(len(left)), key=lambda i: -(q_left[:, i] @ left @ q_left[:, i]))
                v, q_left = v[order], gram_schmidt(left @ q_left[:, order])
            if not fixed_right:
                order = sorted(range(len(right)), key=lambda j: -(q_right[:, j] @ right @ q_right[:, j]))
                v, q_right = v[:, order], gram_schmidt(right @ q_right[:, order])
    return {"w": w, "v": v, "left": left, "right": right, "q_left": q_left, "q_right": q_right}


EQUATIONS = {"lr": 0.05, "betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.1}


def descending_eigh(s: np.ndarray) -> np.ndarray:
    return np.linalg.eigh(s)[1][:, ::-1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "changes",
    [
        {"precondition_every": 10},
        {"precondition_every": 1},
        {"precondition_every": 4, "shampoo_beta": 0.8, "statistics_every": 3},
    ],
    ids=str,
)
def test_soap_follows_its_equations(changes, device):
    """Thirty steps of a square matrix, whose eigenbases are unique but for signs."""
    settings = {**EQUATIONS, **changes}
    parameter, optimizer = started(5, 5, device=device, **settings)
    start, given = parameter.detach().cpu().numpy().copy(), gradients(31, 5, 5)
    follow(parameter, optimizer, given)
    bases = descending_eigh(covariance(given[0].numpy())), descending_eigh(covariance(given[0].numpy().T))
    expected = reference(start, given.numpy(), *bases, settings)
    assert_state(parameter, optimizer, expected)


def assert_state(parameter: nn.Parameter, optimizer: SOAP, expected: dict[str, np.ndarray]) -> None:
    state = {key: value.cpu().numpy() for key, value in optimizer.state[parameter].items()}
    shape = expected["w"].shape
    close = {"rtol": 1e-8, "atol": 1e-8}
    assert_close(parameter.detach().cpu().numpy().reshape(shape), expected["w"], **close)
    assert_close(state["rotated_exp_avg_sq"].reshape(shape), expected["v"], **close)
    for side in ("left", "right"):
        if side in state:
            assert_close(state[side], expected[side], **close)
            overlap = np.abs(state[f"{side}_basis"].T @ expected[f"q_{side}"])
            assert_close(overlap, np.eye(len(overlap)), **close)


@pytest.mark.parametrize(
    ("shape", "max_side", "sides"),
    [
        ((4, 6), 10_000, ("left", "right")),
        ((6, 4), 10_000, ("left", "right")),
        ((4, 6), 5, ("left",)),
        ((6, 4), 5, ("right",)),
        ((3, 2, 2, 2), 10_000, ("left", "right")),
        ((3, 2, 2, 2), 4, ("left",)),
        ((1, 5), 10_000, ("right",)),
        ((5, 1), 10_000, ("left",)),
    ],
    ids=str,
)
def test_other_shapes_and_one_side_follow_the_equations(shape, max_side, sides):
    """The longer side's first statistic has no full rank: any eigenbasis is right, and the reference starts from ours."""
    settings = {**EQUATIONS, "precondition_every": 5}
    parameter, optimizer = started(*shape, max_side=max_side, **settings)
    given = gradients(31, *shape)
    start = parameter.detach().numpy().copy()
    follow(parameter, optimizer, given[:1])
    assert np.array_equal(parameter.detach().numpy(), start)
    first = {key: value.numpy().copy() for key, value in optimizer.state[parameter].items()}
    assert tuple(side for side in ("left", "right") if f"{side}_basis" in first) == sides
    for side in sides:
        q, s = first[f"{side}_basis"], first[side]
        values = np.diag(q.T @ s @ q)
        assert_close(q.T @ q, np.eye(len(q)), atol=1e-12)
        assert_close(s @ q, q * values, atol=1e-12 * values.max())
        assert (np.diff(values) <= 1e-12 * values.max()).all()
    follow(parameter, optimizer, given[1:])
    matrices = given.numpy().reshape(31, shape[0], -1)
    bases = first.get("left_basis"), first.get("right_basis")
    expected = reference(start.reshape(shape[0], -1), matrices, *bases, settings)
    assert_state(parameter, optimizer, expected)


@pytest.mark.parametrize("half", [False, True])
def test_matrices_of_equal_shapes_go_their_own_ways_together(half):
    """Three, one of which has no gradient at first, against an optimiser for each."""
    settings = {"lr": 0.01, "precondition_every": 3, "weight_decay": 0.1, "half_products": half}
    together = [nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    optimizer, optimizers = SOAP(together, **settings), [SOAP([p], **settings) for p in alone]
    given = torch.stack([gradients(20, 6, 4, seed=i, dtype=torch.float32) * 10.0**i for i in range(3)], dim=1)
    for t, at in enumerate(given):
        for i, gradient in enumerate(at):
            is_due = i < 2 or t > 4
            together[i].grad, alone[i].grad = (gradient.clone(), gradient.clone()) if is_due else (None, None)
        optimizer.step()
        for one in optimizers:
            one.step()
    for i, (a, b) in enumerate(zip(together, alone, strict=True)):
        assert float(optimizer.state[a]["step"]) == (19 if i < 2 else 14)
        assert_close(a, b, rtol=1e-4, atol=1e-5)
        for key, value in optimizer.state[a].items():
            assert_close(value, optimizers[i].state[b][key], rtol=1e-3, atol=1e-4 * float(value.abs().max()))


# --- products of 16-bit factors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "max_side"), [((40, 40), 100), ((200, 30), 100), ((30, 200), 100), ((6, 3, 2), 100)])
@pytest.mark.parametrize("device", DEVICES)
def test_half_products_stay_near_float64(device, shape, max_side):
    """Gradients of full rank, so that all have the same bases; entries of all magnitudes, so that scales matter."""
    generator = torch.Generator().manual_seed(0)
    wide, n = shape[0], int(np.prod(shape[1:]))
    turn = orthogonal(wide, 1) * torch.logspace(0, -2, wide).double()
    given = (turn @ torch.randn(42, wide, n, generator=generator, dtype=torch.float64)).view(42, *shape) * 1e-6
    settings = {"lr": 0.01, "precondition_every": 5, "max_side": max_side, "device": device}
    exact, a = started(*shape, **settings)
    rounded, b = started(*shape, dtype=torch.float32, half_products=True, **settings)
    follow(exact, a, given[:1])
    follow(rounded, b, given[:1])
    # Where the first statistic has no full rank, any basis is right: both start from one.
    for key, value in a.state[exact].items():
        b.state[rounded][key] = value.to(torch.float32, copy=True)
    follow(exact, a, given[1:])
    follow(rounded, b, given[1:])
    start = started(*shape)[0].detach()
    moved, expected = rounded.detach().cpu().double() - start, exact.detach().cpu() - start
    assert float((moved - expected).norm()) < 0.01 * float(expected.norm())
    mine, theirs = b.state[rounded], a.state[exact]
    assert {value.dtype for value in mine.values()} == {torch.float32}
    for key in ("left", "right"):
        if key in theirs:
            assert float((mine[key] - theirs[key]).norm()) < 2e-3 * float(theirs[key].norm())
            q = mine[f"{key}_basis"].double()
            assert_close(q.T @ q, torch.eye(len(q)).to(q), atol=3e-6)
    v, w = (SOAP_READER.rotated(s, o.param_groups[0], exact.shape) for s, o in ((mine, b), (theirs, a)))
    diagonal, reference = v.rotation.diagonal(v.second_moment).double(), w.rotation.diagonal(w.second_moment)
    assert float(((diagonal - reference).abs() / reference).median()) < 0.01


def test_half_products_survive_gradients_that_turn_around():
    """Of low rank and of unlike spaces, which leaves bases that have nothing to do with L, and columns of rounding errors."""
    generator = torch.Generator().manual_seed(0)
    parameter, optimizer = started(150, 40, dtype=torch.float32, precondition_every=4, half_products=True)
    for t in range(40):
        if t % 10 == 0:
            rows, columns = (torch.randn(n, 2, generator=generator) for n in (150, 40))
        parameter.grad = rows @ torch.randn(2, 2, generator=generator) @ columns.T * 10.0 ** (t // 10 * 3 - 6)
        optimizer.step()
    assert bool(torch.isfinite(parameter).all())
    for side in ("left_basis", "right_basis"):
        q = optimizer.state[parameter][side].double()
        assert (q.T @ q - torch.eye(len(q)).double()).abs().max() < 1e-3


def test_double_parameters_are_never_rounded():
    given = gradients(12, 6, 6)
    (a, one), (b, other) = started(6, 6, half_products=True), started(6, 6, half_products=False)
    follow(a, one, given)
    follow(b, other, given)
    assert torch.equal(a, b)


# --- Adam where there is nothing to rotate ----------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("device", DEVICES)
def test_without_bases_it_is_adamw_step_by_step(device, weight_decay, maximize):
    def build(make: Callable[..., torch.optim.Optimizer], **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = mlp(3, 5, 2).to(device)
        settings = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": weight_decay, "maximize": maximize}
        return model, make(model.parameters(), **settings, **more)

    ours, soap = build(SOAP, max_side=0)
    theirs, adamw = build(torch.optim.AdamW, foreach=False)
    for x in torch.randn(20, 8, 3, device=device):
        for model, optimizer in ((ours, soap), (theirs, adamw)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(a, b, rtol=1e-6 if device == "cpu" else 1e-5, atol=1e-7 if device == "cpu" else 1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert {"step", "exp_avg", "exp_avg_sq"} == set(soap.state[a])
        assert_close(soap.state[a]["exp_avg_sq"], adamw.state[b]["exp_avg_sq"], rtol=1e-6 if device == "cpu" else 1e-5)


@pytest.mark.parametrize("shape", [(), (4,), (1, 1), (0, 3), (3, 0)], ids=str)
def test_parameters_that_have_no_two_sides(shape):
    parameter, optimizer = started(*shape)
    before = parameter.detach().clone()
    for _ in range(12):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.numel() == 0 or bool((parameter < before).all())
    if parameter.numel():
        assert "exp_avg_sq" in optimizer.state[parameter]


# --- what the bases are for -------------------------------------------------------------------------------------


def orthogonal(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q


def regression_weights(make: Callable[[nn.Parameter], torch.optim.Optimizer], a: Tensor, b: Tensor) -> Tensor:
    """W of y = W x after 25 steps, with inputs turned by bᵀ, targets by a, and the start by both."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(25, 40, 6, generator=generator, dtype=torch.float64) * torch.linspace(0.2, 2, 6).double()
    y = torch.randn(25, 40, 6, generator=generator, dtype=torch.float64)
    start = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    w = nn.Parameter(a @ start @ b)
    optimizer = make(w)
    for inputs, targets in zip(x @ b, y @ a.T, strict=True):
        optimizer.zero_grad()
        (inputs @ w.T - targets).square().sum(dim=1).mean().backward()
        optimizer.step()
    return w.detach()


def test_rotated_data_give_rotated_weights():
    a, b, one = orthogonal(6, 1), orthogonal(6, 2), torch.eye(6, dtype=torch.float64)
    for make, invariant in (
        (lambda w: SOAP([w], lr=0.05, weight_decay=0.1, precondition_every=1), True),
        (lambda w: torch.optim.AdamW([w], lr=0.05, betas=(0.95, 0.95), weight_decay=0.1), False),
    ):
        straight, turned = regression_weights(make, one, one), regression_weights(make, a, b)
        assert close(turned, a @ straight @ b, atol=1e-7) is invariant


@pytest.mark.parametrize("every", [1, 10])
def test_bases_stay_orthogonal(every):
    """Over 300 steps in float32, with statistics of low rank and eigenvalues over many orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    parameter, optimizer = started(12, 30, dtype=torch.float32, precondition_every=every)
    scales = torch.logspace(0, -6, 30)
    for _ in range(300):
        parameter.grad = torch.randn(12, 3, generator=generator) @ torch.randn(3, 30, generator=generator) * scales
        optimizer.step()
    for side, n in (("left_basis", 12), ("right_basis", 30)):
        q = optimizer.state[parameter][side].double()
        assert (q.T @ q - torch.eye(n).double()).abs().max() < 1e-6
    assert bool(torch.isfinite(parameter).all())


def test_the_second_moment_goes_with_its_columns():
    """Diagonal gradients whose order of size turns around: the bases stay axes, in another order, and V with them."""
    parameter, optimizer = started(4, 4, precondition_every=20, betas=(0.5, 0.5), lr=0.0)
    rising, falling = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.diag(torch.tensor([8.0, 6.0, 4.0, 2.0]))
    follow(parameter, optimizer, torch.stack([rising] + [falling] * 19))
    state = optimizer.state[parameter]
    seen = state["left_basis"].abs().round()
    assert_close(seen, torch.eye(4).double().flip(1))
    before = state["rotated_exp_avg_sq"].clone()
    follow(parameter, optimizer, falling[None])
    assert_close(state["left_basis"].abs(), torch.eye(4).double(), atol=1e-4)
    assert_close(state["right_basis"].abs(), torch.eye(4).double(), atol=1e-4)
    # Before, entry i of the diagonal belonged to axis 3 − i; now each has the second moment of its own axis.
    assert (before.diagonal().diff() > 0).all()
    assert_close(state["rotated_exp_avg_sq"].diagonal(), falling.double().diagonal() ** 2, rtol=1e-4)


def final_loss(make: Callable[[Any], torch.optim.Optimizer], problem: str) -> float:
    torch.manual_seed(0)
    if problem == "quadratic":
        a, b = (orthogonal(10, s) * torch.logspace(0, -1.5, 10).double() for s in (4, 5))
        w = nn.Parameter(torch.zeros(10, 10, dtype=torch.float64))
        target = torch.randn(10, 10, dtype=torch.float64)
        parameters: list[nn.Parameter] = [w]

        def loss() -> Tensor:
            return (a.T @ (w - target) @ b).square().sum()

    else:
        x = torch.randn(256, 10, dtype=torch.float64) @ (orthogonal(10, 6) * torch.logspace(0, -1, 10).double()).T
        y = torch.sin(x @ torch.randn(10, 3, dtype=torch.float64))
        model = mlp(10, 24, 3).double()
        parameters = list(model.parameters())

        def loss() -> Tensor:
            return (model(x) - y).square().mean()

    optimizer = make(parameters)
    for _ in range(200):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return float(loss().detach())


@pytest.mark.parametrize("problem", ["quadratic", "regression"])
def test_it_gets_further_than_adam_in_as_many_steps(problem):
    """Each with the best of three learning rates, Adam with the best of two memories."""
    rates = (1e-2, 3e-2, 1e-1)
    soap = min(final_loss(lambda p, lr=lr: SOAP(p, lr=lr), problem) for lr in rates)
    adam = min(
        final_loss(lambda p, lr=lr, betas=betas: torch.optim.Adam(p, lr=lr, betas=betas), problem)
        for lr in rates
        for betas in ((0.9, 0.999), (0.95, 0.95))
    )
    print(f"{problem}: SOAP {soap:.3g}, Adam {adam:.3g}")
    assert soap < 0.5 * adam


# --- torch's contract -------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def network(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Tanh(), nn.Linear(12, 4)).to(device, dtype)


def batches(steps: int, like: Tensor) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(6, 2, 3, 3, generator=generator).to(like) for _ in range(steps))


def train(model: nn.Module, optimizer: SOAP, data: Any) -> None:
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("route", [through_a_file, copy.deepcopy])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("at", [1, 17])
def test_resumed_in_the_middle_is_uninterrupted_to_the_bit(at, dtype, device, route):
    settings = {"precondition_every": 4, "statistics_every": 3, "weight_decay": 0.01}
    whole = network(dtype, device)
    optimizer = SOAP(whole.parameters(), **settings)
    data = list(batches(34, whole[0].weight))
    train(whole, optimizer, data)
    parts = network(dtype, device)
    first = SOAP(parts.parameters(), **settings)
    train(parts, first, data[:at])
    second = SOAP(parts.parameters())
    second.load_state_dict(route(first.state_dict()))
    train(parts, second, data[at:])
    assert second.param_groups[0]["precondition_every"] == 4
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)
        assert optimizer.state[a].keys() == second.state[b].keys()
        for key, value in optimizer.state[a].items():
            assert value.dtype == second.state[b][key].dtype
            assert torch.equal(value, second.state[b][key]), key


def test_states_from_before_the_choice_of_products_load():
    model, twin = network(), network()
    optimizer, other = SOAP(model.parameters(), lr=0.01), SOAP(twin.parameters())
    data = list(batches(20, model[0].weight))
    train(model, optimizer, data[:7])
    twin.load_state_dict(model.state_dict())
    saved = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if k != "half_products"} for group in saved["param_groups"]]
    other.load_state_dict(copy.deepcopy({**saved, "param_groups": groups}))
    train(model, optimizer, data[7:])
    train(twin, other, data[7:])
    assert other.param_groups[0]["half_products"] is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_copy_goes_on_by_itself():
    model = network()
    optimizer = SOAP(model.parameters(), precondition_every=3)
    train(model, optimizer, batches(5, model[0].weight))
    twin, other = copy.deepcopy((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    train(twin, other, batches(5, model[0].weight))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    train(model, optimizer, batches(5, model[0].weight))
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_parameters_have_a_float32_state_and_follow_float32_ones(dtype, device):
    given = gradients(25, 4, 6).to(dtype)
    small, a = started(4, 6, dtype=dtype, device=device, lr=0.02, precondition_every=5)
    large, b = started(4, 6, dtype=torch.float32, device=device, lr=0.02, precondition_every=5)
    with torch.no_grad():
        large.copy_(small)
    follow(small, a, given)
    follow(large, b, given)
    assert small.dtype == dtype
    assert {value.dtype for value in a.state[small].values()} == {torch.float32}
    for key, value in a.state[small].items():
        assert_close(value, b.state[large][key])
    error = (small.float() - large).abs().max()
    assert 0 < error < 25 * 4 * torch.finfo(dtype).eps


def test_channels_last_and_transposed_parameters_are_the_same_matrices():
    given = gradients(15, 3, 2, 2, 2)
    plain, a = started(3, 2, 2, 2, precondition_every=4)
    strange, b = started(3, 2, 2, 2, precondition_every=4)
    strange.data = strange.data.contiguous(memory_format=torch.channels_last)
    follow(plain, a, given)
    follow(strange, b, given.contiguous())
    assert strange.is_contiguous(memory_format=torch.channels_last)
    assert_close(strange.detach(), plain.detach(), rtol=1e-12, atol=1e-12)
    straight, a = started(4, 6, precondition_every=4)
    turned, b = started(4, 6, precondition_every=4)
    turned.data = turned.data.T.contiguous().T
    follow(straight, a, gradients(15, 4, 6))
    follow(turned, b, gradients(15, 4, 6))
    assert_close(turned.detach(), straight.detach(), rtol=1e-12, atol=1e-12)


def test_maximize_climbs_as_it_would_descend():
    down, a = started(4, 4)
    up, b = started(4, 4, maximize=True)
    follow(down, a, gradients(25, 4, 4))
    follow(up, b, -gradients(25, 4, 4))
    assert torch.equal(down, up)


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    model = network()
    optimizer = SOAP(model.parameters())
    x = next(batches(1, model[0].weight))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    # The convolution's and the layer's first gradients only find their bases; the biases move.
    assert losses[-1] < losses[0]


def test_parameters_without_a_gradient_stay_and_gradients_are_left_alone():
    model = network()
    optimizer = SOAP(model.parameters(), weight_decay=0.5)
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    for x in batches(3, before):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        kept = model[3].weight.grad.clone()
        optimizer.step()
        assert torch.equal(model[3].weight.grad, kept)
    assert torch.equal(before, model[0].weight)
    assert model[0].weight not in optimizer.state


def test_a_gradient_of_zeros_first_is_adam_until_the_first_refresh():
    """A low-rank adapter starts so: one of its factors is zero, and the other has no gradient yet."""
    parameter, optimizer = started(4, 5, precondition_every=3)
    follow(parameter, optimizer, torch.cat([torch.zeros(1, 4, 5), gradients(20, 4, 5)]))
    assert bool(torch.isfinite(parameter).all())
    q = optimizer.state[parameter]["left_basis"]
    assert_close(q.T @ q, torch.eye(4).double())
    assert not close(q.abs(), q.abs().round(), atol=1e-3)


def test_sparse_and_complex_parameters_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = SOAP(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(SettingError, match=r"shape \(5, 3\) has a sparse gradient .* sparse=False"):
        optimizer.step()
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    optimizer = SOAP([parameter])
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(SettingError, match=r"shape \(2, 2\) is complex"):
        optimizer.step()


def test_a_first_gradient_that_is_not_finite_is_named_and_forgotten():
    parameter, optimizer = started(3, 3)
    parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(StateError, match=r"first gradient of a parameter of shape \(3, 3\)"):
        optimizer.step()
    follow(parameter, optimizer, gradients(5, 3, 3))
    assert bool(torch.isfinite(parameter).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": -1e-3}, "lr must be finite and at least 0, got -0.001"),
        ({"lr": float("nan")}, "lr must be finite and at least 0, got nan"),
        ({"eps": -1.0}, "eps must be finite and at least 0, got -1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be finite and at least 0, got -0.1"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers .* got \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers .* got \(0.9,\)"),
        ({"shampoo_beta": 1.0}, "shampoo_beta must be at least 0 and below 1, .* got 1.0"),
        ({"precondition_every": 0}, "precondition_every must be a whole number of at least 1, got 0"),
        ({"statistics_every": 2.5}, "statistics_every must be a whole number of at least 1, got 2.5"),
        ({"max_side": -1}, "max_side must be a whole number of at least 0, got -1"),
        ({"maximize": 1}, "maximize must be True or False, got 1"),
        ({"half_products": 1}, "half_products must be True, False or None, got 1"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(SettingError, match=message):
        SOAP(network().parameters(), **changes)
    optimizer = SOAP(network()[0].parameters())
    with pytest.raises(SettingError, match=message):
        optimizer.add_param_group({"params": network()[3].parameters(), **changes})
    assert len(optimizer.param_groups) == 1


def test_another_optimisers_state_is_refused():
    model = network()
    with pytest.raises(MatchError, match="not the state dict of a SOAP: a parameter group has no 'shampoo_beta'"):
        SOAP(model.parameters()).load_state_dict(torch.optim.Adam(model.parameters()).state_dict())


def test_groups_have_settings_of_their_own():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[3].parameters(), "max_side": 0}]
    optimizer = SOAP(groups, precondition_every=2)
    before = model[0].weight.detach().clone()
    train(model, optimizer, batches(5, before))
    assert torch.equal(before, model[0].weight)
    assert "left_basis" in optimizer.state[model[0].weight]
    assert "left_basis" not in optimizer.state[model[3].weight]


# --- what a posterior reads -------------------------------------------------------------------------------------


def statistics(state: Any, group: Any, parameter: Tensor) -> Rotated | None:
    return SOAP_READER.rotated(state, group, parameter.shape)


@pytest.mark.parametrize(("shape", "max_side"), [((4, 3), 10_000), ((3, 2, 2), 10_000), ((4, 3), 3)])
def test_the_statistics_are_those_of_a_kronecker_factored_gaussian(shape, max_side):
    """Against the dense covariance (Q_R ⊗ Q_L) diag(1/(w v̂ᵖ + δ)) (Q_R ⊗ Q_L)ᵀ of the stacked columns."""
    parameter, optimizer = started(*shape, max_side=max_side, precondition_every=3, lr=0.01)
    follow(parameter, optimizer, gradients(11, *shape))
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    found = statistics(state, group, parameter)
    saved = optimizer.state_dict()
    again = statistics(saved["state"][0], saved["param_groups"][0], parameter)
    assert torch.equal(found.second_moment, again.second_moment)
    corrected = state["rotated_exp_avg_sq"] / (1 - 0.95 ** float(state["step"]))
    m = shape[0]
    v = corrected.reshape(m, -1)
    assert_close(found.second_moment.reshape(m, -1), v)
    n = v.shape[1]
    rotation, dims = found.rotation, len(shape)
    q_left = torch.eye(m).double() if rotation.left is None else rotation.left
    q_right = torch.eye(n).double() if rotation.right is None else rotation.right
    q = torch.kron(q_right, q_left)
    variance = 1 / (7.0 * found.second_moment**0.5 + 0.3)
    dense = q @ torch.diag(variance.reshape(m, n).T.reshape(-1)) @ q.T

    def vec(x: Tensor) -> Tensor:
        return x.reshape(m, n).T.reshape(-1)

    assert_close(vec(rotation.diagonal(variance)), dense.diagonal())
    noise = torch.randn(found.second_moment.shape, dtype=torch.float64)
    assert_close(vec(rotation.out_of(noise, dims)), q @ vec(noise))
    weights = torch.randn(shape, dtype=torch.float64)
    assert_close(vec(rotation.into(weights, dims)), q.T @ vec(weights))
    assert_close(rotation.out_of(rotation.into(weights, dims), dims), weights)
    assert rotation.diagonal(variance).shape == rotation.out_of(noise, dims).shape == parameter.shape


@pytest.mark.parametrize(("shape", "max_side"), [((4, 3), 0), ((5,), 9)])
def test_what_is_adams_has_no_bases_and_is_read_as_adams(shape, max_side):
    parameter, optimizer = started(*shape, max_side=max_side)
    follow(parameter, optimizer, gradients(11, *shape, 1)[..., 0])
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    assert statistics(state, group, parameter) is None
    model = nn.ParameterDict({"only": parameter})
    assert_close(read_optimizer(model, optimizer).second_moment["only"], state["exp_avg_sq"] / (1 - 0.95**11))


def test_statistics_that_were_read_do_not_change_with_training():
    parameter, optimizer = started(4, 3, precondition_every=2)
    follow(parameter, optimizer, gradients(6, 4, 3))
    found = statistics(optimizer.state[parameter], optimizer.param_groups[0], parameter)
    assert isinstance(found, Rotated)
    kept = copy.deepcopy(found)
    follow(parameter, optimizer, gradients(6, 4, 3, seed=1))
    assert torch.equal(found.second_moment, kept.second_moment)
    for side in ("left", "right"):
        assert torch.equal(getattr(found.rotation, side), getattr(kept.rotation, side))


def test_the_reader_finds_the_state_live_and_saved():
    model = network()
    optimizer = SOAP(model.parameters(), precondition_every=3)
    train(model, optimizer, batches(8, model[0].weight))
    live = match_optimizers(model, optimizer, SOAP_READER).entries
    saved = match_state_dict(model, through_a_file(optimizer.state_dict()), SOAP_READER).entries
    assert [entry.name for entry in live] == [entry.name for entry in saved] == [n for n, _ in model.named_parameters()]
    for a, b in zip(live, saved, strict=True):
        ours, theirs = (statistics(entry.state, entry.group, entry.parameter) for entry in (a, b))
        assert (ours is None) == (theirs is None) == (a.parameter.dim() < 2)
        if ours is not None:
            assert torch.equal(ours.second_moment, theirs.second_moment)
            assert ours.second_moment.shape == a.parameter.shape
    curvature = read_optimizer(model, optimizer, reader=SOAP_READER)
    for entry in (entry for entry in live if entry.parameter.dim() > 1):
        found = statistics(entry.state, entry.group, entry.parameter)
        assert_close(curvature.second_moment[entry.name], found.rotation.diagonal(found.second_moment))
        # A rotation keeps the trace.
        assert_close(curvature.second_moment[entry.name].sum(), found.second_moment.sum())


def test_no_reader_of_adam_takes_the_rotated_moment_for_the_weights_own():
    model = network()
    optimizer = SOAP(model.parameters())
    train(model, optimizer, batches(3, model[0].weight))
    with pytest.raises(StateError, match="exp_avg_sq"):
        read_optimizer(model, optimizer, reader="adam")


def test_statistics_need_a_step_and_soaps_state():
    parameter, optimizer = started(4, 3)
    follow(parameter, optimizer, gradients(1, 4, 3))
    model = nn.ParameterDict({"only": parameter})
    with pytest.raises(StateError, match="has not taken a step"):
        Posterior.from_optimizer(model, optimizer, n_data=10, structure="kronecker")
    state = {"rotated_exp_avg_sq": torch.ones(4, 3), "left_basis": torch.eye(4)}
    with pytest.raises(KeyError, match="step"):
        statistics(state, optimizer.param_groups[0], parameter)
