"""Other packages' SOAPs and Shampoos: their states, written out by hand or live, against dense matrices in float64."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import BayesAdamError, MatchError, SettingError, StateError
from bayesadam.readers import StateReader, identify_reader, read_optimizer, read_state_dict, registry
from floats import approx, assert_close

BETA, SHAMPOO_BETA, N, DELTA = 0.9, 0.8, 40, 0.3
# A vector, a matrix, a square one, one with a side of 1, and convolutions' weights; no two of one shape.
SHAPES = [(3,), (3, 4), (4, 4), (1, 5), (4, 3, 2), (3, 2, 2, 2)]
SOAPS = ["soap-reference", "soap-pytorch-optimizer"]


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


def listed_state(kept: Kept) -> dict[str, Any]:
    bases = [[] if q is None else tensor(q) for q in kept.bases]
    return {
        "exp_avg": torch.zeros(kept.moment.shape, dtype=torch.float64),
        "exp_avg_sq": tensor(kept.moment),
        "GG": [[] if q is None else tensor(q @ q.T) for q in kept.bases],
        "Q": bases,
        "precondition_frequency": 3,
        "shampoo_beta": SHAMPOO_BETA,
    }


SHARED = {
    "lr": 1e-3,
    "betas": (0.95, BETA),
    "shampoo_beta": SHAMPOO_BETA,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "merge_dims": False,
    "precondition_1d": False,
}


def soap_reference(all_kept: Sequence[Kept]) -> dict[str, Any]:
    """nikhilvyas/SOAP, soap.py as it stands at f42d296, read and not run:
    the count is the parameter's and leaves the first gradient out.
    """
    group = {
        **SHARED,
        "precondition_frequency": 3,
        "max_precond_dim": 100,
        "normalize_grads": False,
        "correct_bias": True,
    }
    states = {i: {"step": kept.steps, **listed_state(kept)} for i, kept in enumerate(all_kept)}
    return {"state": states, "param_groups": [{**group, "params": list(states)}]}


def soap_pytorch_optimizer(all_kept: Sequence[Kept]) -> dict[str, Any]:
    """pytorch_optimizer 4.1.0 (3.8.0, 3.10.0 and 4.0.0 too, which refresh a step earlier or at the same):
    the group's count has the first gradient in.
    """
    group = {
        **SHARED,
        "precondition_frequency": 3,
        "max_precondition_dim": 100,
        "correct_bias": True,
        "normalize_gradient": False,
        "step": all_kept[0].steps + 1,
    }
    states = {i: listed_state(kept) for i, kept in enumerate(all_kept)}
    return {"state": states, "param_groups": [{**group, "params": list(states)}]}


def soap_heavyball(all_kept: Sequence[Kept]) -> dict[str, Any]:
    """heavyball 3.2.1 with merge_dims=False: a view of each parameter, a leading 1 everywhere, V already corrected."""
    group = {
        **SHARED,
        "max_precond_dim": 100,
        "split": False,
        "ecc": None,
        "param_ecc": None,
        "step": None,
        "step_count": torch.tensor(all_kept[0].steps + 1),
    }
    states = {}
    for i, kept in enumerate(all_kept):
        bases = [None if q is None else tensor(q[None]) for q in kept.bases]
        corrected = kept.moment / (1 - BETA ** max(kept.steps, 1))
        states[i] = {
            0: {
                "is_initialized": {0, 2, 3},
                "scale_by_soap_exp_avg_2": torch.zeros(1, *kept.moment.shape, dtype=torch.float64),
                "scale_by_soap_exp_avg_sq_2": tensor(corrected[None]),
                # A vector that is not rotated, and a matrix with no side to rotate, have one None.
                "scale_by_soap_Q_3": [None] if all(q is None for q in bases) else bases,
                "scale_by_soap_GG_3": [None if q is None else q @ q.mT for q in bases],
            }
        }
    return {"state": states, "param_groups": [{**group, "params": list(states)}]}


LAYOUTS: dict[str, Callable[[Sequence[Kept]], dict[str, Any]]] = {
    "soap-reference": soap_reference,
    "soap-pytorch-optimizer": soap_pytorch_optimizer,
}


def kept_of(shapes: Sequence[tuple[int, ...]] = SHAPES, steps: int = 12, every: int = 3, **kwargs: Any) -> list[Kept]:
    return [soap(gradients(shape, steps), every, **kwargs) for shape in shapes]


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def close(found: Tensor, expected: np.ndarray, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    assert_close(
        found.detach().double().reshape(expected.shape), torch.from_numpy(expected.copy()), rtol=rtol, atol=atol
    )


def dense_of(posterior: ba.Posterior, name: str) -> np.ndarray:
    """V̂ as the posterior has it, over the weights in row-major order."""
    v, basis = posterior.structure.second_moment[name].double(), posterior.structure.bases.get(name)
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


@pytest.mark.parametrize("kwargs", [{}, {"vectors": True}, {"longest": 3}], ids=["plain", "vectors", "one-sided"])
@pytest.mark.parametrize("name", SOAPS)
def test_a_saved_soap_is_the_dense_matrix(name, kwargs):
    all_kept = kept_of(**kwargs)
    state_dict = through_a_file(LAYOUTS[name](all_kept))
    model = Weights()
    curvature = read_state_dict(model, state_dict, optimizer=name)
    posterior = ba.Posterior.from_state_dict(
        model, state_dict, N, optimizer=name, prior_precision=DELTA, structure="kronecker"
    )
    assert set(curvature.steps.values()) == {11}
    assert set(curvature.reader.values()) == {name}
    for i, kept in enumerate(all_kept):
        at, dense = f"all.{i}", kept.dense()
        close(curvature.second_moment[at], np.diag(dense).copy())
        close(torch.from_numpy(dense_of(posterior, at)), dense)
        assert (at in posterior.structure.bases) == any(q is not None for q in kept.bases)
        # The paper's root of V needs no bases where V is dense.
        values, vectors = np.linalg.eigh(dense)
        sigma = vectors @ np.diag(1 / (N * np.sqrt(values.clip(0)) + DELTA)) @ vectors.T
        close(posterior.variance[at], np.diag(sigma).copy(), rtol=1e-6)


@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) > 1], ids=str)
def test_v_is_the_average_square_along_each_direction_of_bases_that_stand_still(shape):
    given = gradients(shape, 30)
    kept = soap(given, every=1000)
    model = Weights([shape])
    posterior = ba.Posterior.from_state_dict(
        model, soap_reference([kept]), N, optimizer="soap-reference", structure="kronecker"
    )
    v = dense_of(posterior, "all.0")
    ages = BETA ** np.arange(len(given) - 2, -1, -1)
    flat = np.stack([g.ravel() for g in given[1:]])
    columns = reduce(np.kron, [np.eye(s) if q is None else q for q, s in zip(kept.bases, shape, strict=True)]).T
    for u in columns:
        assert u @ v @ u == approx(np.average((flat @ u) ** 2, weights=ages), rel=1e-9)
    assert np.trace(v) == approx(np.average((flat**2).sum(axis=1), weights=ages), rel=1e-9)


def test_with_axes_for_bases_the_diagonal_is_adams():
    given = gradients((3, 4), 20)
    moment = np.zeros((3, 4))
    for g in given[1:]:
        moment = BETA * moment + (1 - BETA) * g**2
    state_dict = soap_reference([Kept(moment, [np.eye(3)[:, [2, 0, 1]].T, np.eye(4)], 19)])
    state_dict["state"][0]["exp_avg_sq"] = tensor(moment[[1, 2, 0]])
    found = read_state_dict(Weights([(3, 4)]), state_dict, optimizer="soap-reference").second_moment["all.0"]
    ages = BETA ** np.arange(18, -1, -1)
    close(found, np.average(np.stack(given[1:]) ** 2, axis=0, weights=ages))


def laplace(name: str, model: nn.Module, all_kept: list[Kept]) -> ba.Posterior:
    """Laplace's posterior, p = 1 at batch size 8, out of the state that the package `name` would have."""
    settings = {"prior_precision": DELTA, "structure": "kronecker", "power": 1, "batch_size": 8}
    return ba.Posterior.from_state_dict(model, LAYOUTS[name](all_kept), N, optimizer=name, **settings)


