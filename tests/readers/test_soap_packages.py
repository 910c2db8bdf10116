"""Other packages' SOAPs: their states, written out by hand or live, against dense matrices in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import BayesAdamError, MatchError
from bayesadam.readers import identify_reader, read_optimizer, read_state_dict, registry
from floats import assert_close
from readers.references import through_a_file

BETA, SHAMPOO_BETA, N, DELTA = 0.9, 0.8, 40, 0.3
# A vector, a matrix, a square one, one with a side of 1, and convolutions' weights; no two of one shape.
SHAPES = [(3,), (3, 4), (4, 4), (1, 5), (4, 3, 2), (3, 2, 2, 2)]


class Weights(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.all = nn.ParameterList(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def gradients(shape: tuple[int, ...], n: int, seed: int = 0) -> list[np.ndarray]:
    """Correlated along every dimension, with spectra far enough apart that a basis is no matter of rounding."""
    rng = np.random.default_rng([seed, *shape])
    found = rng.standard_normal((n, *shape))
    for axis, side in enumerate(shape):
        mix = np.linalg.qr(rng.standard_normal((side, side)))[0] * 2.0 ** -np.arange(side)
        found = np.moveaxis(np.moveaxis(found, axis + 1, -1) @ mix.T, -1, axis + 1)
    return list(found)


# --- the algorithm, by hand -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """What SOAP has after its steps: V as it is kept, one basis a dimension (None: not rotated), the gradients in V."""

    moment: np.ndarray
    bases: list[np.ndarray | None]
    steps: int

    def dense(self, beta: float = BETA) -> np.ndarray:
        """V̂ over all weights in row-major order: (Q₁ ⊗ Q₂ ⊗ …) diag(v̂) (Q₁ ⊗ Q₂ ⊗ …)ᵀ."""
        whole = [np.eye(s) if q is None else q for q, s in zip(self.bases, self.moment.shape, strict=True)]
        q = reduce(np.kron, whole)
        return q @ np.diag(self.moment.ravel() / (1 - beta**self.steps)) @ q.T


def unfolded(g: np.ndarray, axis: int) -> np.ndarray:
    return np.moveaxis(g, axis, 0).reshape(g.shape[axis], -1)


def projected(g: np.ndarray, bases: Sequence[np.ndarray | None]) -> np.ndarray:
    """G ×₁ Q₁ᵀ ×₂ Q₂ᵀ …"""
    for k, q in enumerate(bases):
        if q is not None:
            g = np.moveaxis(np.tensordot(q, g, axes=(0, k)), 0, k)
    return g


def soap(given: Sequence[np.ndarray], every: int, *, vectors: bool = False, longest: int = 100) -> Kept:
    """SOAP's V: the first gradient finds the bases; a refresh is one power iteration, columns in falling order."""
    first = given[0]
    turned = [side <= longest and (first.ndim > 1 or vectors) for side in first.shape]
    sums = [(1 - SHAMPOO_BETA) * unfolded(first, k) @ unfolded(first, k).T for k in range(first.ndim)]
    bases = [np.linalg.eigh(s)[1][:, ::-1] if turn else None for s, turn in zip(sums, turned, strict=True)]
    moment = np.zeros_like(first)
    for t, g in enumerate(given[1:], start=1):
        moment = BETA * moment + (1 - BETA) * projected(g, bases) ** 2
        for k in range(g.ndim):
            sums[k] = SHAMPOO_BETA * sums[k] + (1 - SHAMPOO_BETA) * unfolded(g, k) @ unfolded(g, k).T
            q = bases[k]
            if t % every == 0 and q is not None:
                order = np.argsort(-np.diag(q.T @ sums[k] @ q), kind="stable")
                moment = np.take(moment, order, axis=k)
                bases[k] = np.linalg.qr(sums[k] @ q[:, order])[0]
    return Kept(moment, bases, len(given) - 1)


# --- the layouts, as verified on the packages named -----------------------------------------------------------------


def tensor(array: np.ndarray) -> Tensor:
    return torch.tensor(array.copy())


