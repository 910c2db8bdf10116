"""Leverage against what it is by its definition: matrices written out, inputs left out one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.predict.leverage import (
    RIDGE,
    WIDEST,
    Leverage,
    chosen,
    factor,
    from_inputs,
    from_structure,
    norms,
    ratios,
)
from bayesadam.predict.matrices import Matrix, layers_of
from calibrated.cases_calibrated import blobs, trained
from floats import assert_close
from predict.cases_networks import Lambda


def layer_of(module: str, width: int, groups: int = 1) -> Matrix:
    """Of two outputs a group."""
    return Matrix(f"{module}.weight", None, torch.Size((2 * groups, width // groups)), groups=groups, module=module)


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 3])
def test_leverage_is_the_quadratic_form(groups):
    layer, a, root = layer_of("m", 6, groups), double(5, 6), double(groups, 6 // groups, 9)
    moment = root @ root.mT
    whole = torch.block_diag(*moment)
    ridge = RIDGE * whole.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    expected = torch.einsum("bi,ij,bj->b", a, torch.linalg.inv(whole + ridge), a)
    known = Leverage((layer,), (factor(moment),), "inputs")
    assert_close(known.log_h({"m": a})[:, 0].exp(), expected)
    diagonal = whole.diagonal()
    known = Leverage((layer,), (factor(diagonal),), "second moments")
    assert_close(known.log_h({"m": a})[:, 0].exp(), (a.square() / (diagonal + RIDGE * diagonal.mean())).sum(dim=1))


def test_stacked_layers_keep_their_order():
    layers = tuple(layer_of(name, width) for name, width in (("a", 3), ("b", 5), ("c", 3)))
    inputs = {layer.module: double(4, layer.width) for layer in layers}
    factors = tuple(factor((root @ root.mT)[None]) for root in (double(layer.width, 9) for layer in layers))
    together = Leverage(layers, factors, "inputs").log_h(inputs)
    for number, layer in enumerate(layers):
        alone = Leverage((layer,), (factors[number],), "inputs").log_h(inputs)
        assert_close(together[:, number], alone[:, 0])


def test_each_input_is_left_out_of_its_own():
    """Exact but for the ridge, which stays that of all; and what is not familiar has the A of new inputs."""
    a, n = double(25, 5), 20
    familiar = torch.arange(25) < n
    leverage, log_h = from_inputs([layer_of("m", 5)], {"m": a}, familiar)
    assert_close(leverage.log_h({"m": a[n:]}), log_h[n:])
    moment = a[:n].T @ a[:n] / n
    for i in range(n):
        rest = (moment * n - torch.outer(a[i], a[i])) / (n - 1)
        ridge = RIDGE * moment.diagonal().mean() * n / (n - 1) * torch.eye(5, dtype=torch.float64)
        assert_close(log_h[i, 0].exp(), a[i] @ torch.linalg.inv(rest + ridge) @ a[i])


def test_inputs_make_a_whatever_seed_shuffled_them():
    """Of classes one after the other, shuffled by a seed, each gives a third."""
    for seed in range(50):
        first = torch.randperm(300, generator=torch.Generator().manual_seed(seed)) < 150
        assert 30 < int(chosen(300)[first].sum()) < 70


def test_wide_layers_are_cut_in_blocks():
    layer = layer_of("m", WIDEST + 3)
    known, _ = from_inputs([layer], {"m": torch.randn(600, WIDEST + 3)}, torch.ones(600, dtype=torch.bool))
    assert known.factors[0].shape == (2, WIDEST // 2 + 2, WIDEST // 2 + 2)


def test_few_inputs_of_a_wide_layer_have_a_thin_factor():
    """The quadratic form of the whole matrix, also of inputs twice and of those far away from all."""
    a = double(90, 300)
    a[1], a[60] = a[0], 0
    layers = [layer_of("m", 300)]
    known, log_h = from_inputs(layers, {"m": a}, torch.arange(90) < 60)
    assert known.factors[0].shape == (1, 300, 59)
    moment = a[:60].T @ a[:60] / 60
    whole = Leverage((layers[0],), (factor(moment[None]),), "inputs", known.medians)
    assert_close(known.log_h({"m": a[60:]}), whole.log_h({"m": a[60:]}), rtol=1e-9)
    assert_close(log_h[60:], whole.log_h({"m": a[60:]}), rtol=1e-9)
    stacks, weights, centre = known.relative()
    q = norms([a], stacks).square()
    assert_close(ratios(q, weights, centre, 1.0, absent=False).steep, known.ratios(known.log_h({"m": a})).steep)
    h = whole.log_h({"m": a[:60]}).exp()
    assert_close(log_h[:60], (59 / 60 * h / (1 - h / 60)).log(), rtol=1e-9)


def test_a_wide_layer_has_a_factor_of_the_directions_that_count():
    """Of 400 inputs along 30 directions with a little noise: A without the noise, by all its eigenvectors."""
    width = 1024
    a = double(400, 30) @ double(30, width) + 1e-2 * double(400, width)
    known, log_h = from_inputs([layer_of("m", width)], {"m": a}, torch.arange(400) < 300)
    assert known.factors[0].shape == (1, width, 30)
    values, vectors = torch.linalg.eigh(a[:300].T @ a[:300] / 300)
    values[:-30] = 0
    moment = (vectors * (values + RIDGE * values.mean()).reciprocal()) @ vectors.T
    outside = torch.cat([a[300:], double(5, width)])
    exact = ((outside @ moment) * outside).sum(dim=1).log()
    assert_close(known.log_h({"m": outside})[:, 0], exact, rtol=1e-9)
    assert_close(log_h[300:, 0], exact[:100], rtol=1e-9)


def test_few_inputs_leave_the_state_alone():
    layer, few = layer_of("m", 3), torch.ones(5, dtype=torch.bool)
    assert from_inputs([layer], {"m": torch.ones(5, 3)}, few) is None
    q, (x, y) = trained("classification"), blobs(30, 7)
    net = ba.calibrate(q, (x, y))
    assert net.fit.leverage.source == "second moments"
    assert ba.calibrate(q.model, (x, y), likelihood="classification").fit.leverage is None


def test_the_state_gives_the_column_sums_of_v():
    q = trained("classification")
    known = from_structure(layers_of(q.model, q.mode), q.curvature)
    assert ([x.weight for x in known.layers], known.source) == (["0.weight", "2.weight"], "second moments")
    sums = q.curvature.second_moment["0.weight"].sum(dim=0)
    assert_close(known.factors[0], (sums + RIDGE * sums.mean()).rsqrt())


@pytest.mark.filterwarnings("ignore:the posterior has 8 gradients")
@pytest.mark.parametrize("source", ["inputs", "gradients"])
def test_a_structure_gives_its_own_second_moment(source):
    """The input side that of inputs, a Kronecker posterior the right factor of its gradients."""
    q, (x, y) = trained("classification"), blobs(64, 1)
    moment = x.T @ x / len(x)
    if source == "inputs":
        q = q.with_inputs(x)
    else:
        batches, loss = list(zip(x.split(8), y.split(8), strict=True)), nn.functional.cross_entropy
        recorder = ba.Recorder.from_batches(q.model, batches, loss)
        q = ba.Posterior.from_recorder(q.model, recorder, n_data=64, likelihood="classification")
        weight = q.model[0].weight
        gradients = [torch.autograd.grad(loss(q.model(inputs), labels), weight)[0] for inputs, labels in batches]
        moment = sum(g.T @ g for g in gradients) / len(batches)
    known = from_structure(layers_of(q.model, q.mode), q.curvature)
    assert known.source == source
    w, ridge = known.factors[0][0], RIDGE * moment.diagonal().mean() * torch.eye(2)
    assert_close(w @ w.T @ (moment + ridge), torch.eye(2), rtol=1e-3, atol=1e-3)


def test_the_last_layers_are_seen_within_their_class():
    """Of the exact definition, one familiar input after the other left out of its mean, and of A but for the ridge."""
    a, outputs, m = double(45, 4), double(45, 3), 31
    outputs[:1, 2], outputs[1:, 2] = 9, -9
    familiar, classes = torch.arange(45) < m, outputs.argmax(dim=1)
    layers = [layer_of("x", 3), layer_of("y", 4), layer_of("z", 4)]
    pooled = {"x": double(45, 3), "y": double(45, 4), "z": a}
    known, log_h = from_inputs(layers, pooled, familiar, outputs)
    assert ([layer.module for layer in known.layers], len(known.factors)) == (["x", "y", "z"], 5)
    assert_close(known.log_h({name: x[m:] for name, x in pooled.items()}, outputs[m:]), log_h[m:])

    def mean(rows: torch.Tensor, c: int) -> torch.Tensor:
        inside = rows[classes[:m][rows] == c]
        return (a[:m].mean(dim=0) + a[inside].sum(dim=0)) / (1 + len(inside))

    everyone = torch.arange(m)
    left = torch.stack([a[i] - mean(everyone[everyone != i], int(classes[i])) for i in range(m)])
    new = torch.stack([a[i] - mean(everyone, int(classes[i])) for i in range(m, 45)])
    moment = left.T @ left / m
    ridge = RIDGE * moment.diagonal().mean() * torch.eye(4, dtype=torch.float64)
    inverse = torch.linalg.inv(moment + ridge)
    h = torch.einsum("bi,ij,bj->b", left, inverse, left)
    assert_close(log_h[m:, 4].exp(), torch.einsum("bi,ij,bj->b", new, inverse, new))
    assert_close(log_h[:m, 4].exp(), (m - 1) / m * h / (1 - h / m))
    steep, within = (log_h[:, some].exp() / known.medians[some].exp() for some in (slice(3), slice(3, 5)))
    near = (steep.mean(dim=1) * within.mean(dim=1)).sqrt()
    assert_close(known.ratios(log_h).near, near / near[:m].quantile(0.5))


@pytest.mark.parametrize(("classes", "a"), [(3, double(30, 4)), (4, double(30, 4)), (2, torch.ones(30, 4))])
def test_few_inputs_a_class_or_the_same_for_all_have_no_means(classes, a):
    familiar = torch.ones(30, dtype=torch.bool)
    known, log_h = from_inputs([layer_of("z", 4)], {"z": a}, familiar, double(30, classes))
    assert len(known.means) == (classes == 3)
    r = known.ratios(log_h)
    assert torch.equal(r.near, r.steep) == (classes != 3)


def test_ratios_are_means_over_layers_relative_to_medians():
    log_h, other = double(9, 3), double(4, 3)
    known = Leverage((), (log_h,) * 3, "inputs").against(log_h)
    h, medians = log_h.exp(), log_h.quantile(0.5, dim=0).exp()
    gentle, steep = (h / medians).log().mean(dim=1).exp(), (h / medians).mean(dim=1)
    expected = (other.exp() / medians).log().mean(dim=1).exp() / gentle.quantile(0.5)
    r = known.ratios(other)
    assert_close(r.gentle, expected)
    assert_close(r.steep, (other.exp() / medians).mean(dim=1) / steep.quantile(0.5))
    assert_close(r.growth(0.5), ((1 + expected) / 2).sqrt())
    assert_close(known.ratios(log_h).gentle.quantile(0.5), torch.ones((), dtype=torch.float64))


def test_a_layer_that_is_mostly_silent_says_nothing_of_novelty(tmp_path: Path) -> None:
    layers = {"dense": nn.Linear(3, 4), "gate": nn.Linear(3, 4, bias=False), "out": nn.Linear(4, 2)}
    model = Lambda(lambda self, x: self.out(torch.tanh(self.dense(x)) + self.gate((x - 2).relu())), **layers)
    x, far = torch.randn(200, 3), torch.tensor([[0.0, -2, 2.01], [2.9, -2.9, 2.9], [0, 0, 0]])
    adam = torch.optim.Adam(model.parameters())
    model(3 * x).square().mean().backward()
    adam.step()
    posterior = ba.Posterior.from_optimizer(model, adam, 200, likelihood="regression")
    answer = ba.calibrate(model, (x, torch.randn(200, 2)), likelihood="regression")
    answer.save(tmp_path / "net.safetensors")
    for novelty in (
        posterior.novelty(far, reference=x[:20]),
        answer(far).novelty,
        ba.load(tmp_path / "net.safetensors", model)(far).novelty,
    ):
        assert bool((novelty < 1e4).all())
        assert novelty[1] > 2 * novelty[2]