def covariance(kept: Kept) -> Tensor:
    """Its (N B V̂ + δ)⁻¹, dense."""
    return tensor(np.linalg.inv(N * 8 * kept.dense() + DELTA * np.eye(kept.moment.size)))


@pytest.mark.parametrize("name", SOAPS)
def test_draws_and_densities_are_those_of_the_dense_gaussian(name):
    shapes = [(3, 4), (3, 2, 2)]
    all_kept = kept_of(shapes)
    model = Weights(shapes)
    posterior = laplace(name, model, all_kept)
    draws = posterior.sample(20_000, generator=torch.Generator().manual_seed(1))
    total, values = 0.0, {}
    for i, kept in enumerate(all_kept):
        sigma = covariance(kept)
        at = f"all.{i}"
        scale = sigma.diagonal().sqrt()
        gap = (torch.cov(draws[at].flatten(1).T) - sigma) / (scale[:, None] * scale)
        assert float(gap.abs().max()) < 6 / 20_000**0.5
        values[at] = posterior.mode[at] + 0.1
        mean = posterior.mode[at].flatten()
        total += float(torch.distributions.MultivariateNormal(mean, sigma).log_prob(values[at].flatten()))
    assert float(posterior.log_prob(values)) == approx(total, rel=1e-7)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("name", SOAPS)