SHARED = {
    "lr": 1e-3,
    "betas": (0.95, BETA),
    "shampoo_beta": SHAMPOO_BETA,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "merge_dims": False,
    "precondition_1d": False,
    "correct_bias": True,
    "precondition_frequency": 3,
}
# nikhilvyas/SOAP, soap.py as it stands at f42d296, read and not run: the count is the parameter's and leaves the first
# gradient out. pytorch_optimizer 4.1.0 (3.8.0, 3.10.0 and 4.0.0 too, which refresh a step earlier or at the same): the
# group's count has the first gradient in.
SOAPS = {
    "soap-reference": {"max_precond_dim": 100, "normalize_grads": False},
    "soap-pytorch-optimizer": {"max_precondition_dim": 100, "normalize_gradient": False},
}


def laid_out(name: str, all_kept: Sequence[Kept]) -> dict[str, Any]:
    """The state dict of one of them."""
    in_state = name == "soap-reference"
    states = {
        i: {
            "exp_avg": torch.zeros(kept.moment.shape, dtype=torch.float64),
            "exp_avg_sq": tensor(kept.moment),
            "GG": [[] if q is None else tensor(q @ q.T) for q in kept.bases],
            "Q": [[] if q is None else tensor(q) for q in kept.bases],
            "precondition_frequency": 3,
            "shampoo_beta": SHAMPOO_BETA,
            **({"step": kept.steps} if in_state else {}),
        }
        for i, kept in enumerate(all_kept)
    }
    count = {} if in_state else {"step": all_kept[0].steps + 1}
    return {"state": states, "param_groups": [{**SHARED, **SOAPS[name], **count, "params": list(states)}]}


def kept_of(shapes: Sequence[tuple[int, ...]] = SHAPES, steps: int = 12, every: int = 3, **kwargs: Any) -> list[Kept]:
    return [soap(gradients(shape, steps), every, **kwargs) for shape in shapes]


def close(found: Tensor, expected: np.ndarray, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    assert_close(
        found.detach().double().reshape(expected.shape), torch.from_numpy(expected.copy()), rtol=rtol, atol=atol
    )


def dense_of(posterior: ba.Posterior, name: str) -> np.ndarray:
    """V̂ as the posterior has it, over the weights in row-major order."""
    v, basis = posterior.curvature.second_moment[name].double(), posterior.curvature.bases.get(name)
    if basis is None:
        return torch.diag(v.flatten()).numpy()
    rows = v.shape[0] if v.dim() > 1 else 1
    left = torch.eye(rows).double() if basis.left is None else basis.left.double()
    right = torch.eye(v.numel() // rows).double() if basis.right is None else basis.right.double()
    both = torch.kron(left, right)
    return (both @ torch.diag(v.flatten()) @ both.T).numpy()


# --- SOAP: what is read is what was kept ----------------------------------------------------------------------------


def test_a_state_of_the_soap_of_bayesadam_0_2_is_still_read():
    shapes = [(3, 4), (4,)]
    matrix, vector = kept_of(shapes)
    left, right = (tensor(basis) for basis in matrix.bases)
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    bases = {"left_basis": left, "right_basis": right, "left": left @ left.mT, "right": right @ right.mT}
    rotated = {"step": 11, "exp_avg": zeros[0], "rotated_exp_avg_sq": tensor(matrix.moment), **bases}
    plain = {"step": 11, "exp_avg": zeros[1], "exp_avg_sq": tensor(vector.moment)}
    group = {**SHARED, "precondition_every": 3, "params": [0, 1]}
    state_dict = through_a_file({"state": {0: rotated, 1: plain}, "param_groups": [group]})
    assert identify_reader(state_dict).name == "soap"
    posterior = ba.Posterior.from_state_dict(
        Weights(shapes), state_dict, N, optimizer="soap", prior_precision=DELTA, structure="kronecker"
    )
    curvature = read_state_dict(Weights(shapes), state_dict, optimizer="soap")
    for name, kept in (("all.0", matrix), ("all.1", vector)):
        close(torch.from_numpy(dense_of(posterior, name)), kept.dense())
        close(curvature.second_moment[name], np.diag(kept.dense()).copy())


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("soap-reference", {}), ("soap-pytorch-optimizer", {"vectors": True}), ("soap-reference", {"longest": 3})],
    ids=str,
)
def test_a_saved_soap_is_told_and_is_the_dense_matrix(name, kwargs, tmp_path):
    all_kept = kept_of(**kwargs)
    state_dict = through_a_file(laid_out(name, all_kept))
    assert identify_reader(state_dict).name == name
    model = Weights()
    torch.save({"model": model.state_dict(), "optimizer": state_dict}, tmp_path / "last.pt")
    read = ba.Posterior.from_checkpoint(tmp_path / "last.pt", Weights(), N, structure="kronecker")
    curvature = read_state_dict(model, state_dict, optimizer=name)
    posterior = ba.Posterior.from_state_dict(
        model, state_dict, N, optimizer=name, prior_precision=DELTA, structure="kronecker"
    )
    assert set(curvature.steps.values()) == {11}
    assert set(curvature.reader.values()) == {name}
    for i, kept in enumerate(all_kept):
        at, dense = f"all.{i}", kept.dense()
        close(curvature.second_moment[at], np.diag(dense).copy())
        for q in (posterior, read):
            close(torch.from_numpy(dense_of(q, at)), dense)
        assert (at in posterior.curvature.bases) == any(q is not None for q in kept.bases)
        # The paper's root of V needs no bases where V is dense.
        values, vectors = np.linalg.eigh(dense)
        sigma = vectors @ np.diag(1 / (N * np.sqrt(values.clip(0)) + DELTA)) @ vectors.T
        close(posterior.variance[at], np.diag(sigma).copy(), rtol=1e-6)