def test_the_linearised_predictive_is_the_dense_one(name, vectors):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()
    parameters = {at: p.detach() for at, p in model.named_parameters()}
    all_kept = kept_of([tuple(p.shape) for p in parameters.values()], vectors=vectors)
    posterior = laplace(name, model, all_kept)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    expected = torch.zeros(5, 2, 2, dtype=torch.float64)
    for at, kept in zip(parameters, all_kept, strict=True):
        rows = jacobians[at].flatten(2)
        expected += rows @ covariance(kept) @ rows.mT
    assert_close(
        posterior.predict(x, likelihood="regression", covariance=True).covariance, expected, rtol=1e-6, atol=1e-10
    )


@pytest.mark.parametrize("name", SOAPS)
def test_saving_and_loading(name, tmp_path):
    model = Weights()
    posterior = ba.Posterior.from_state_dict(model, LAYOUTS[name](kept_of()), N, optimizer=name, structure="kronecker")
    posterior.save(tmp_path / "posterior.safetensors")
    again = ba.Posterior.load(tmp_path / "posterior.safetensors", model)
    for i in range(len(SHAPES)):
        np.testing.assert_array_equal(dense_of(again, f"all.{i}"), dense_of(posterior, f"all.{i}"))


def test_merged_dimensions_of_heavyball_are_one_side():
    """heavyball merges all but the first dimension by default: V and the bases are those of the matrix."""
    kept = soap([g.reshape(3, 8) for g in gradients((3, 2, 2, 2), 12)], 3)
    state_dict = soap_heavyball([kept])
    state_dict["param_groups"][0]["merge_dims"] = True
    model = Weights([(3, 2, 2, 2)])
    close(
        read_state_dict(model, state_dict, optimizer="soap-heavyball").second_moment["all.0"],
        np.diag(kept.dense()).copy(),
    )
    posterior = ba.Posterior.from_state_dict(model, state_dict, N, optimizer="soap-heavyball", structure="kronecker")
    close(torch.from_numpy(dense_of(posterior, "all.0")), kept.dense())


def test_sixteen_bit_states_are_read_in_thirty_two():
    kept = kept_of([(3, 4)])[0]
    state_dict = soap_reference([kept])
    state = state_dict["state"][0]
    state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    state["Q"] = [q.bfloat16() for q in state["Q"]]
    model = Weights([(3, 4)]).bfloat16()
    posterior = ba.Posterior.from_state_dict(model, state_dict, N, optimizer="soap-reference", structure="kronecker")
    assert posterior.structure.second_moment["all.0"].dtype == torch.float32
    close(torch.from_numpy(dense_of(posterior, "all.0")), kept.dense(), rtol=0.1, atol=0.02 * np.trace(kept.dense()))


@pytest.mark.parametrize("name", SOAPS)
def test_reading_changes_nothing_and_shares_nothing(name):
    state_dict = LAYOUTS[name](kept_of())
    before = copy.deepcopy(state_dict)
    posterior = ba.Posterior.from_state_dict(Weights(), state_dict, N, optimizer=name, structure="kronecker")
    dense = [dense_of(posterior, f"all.{i}") for i in range(len(SHAPES))]
    old, new = list(tensors_in(before)), list(tensors_in(state_dict))
    assert len(old) == len(new) > 20
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    for kept in new:
        if kept.dim() > 0:
            kept.fill_(7.0)
    assert all(np.array_equal(dense_of(posterior, f"all.{i}"), d) for i, d in enumerate(dense))


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return list(itertools.chain.from_iterable(tensors_in(v) for v in inner))


@pytest.mark.parametrize("name", SOAPS)
def test_a_state_with_the_first_gradient_alone_is_not_trained(name):
    with pytest.raises(StateError, match="has not taken a step yet"):
        read_state_dict(
            Weights([(3, 4)]), LAYOUTS[name]([Kept(np.zeros((3, 4)), [np.eye(3), np.eye(4)], 0)] * 1), optimizer=name
        )