# --- what must not be misread ---------------------------------------------------------------------------------------


def unmarked(state: dict[str, Any], **entries: Any) -> dict[str, Any]:
    """Adam's state and group, and more in the state."""
    group = {"lr": 0.1, "betas": (0.9, BETA), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    return {"state": {0: {"step": torch.tensor(3.0), **state, **entries}}, "param_groups": [group]}


def adam_state(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"exp_avg": torch.zeros(shape), "exp_avg_sq": torch.rand(shape)}


@pytest.mark.parametrize(
    "entries",
    [
        {"Q": [torch.eye(4), torch.eye(4)]},
        {"Q_L": torch.eye(4), "Q_R": torch.eye(4)},
        {"projector": torch.eye(4)},
        {"whatever": (torch.eye(4), None)},
        {"Q.0": torch.eye(4)},
        {"Q": {0: torch.eye(4)}},
        {"small": torch.eye(2)},
    ],
    ids=lambda entries: "-".join(entries) + type(next(iter(entries.values()))).__name__,
)
def test_bases_that_nobody_described_are_refused(entries):
    state_dict = unmarked(adam_state((4, 4)), **entries)
    with pytest.raises(MatchError, match="no reader finds"):
        identify_reader(state_dict)
    with pytest.raises(MatchError, match=f"'all.0' keeps bases .*{next(iter(entries))}.*rotated coordinates"):
        read_state_dict(Weights([(4, 4)]), state_dict, optimizer="adam")


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a basis of another side": (lambda state: state.update(Q=[state["Q"][0], torch.eye(3).double()]), "have shapes"),
    "bases in another order": (lambda state: state["Q"].reverse(), "have shapes"),
    "a basis too many": (lambda state: state["Q"].append([]), "have shapes"),
    "a basis that is longer": (lambda state: state["Q"][0].mul_(1.05), "is not orthogonal"),
    "NaN in a basis": (lambda state: state["Q"][0].fill_(torch.nan), "is not orthogonal"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_states_are_refused(case):
    damage, words = DAMAGE[case]
    for name, structure in (("soap-reference", "diagonal"), ("soap-pytorch-optimizer", "kronecker")):
        state_dict = laid_out(name, kept_of([(3, 4)]))
        damage(state_dict["state"][0])
        with pytest.raises(MatchError, match=words):
            ba.Posterior.from_state_dict(Weights([(3, 4)]), state_dict, N, optimizer=name, structure=structure)


@pytest.mark.parametrize("name", SOAPS)
def test_another_models_state_is_refused(name):
    state_dict = laid_out(name, kept_of([(3, 4)]))
    for shape in [(4, 3), (12,), (2, 6)]:
        with pytest.raises(BayesAdamError, match="another model"):
            read_state_dict(Weights([shape]), state_dict, optimizer=name)


@pytest.mark.parametrize("name", SOAPS)
def test_merged_dimensions_are_refused_where_two_orders_are_possible(name):
    state_dict = laid_out(name, kept_of([(4, 3, 2)]))
    state_dict["param_groups"][0]["merge_dims"] = True
    with pytest.raises(MatchError, match="train with merge_dims=False"):
        read_state_dict(Weights([(4, 3, 2)]), state_dict, optimizer=name)
    # A matrix whose sides were merged into one has one basis, and one that was too large to merge has its own two.
    state_dict = laid_out(name, kept_of([(3, 4)]))
    state_dict["param_groups"][0]["merge_dims"] = True
    close(
        read_state_dict(Weights([(3, 4)]), state_dict, optimizer=name).second_moment["all.0"],
        np.diag(kept_of([(3, 4)])[0].dense()).copy(),
    )
    state_dict["state"][0]["Q"] = [torch.eye(12, dtype=torch.float64)]
    with pytest.raises(MatchError, match="merge_dims=False"):
        read_state_dict(Weights([(3, 4)]), state_dict, optimizer=name)


# --- the packages themselves, where they are installed --------------------------------------------------------------


def follow(optimizer: torch.optim.Optimizer, model: Weights, all_given: Sequence[Sequence[np.ndarray]]) -> None:
    for at in zip(*all_given, strict=True):
        for parameter, g in zip(model.all, at, strict=True):
            parameter.grad = tensor(g).to(parameter.dtype)
        optimizer.step()


# Gradients of these leave no direction out, so that a basis has its signs alone to choose.
FULL = [(3, 4), (4, 4), (4, 3, 2), (3, 2, 2, 2)]


@pytest.mark.parametrize("every", [1, 4])
def test_pytorch_optimizers_soap(optimizer_class, every):
    cls = optimizer_class("pytorch_optimizer.optimizer.soap.SOAP")
    model = Weights(FULL)
    settings = {"lr": 1e-3, "betas": (0.95, BETA), "shampoo_beta": SHAMPOO_BETA}
    optimizer = cls(model.parameters(), precondition_frequency=every, **settings)
    all_given = [gradients(shape, 14) for shape in FULL]
    follow(optimizer, model, all_given)
    assert registry.reader_of(optimizer) is registry.reader_named("soap-pytorch-optimizer")
    check_live(model, optimizer, [soap(given, every) for given in all_given])


def check_live(model: Weights, optimizer: torch.optim.Optimizer, all_kept: Sequence[Kept]) -> None:
    name = registry.reader_of(optimizer).name
    curvature = read_optimizer(model, optimizer)
    assert set(curvature.steps.values()) == {all_kept[0].steps}
    live = ba.Posterior.from_optimizer(model, optimizer, N, structure="kronecker")
    saved = ba.Posterior.from_state_dict(
        model, through_a_file(optimizer.state_dict()), N, optimizer=name, structure="kronecker"
    )
    for i, kept in enumerate(all_kept):
        at, dense = f"all.{i}", kept.dense()
        # The packages' refreshes are in float32.
        close(curvature.second_moment[at], np.diag(dense).copy(), rtol=1e-4, atol=1e-6 * np.trace(dense))
        close(torch.from_numpy(dense_of(live, at)), dense, rtol=1e-4, atol=1e-5 * np.trace(dense))
        np.testing.assert_array_equal(dense_of(saved, at), dense_of(live, at))
    for wrong in ("adam", "adamw", "lamb", "soap"):
        with pytest.raises(MatchError):
            read_optimizer(model, optimizer, reader=wrong)