# --- what must not be misread ---------------------------------------------------------------------------------------

EVERY = [r.name for r in registry.registered() if r.statistic not in ("none", "identity")]


@pytest.mark.parametrize(("name", "other"), [(a, b) for a in SOAPS for b in EVERY if a != b])
def test_no_other_reader_reads_it(name, other):
    # A square matrix too: there a basis has the shape of the parameter.
    for shapes in ([(4, 4)], [(3, 4)], [(4, 3, 2)]):
        with pytest.raises(BayesAdamError):
            read_state_dict(Weights(shapes), LAYOUTS[name](kept_of(shapes)), optimizer=other)


@pytest.mark.parametrize("name", SOAPS)
def test_no_soap_reads_adams_state(name):
    model = Weights()
    optimizer = torch.optim.Adam(model.parameters())
    model.all[1].sum().backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"finds no|heavyball"):
        read_optimizer(model, optimizer, reader=name)


@pytest.mark.parametrize("name", ["soap-reference", "soap-pytorch-optimizer"])
def test_a_checkpoint_tells_which_it_is(name, tmp_path):
    all_kept = kept_of()
    state_dict = LAYOUTS[name](all_kept)
    assert identify_reader(state_dict).name == name
    model = Weights()
    torch.save({"model": model.state_dict(), "optimizer": state_dict}, tmp_path / "last.pt")
    posterior = ba.Posterior.from_checkpoint(tmp_path / "last.pt", Weights(), N, structure="kronecker")
    for i, kept in enumerate(all_kept):
        close(torch.from_numpy(dense_of(posterior, f"all.{i}")), kept.dense())


def test_a_checkpoint_of_heavyball_is_read_by_name(tmp_path):
    all_kept = kept_of()
    torch.save({"model": Weights().state_dict(), "optimizer": soap_heavyball(all_kept)}, tmp_path / "last.pt")
    with pytest.raises(StateError, match="no reader finds a second moment"):
        ba.Posterior.from_checkpoint(tmp_path / "last.pt", Weights(), N)
    posterior = ba.Posterior.from_checkpoint(
        tmp_path / "last.pt", Weights(), N, optimizer="soap-heavyball", structure="kronecker"
    )
    close(torch.from_numpy(dense_of(posterior, "all.1")), all_kept[1].dense())


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
        {"GG": [torch.eye(4), []], "Q": [[], []]},
        {"Q_L": torch.eye(4), "Q_R": torch.eye(4)},
        {"L": torch.eye(4)},
        {"eigenbasis": torch.eye(4)},
        {"projector": torch.eye(4)},
        {"whatever": (torch.eye(4), None)},
        {"some_basis": torch.eye(4)},
        {"Q.0": torch.eye(4)},
        {"Q": {0: torch.eye(4)}},
        {"small": torch.eye(2)},
    ],
    ids=lambda entries: "-".join(entries) + type(next(iter(entries.values()))).__name__,
)
@pytest.mark.parametrize("reader", ["adam", "adamw", "soap", "shampoo", "soap-pytorch-optimizer"])
def test_bases_that_nobody_described_are_refused(entries, reader):
    state_dict = unmarked(adam_state((4, 4)), **entries)
    with pytest.raises(StateError):
        read_state_dict(Weights([(4, 4)]), state_dict, optimizer=reader)
    with pytest.raises(StateError, match="no reader finds"):
        identify_reader(state_dict)
    if reader == "adam":
        with pytest.raises(StateError, match=f"'all.0' keeps bases .*{next(iter(entries))}.*rotated coordinates"):
            read_state_dict(Weights([(4, 4)]), state_dict, optimizer=reader)


@pytest.mark.parametrize("shape", [(4, 4), (2, 2), (1, 1), (3, 3, 3), (4,), ()], ids=str)
def test_adams_own_state_has_no_bases_in_it(shape):
    state_dict = unmarked(adam_state(shape), max_exp_avg_sq=torch.rand(shape))
    as_kept = replace(registry.reader_named("adam"), bias_correction=False)
    found = read_state_dict(Weights([shape]), state_dict, optimizer=as_kept)
    close(found.second_moment["all.0"], state_dict["state"][0]["exp_avg_sq"].double().numpy(), rtol=1e-6)
    assert identify_reader(state_dict).name == "adam or adamw"


def test_a_live_soap_of_an_unknown_class_is_refused():
    class Copied(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            pass

    model = Weights([(3, 4)])
    optimizer = Copied(model.parameters(), {})
    saved = soap_reference(kept_of([(3, 4)]))
    optimizer.state[model.all[0]] = saved["state"][0]
    optimizer.param_groups[0].update({k: v for k, v in saved["param_groups"][0].items() if k != "params"})
    with pytest.raises(StateError, match="no reader is registered for"):
        read_optimizer(model, optimizer)
    close(
        read_optimizer(model, optimizer, reader="soap-reference").second_moment["all.0"],
        np.diag(kept_of([(3, 4)])[0].dense()).copy(),
    )
    with pytest.raises(StateError, match="rotated coordinates"):
        read_optimizer(model, optimizer, reader="adam")


def test_a_users_own_function_is_trusted(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    registry.register(StateReader("mine", (), key="exp_avg_sq", read=lambda state, group, shape: state["exp_avg_sq"]))
    state_dict = unmarked(adam_state((3, 4)), Q=[torch.eye(3), torch.eye(4)])
    assert read_state_dict(Weights([(3, 4)]), state_dict, optimizer="mine").second_moment["all.0"].shape == (3, 4)


def damage_side(state: dict[str, Any]) -> None:
    state["Q"][1] = torch.eye(3, dtype=torch.float64)


def damage_order(state: dict[str, Any]) -> None:
    state["Q"].reverse()


def damage_length(state: dict[str, Any]) -> None:
    state["Q"].append([])


def damage_scale(state: dict[str, Any]) -> None:
    state["Q"][0] *= 1.05


def damage_nan(state: dict[str, Any]) -> None:
    state["Q"][0][0, 0] = torch.nan


def damage_negative(state: dict[str, Any]) -> None:
    state["exp_avg_sq"].neg_()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_side, "have shapes"),
        (damage_order, "have shapes"),
        (damage_length, "have shapes"),
        (damage_scale, "is not orthogonal"),
        (damage_nan, "is not orthogonal"),
        (damage_negative, "must be finite and not negative"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("name", ["soap-reference", "soap-pytorch-optimizer"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_damaged_states_are_refused(name, damage, words, structure):
    state_dict = LAYOUTS[name](kept_of([(3, 4)]))
    damage(state_dict["state"][0])
    with pytest.raises(StateError, match=words):
        ba.Posterior.from_state_dict(Weights([(3, 4)]), state_dict, N, optimizer=name, structure=structure)


@pytest.mark.parametrize("name", SOAPS)
def test_another_models_state_is_refused(name):
    state_dict = LAYOUTS[name](kept_of([(3, 4)]))
    for shape in [(4, 3), (12,), (2, 6)]:
        with pytest.raises(BayesAdamError, match="another model"):
            read_state_dict(Weights([shape]), state_dict, optimizer=name)


@pytest.mark.parametrize("entry", ["GG", "Q", "exp_avg_sq", "precondition_frequency", "step"])
def test_a_layout_that_lacks_an_entry_is_refused(entry):
    """soap.py at 01df676 keeps no precondition_frequency in the state, and corrects its average as it goes."""
    state_dict = soap_reference(kept_of([(3, 4)]))
    del state_dict["state"][0][entry]
    with pytest.raises(StateError, match=f"finds no '{entry}'"):
        read_state_dict(Weights([(3, 4)]), state_dict, optimizer="soap-reference")


@pytest.mark.parametrize("name", ["soap-reference", "soap-pytorch-optimizer"])
def test_merged_dimensions_are_refused_where_two_orders_are_possible(name):
    state_dict = LAYOUTS[name](kept_of([(4, 3, 2)]))
    state_dict["param_groups"][0]["merge_dims"] = True
    with pytest.raises(StateError, match="train with merge_dims=False"):
        read_state_dict(Weights([(4, 3, 2)]), state_dict, optimizer=name)
    # A matrix whose sides were merged into one has one basis, and one that was too large to merge has its own two.
    state_dict = LAYOUTS[name](kept_of([(3, 4)]))
    state_dict["param_groups"][0]["merge_dims"] = True
    close(
        read_state_dict(Weights([(3, 4)]), state_dict, optimizer=name).second_moment["all.0"],
        np.diag(kept_of([(3, 4)])[0].dense()).copy(),
    )
    state_dict["state"][0]["Q"] = [torch.eye(12, dtype=torch.float64)]
    with pytest.raises(StateError, match="merge_dims=False"):
        read_state_dict(Weights([(3, 4)]), state_dict, optimizer=name)


@pytest.mark.parametrize("entry", [{"split": True}, {"ecc": "bf16+8"}, {"param_ecc": "bf16+8"}])
def test_heavyballs_parts_and_compression_are_refused(entry):
    state_dict = soap_heavyball(kept_of([(3, 4)]))
    state_dict["param_groups"][0].update(entry)
    with pytest.raises(StateError, match="split=False, ecc=None"):
        read_state_dict(Weights([(3, 4)]), state_dict, optimizer="soap-heavyball")


def test_heavyballs_other_soaps_are_refused():
    state_dict = soap_heavyball(kept_of([(3, 4)]))
    view = state_dict["state"][0][0]
    view["scale_by_soap_laprop_exp_avg_sq_2"] = view.pop("scale_by_soap_exp_avg_sq_2")
    with pytest.raises(StateError, match="only its SOAP is read"):
        read_state_dict(Weights([(3, 4)]), state_dict, optimizer="soap-heavyball")


def test_kronecker_needs_bases_somewhere():
    state_dict = soap_reference(kept_of([(3,)]))
    with pytest.raises(SettingError, match="needs eigenbases"):
        ba.Posterior.from_state_dict(Weights([(3,)]), state_dict, N, optimizer="soap-reference", structure="kronecker")


# --- Shampoo --------------------------------------------------------------------------------------------------------


def shampoo(all_given: Sequence[Sequence[np.ndarray]], eps: float = 1e-6, **entries: Any) -> dict[str, Any]:
    """pytorch_optimizer 4.1.0: sums of squares along each dimension from ε I, and their inverse roots."""
    states = {}
    for i, given in enumerate(all_given):
        state: dict[str, Any] = {}
        for k, side in enumerate(given[0].shape):
            total = eps * np.eye(side) + sum(unfolded(g, k) @ unfolded(g, k).T for g in given)
            state[f"pre_cond_{k}"], state[f"inv_pre_cond_{k}"] = tensor(total), tensor(np.eye(side))
        states[i] = {**state, "momentum_buffer": tensor(given[-1])}
    group = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "weight_decouple": False, "fixed_decay": False}
    group = {**group, "matrix_eps": eps, "step": len(all_given[0]), **entries, "params": list(states)}
    return {"state": states, "param_groups": [group]}


@pytest.mark.parametrize("eps", [1e-6, 10.0])
def test_shampoo_is_the_kronecker_product_of_its_statistics(eps):
    all_given = [gradients(shape, 9) for shape in SHAPES]
    state_dict = through_a_file(shampoo(all_given, eps))
    model = Weights()
    curvature = read_state_dict(model, state_dict, optimizer="shampoo")
    posterior = ba.Posterior.from_state_dict(
        model, state_dict, N, optimizer="shampoo", prior_precision=DELTA, structure="kronecker"
    )
    assert identify_reader(state_dict).name == "shampoo"
    assert set(curvature.steps.values()) == {9}
    for i, given in enumerate(all_given):
        sums = [sum(unfolded(g, k) @ unfolded(g, k).T for g in given) for k in range(given[0].ndim)]
        power = sum(float((g**2).sum()) for g in given)
        dense = reduce(np.kron, sums) / (9 * power ** (len(sums) - 1))
        close(curvature.second_moment[f"all.{i}"], np.diag(dense).copy(), rtol=1e-7)
        close(torch.from_numpy(dense_of(posterior, f"all.{i}")), dense, rtol=1e-6, atol=1e-9)
        assert np.trace(dense) == approx(power / 9)
        values, vectors = np.linalg.eigh(dense)
        sigma = vectors @ np.diag(1 / (N * np.sqrt(values.clip(0)) + DELTA)) @ vectors.T
        close(posterior.variance[f"all.{i}"], np.diag(sigma).copy(), rtol=1e-4)


def test_shampoo_finds_the_covariance_of_gradients_that_have_a_kronecker_one():
    rng = np.random.default_rng(0)
    rows, columns = rng.standard_normal((3, 3)), rng.standard_normal((4, 4))
    n = 20_000
    given = list(rows @ rng.standard_normal((n, 3, 4)) @ columns.T)
    state_dict = shampoo([given])
    posterior = ba.Posterior.from_state_dict(
        Weights([(3, 4)]), state_dict, N, optimizer="shampoo", structure="kronecker", prior_precision=DELTA
    )
    expected = np.kron(rows @ rows.T, columns @ columns.T)
    scale = np.sqrt(np.diag(expected))
    assert np.abs((dense_of(posterior, "all.0") - expected) / np.outer(scale, scale)).max() < 6 / n**0.5


def test_shampoos_vectors_are_exact():
    given = gradients((5,), 7)
    posterior = ba.Posterior.from_state_dict(
        Weights([(5,)]), shampoo([given]), N, optimizer="shampoo", structure="kronecker", prior_precision=DELTA
    )
    close(torch.from_numpy(dense_of(posterior, "all.0")), np.mean([np.outer(g, g) for g in given], axis=0), atol=1e-9)


def test_gradients_that_were_always_zero_are_flat_not_nan():
    state_dict = shampoo([[np.zeros((3, 4))] * 5])
    assert (
        float(read_state_dict(Weights([(3, 4)]), state_dict, optimizer="shampoo").second_moment["all.0"].max()) == 0.0
    )


def test_a_shampoo_checkpoint(tmp_path):
    state_dict = shampoo([gradients(shape, 9) for shape in SHAPES])
    torch.save({"model": Weights().state_dict(), "optimizer": state_dict}, tmp_path / "last.pt")
    found = ba.Posterior.from_checkpoint(
        tmp_path / "last.pt", Weights(), N, prior_precision=DELTA, structure="kronecker"
    )
    live = ba.Posterior.from_state_dict(
        Weights(), state_dict, N, optimizer="shampoo", prior_precision=DELTA, structure="kronecker"
    )
    for i in range(len(SHAPES)):
        np.testing.assert_array_equal(dense_of(found, f"all.{i}"), dense_of(live, f"all.{i}"))


def test_shampoos_that_sum_other_things_are_refused():
    given = gradients((3, 4), 9)
    with pytest.raises(StateError, match="train with momentum=0"):
        read_state_dict(Weights([(3, 4)]), shampoo([given], momentum=0.9), optimizer="shampoo")
    # Before 4.1 the second statistic was of L^(−1/2) G.
    state_dict, left, right = shampoo([given]), 1e-6 * np.eye(3), 1e-6 * np.eye(4)
    for g in given:
        left = left + g @ g.T
        values, vectors = np.linalg.eigh(left)
        turned = vectors @ np.diag(values**-0.5) @ vectors.T @ g
        right = right + turned.T @ turned
    state_dict["state"][0]["pre_cond_1"] = tensor(right)
    with pytest.raises(StateError, match="have traces"):
        read_state_dict(Weights([(3, 4)]), state_dict, optimizer="shampoo")
    state_dict["state"][0]["pre_cond_1"] = torch.full((4, 4), torch.nan)
    with pytest.raises(StateError, match="have traces"):
        read_state_dict(Weights([(3, 4)]), state_dict, optimizer="shampoo")
    with pytest.raises(MatchError, match="another model"):
        read_state_dict(Weights([(4, 3)]), shampoo([given]), optimizer="shampoo")
    with pytest.raises(StateError, match="keeps no statistic"):
        read_state_dict(Weights([()]), shampoo([[np.array(1.0)]]), optimizer="shampoo")


@pytest.mark.parametrize("other", [name for name in EVERY if name != "shampoo"])
def test_no_other_reader_reads_shampoo(other):
    for shape in [(4, 4), (3, 4)]:
        with pytest.raises(BayesAdamError):
            read_state_dict(Weights([shape]), shampoo([gradients(shape, 9)]), optimizer=other)


# --- the packages themselves, where they are installed --------------------------------------------------------------


def follow(optimizer: torch.optim.Optimizer, model: Weights, all_given: Sequence[Sequence[np.ndarray]]) -> None:
    for at in zip(*all_given, strict=True):
        for parameter, g in zip(model.all, at, strict=True):
            parameter.grad = tensor(g).to(parameter.dtype)
        optimizer.step()


# Gradients of these leave no direction out, so that a basis has its signs alone to choose.
FULL = [(3, 4), (4, 4), (4, 3, 2), (3, 2, 2, 2)]


@pytest.mark.parametrize("every", [1, 4, 1000])
def test_pytorch_optimizers_soap(optimizer_class, every):
    cls = optimizer_class("pytorch_optimizer.optimizer.soap.SOAP")
    model = Weights(FULL)
    settings = {"lr": 1e-3, "betas": (0.95, BETA), "shampoo_beta": SHAMPOO_BETA}
    optimizer = cls(model.parameters(), precondition_frequency=every, **settings)
    all_given = [gradients(shape, 14) for shape in FULL]
    follow(optimizer, model, all_given)
    assert registry.reader_of(optimizer) is registry.reader_named("soap-pytorch-optimizer")
    check_live(model, optimizer, [soap(given, every) for given in all_given])


@pytest.mark.parametrize("vectors", [False, True])
def test_pytorch_optimizers_soap_in_the_bases_that_it_has(optimizer_class, vectors):
    cls = optimizer_class("pytorch_optimizer.optimizer.soap.SOAP")
    model = Weights()
    optimizer = cls(
        model.parameters(),
        betas=(0.95, BETA),
        precondition_frequency=1000,
        precondition_1d=vectors,
        max_precondition_dim=4,
    )
    all_given = [gradients(shape, 14) for shape in SHAPES]
    follow(optimizer, model, all_given)
    all_kept = []
    for parameter, given in zip(model.all, all_given, strict=True):
        bases = [q.double().numpy() if len(q) else None for q in optimizer.state[parameter]["Q"]]
        moment = np.zeros(parameter.shape)
        for g in given[1:]:
            moment = BETA * moment + (1 - BETA) * projected(g, bases) ** 2
        all_kept.append(Kept(moment, bases, 13))
    check_live(model, optimizer, all_kept)


@pytest.mark.parametrize("every", [2, 1000])
def test_heavyballs_soap(optimizer_class, every):
    cls = optimizer_class("heavyball.SOAP")
    import heavyball

    mode, heavyball.utils.compile_mode = heavyball.utils.compile_mode, None
    try:
        # It refreshes by rules of its own: the reference takes its bases, and finds V from the gradients.
        model = Weights().float()
        optimizer = cls(model.parameters(), lr=1e-3, betas=(0.9, BETA), precondition_frequency=every, merge_dims=False)
        all_given = [gradients(shape, 14) for shape in SHAPES]
        held: list[list[Any]] = []
        moments = [np.zeros(shape) for shape in SHAPES]
        for at in zip(*all_given, strict=True):
            for i, q in enumerate(held):
                moments[i] = BETA * moments[i] + (1 - BETA) * projected(at[i], q) ** 2
            follow(optimizer, model, [[g] for g in at])
            held = [bases_of(optimizer.state[p][0]["scale_by_soap_Q_3"], p.dim()) for p in model.all]
        assert registry.reader_of(optimizer) is registry.reader_named("soap-heavyball")
        check_live(model, optimizer, [Kept(m, q, 13) for m, q in zip(moments, held, strict=True)])
    finally:
        heavyball.utils.compile_mode = mode


def bases_of(kept: Sequence[Tensor | None], dims: int) -> list[np.ndarray | None]:
    found = [None if q is None else q[0].double().numpy().copy() for q in kept]
    return found if len(found) == dims else [None] * dims


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
        with pytest.raises(StateError):
            read_optimizer(model, optimizer, reader=wrong)


def test_pytorch_optimizers_shampoo(optimizer_class):
    cls = optimizer_class("pytorch_optimizer.optimizer.shampoo.Shampoo")
    model = Weights()
    optimizer = cls(model.parameters(), lr=1e-3)
    all_given = [gradients(shape, 9) for shape in SHAPES]
    follow(optimizer, model, all_given)
    expected = shampoo(all_given)
    by_hand = ba.Posterior.from_state_dict(
        Weights(), expected, N, optimizer="shampoo", prior_precision=DELTA, structure="kronecker"
    )
    live = ba.Posterior.from_optimizer(model, optimizer, N, prior_precision=DELTA, structure="kronecker")
    for i in range(len(SHAPES)):
        close(torch.from_numpy(dense_of(live, f"all.{i}")), dense_of(by_hand, f"all.{i}"), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("pytorch_optimizer.optimizer.shampoo.ScalableShampoo", {}),
        ("torch_optimizer.shampoo.Shampoo", {}),
        ("heavyball.KLSOAP", {}),
        ("heavyball.SOLP", {}),
    ],
)
def test_their_kin_are_refused_live(optimizer_class, path, kwargs):
    cls = optimizer_class(path)
    mode = None
    if path.startswith("heavyball"):
        import heavyball

        mode, heavyball.utils.compile_mode = heavyball.utils.compile_mode, None
    try:
        model = Weights([(3, 4)]).float()
        optimizer = cls(model.parameters(), **kwargs)
        follow(optimizer, model, [gradients((3, 4), 4)])
        with pytest.raises(StateError, match=r"no reader is registered|only its SOAP"):
            read_optimizer(model, optimizer)
    finally:
        if path.startswith("heavyball"):
            heavyball.utils.compile_mode = mode
