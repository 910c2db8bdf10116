"""The recorder against a plain list of gradients."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError, StateError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batches(count: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 3, generator=generator) for _ in range(count)]


def train(model, optimizer, inputs, seen: list | None = None) -> None:
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if seen is not None:
            seen.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()


def sorted_rows(stack: torch.Tensor) -> torch.Tensor:
    rows = stack.flatten(1)
    return rows[rows[:, 0].argsort()]


@pytest.mark.parametrize(
    ("keep", "every", "steps"), [(4, 1, 3), (4, 1, 4), (4, 1, 11), (3, 5, 30), (3, 5, 31), (10, 7, 1)]
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_it_keeps_the_last_of_every_kth_step(kind, keep, every, steps):
    model, seen = network(), []
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    recorder = ba.Recorder(optimizer, keep=keep, every=every)
    train(model, optimizer, batches(steps), seen)
    expected = seen[::every][-keep:]
    assert recorder.recorded == len(expected)
    for name, found in recorder.gradients(model).items():
        # Weight decay is not in them, whatever the optimiser does with it.
        torch.testing.assert_close(
            sorted_rows(found), sorted_rows(torch.stack([g[name] for g in expected])), rtol=0, atol=0
        )


def test_training_is_not_changed():
    finals = []
    for attach in (False, True):
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        if attach:
            ba.Recorder(optimizer, keep=2, every=3)
        train(model, optimizer, batches(9))
        finals.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*finals)


def test_a_closure_s_gradients_are_taken_after_it_ran():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = ba.Recorder(optimizer, keep=5, every=1)
    seen = []
    for x in batches(3):

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            seen.append(model[0].weight.grad.clone())
            return loss

        optimizer.step(closure)
    torch.testing.assert_close(sorted_rows(recorder.gradients(model)["0.weight"]), sorted_rows(torch.stack(seen)))


def test_a_fused_optimiser_under_a_scaler_is_unscaled_and_overflows_are_left_out():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    recorder = ba.Recorder(optimizer, keep=5, every=1)
    (model(batches(1)[0]).square().mean() * 8).backward()
    plain = model[0].weight.grad.clone() / 8
    # As torch's GradScaler hands them to optimisers that divide by themselves.
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
    optimizer.step()
    assert recorder.recorded == 0
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    torch.testing.assert_close(recorder.gradients(model)["0.weight"][0], plain)


def test_it_goes_on_where_it_was_saved():
    inputs = batches(13)
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    recorder = ba.Recorder(optimizer, keep=4, every=2)
    train(model, optimizer, inputs[:7])
    file = io.BytesIO()
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict(), "r": recorder.state_dict()}, file)
    train(model, optimizer, inputs[7:])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network()
    resumed = torch.optim.Adam(other.parameters())
    again = ba.Recorder(resumed, keep=4, every=2)
    other.load_state_dict(saved["m"])
    resumed.load_state_dict(saved["o"])
    again.load_state_dict(saved["r"])
    train(other, resumed, inputs[7:])
    for name, found in recorder.gradients(model).items():
        assert torch.equal(found, again.gradients(other)[name])


def test_another_recorder_s_state_is_refused_and_nothing_changes():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    recorder = ba.Recorder(optimizer, keep=4, every=2)
    train(model, optimizer, batches(3))
    before = copy.deepcopy(recorder.state_dict())
    wide = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    other = torch.optim.Adam(wide.parameters())
    strange = ba.Recorder(other, keep=4, every=2)
    train(wide, other, batches(2))
    for state, told in (
        (strange.state_dict(), "shape"),
        ({**before, "keep": 5}, "keep=5"),
        ({**before, "rings": before["rings"][1:]}, "3 parameters"),
        ({"steps": [1]}, "not the state"),
    ):
        with pytest.raises(MatchError, match=told):
            recorder.load_state_dict(state)
    after = recorder.state_dict()
    assert after["steps"] == before["steps"]
    assert all(torch.equal(a, b) for a, b in zip(after["rings"], before["rings"], strict=True))


def test_several_optimisers_step_together():
    model = network()
    pair = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())]
    recorder = ba.Recorder(pair, keep=3, every=1)
    for x in batches(4):
        model.zero_grad()
        model(x).square().mean().backward()
        for optimizer in pair:
            optimizer.step()
    assert set(recorder.gradients(model)) == {name for name, _ in model.named_parameters()}
    posterior = ba.Posterior.from_optimizer(
        model, pair, 32, prior_precision=1e4, structure="low-rank", recorder=recorder
    )
    assert posterior.structure.kind == "low-rank"
    pair[0].step()
    with pytest.raises(StateError, match="together"):
        recorder.gradients(model)


def test_parameters_without_gradients_are_left_out_and_sparse_ones_are_dense():
    model = nn.ModuleDict(
        {"used": nn.Embedding(5, 2, sparse=True), "unused": nn.Linear(2, 2), "at_times": nn.Linear(2, 1)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = ba.Recorder(optimizer, keep=4, every=1)
    for step in range(2):
        optimizer.zero_grad()
        h = model["used"](torch.tensor([1, 3]))
        (model["at_times"](h).sum() if step == 0 else h.sum()).backward()
        optimizer.step()
    found = recorder.gradients(model)
    assert "unused.weight" not in found
    assert bool(found["at_times.weight"][0].any())
    assert not bool(found["at_times.weight"][1].any())
    assert torch.equal(found["used.weight"][1], torch.tensor([0.0, 1, 0, 1, 0])[:, None].expand(5, 2))
    posterior = ba.Posterior.from_optimizer(
        model, optimizer, 8, prior_precision=1e4, structure="low-rank", recorder=recorder
    )
    assert set(posterior.omitted) == {"unused.weight", "unused.bias"}


def test_a_diagonal_of_recorded_gradients_serves_sgd():
    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = ba.Recorder(optimizer, keep=6, every=1)
    train(model, optimizer, batches(6), seen)
    posterior = ba.Posterior.from_optimizer(
        model, optimizer, 48, power=1, batch_size=8, prior_precision=2.0, recorder=recorder
    )
    square = torch.stack([g["0.weight"] for g in seen]).square().mean(dim=0)
    torch.testing.assert_close(posterior.variance["0.weight"], 1 / (48 * 8 * square + 2))


def test_the_kronecker_bases_are_those_of_the_gradients():
    model, seen = network().double(), []
    optimizer = torch.optim.Adam(model.parameters())
    recorder = ba.Recorder(optimizer, keep=20, every=1)
    train(model, optimizer, [x.double() for x in batches(20)], seen)
    structure = ba.Posterior.from_optimizer(
        model, optimizer, 48, structure="kronecker", recorder=recorder, prior_precision=1.0
    ).structure
    stack = torch.stack([g["0.weight"] for g in seen])
    left, right = structure.bases["0.weight"].left, structure.bases["0.weight"].right
    for basis, moment in (
        (left, torch.einsum("kij,klj->il", stack, stack)),
        (right, torch.einsum("kij,kil->jl", stack, stack)),
    ):
        turned = basis.T @ moment @ basis
        torch.testing.assert_close(turned, torch.diag(turned.diagonal()), rtol=0, atol=1e-10)
        assert bool((turned.diagonal().diff() <= 1e-10).all())
    expected = torch.stack([left.T @ g @ right for g in stack]).square().mean(dim=0)
    torch.testing.assert_close(structure.second_moment["0.weight"], expected)
    bias = torch.stack([g["0.bias"] for g in seen])
    basis = structure.bases["0.bias"].right
    torch.testing.assert_close(structure.second_moment["0.bias"], (bias @ basis).square().mean(dim=0))


def test_a_removed_recorder_sees_nothing_more():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    with ba.Recorder(optimizer, keep=4, every=1) as recorder:
        train(model, optimizer, batches(2))
    train(model, optimizer, batches(2))
    assert recorder.recorded == 2


def test_misuse_is_told():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for options in ({"keep": 0}, {"every": 0}, {"keep": 2.5}, {"every": True}):
        with pytest.raises(SettingError, match="whole number"):
            ba.Recorder(optimizer, **options)
    with pytest.raises(MatchError, match="torch optimiser"):
        ba.Recorder(model)
    recorder = ba.Recorder(optimizer, keep=2, every=1)
    with pytest.raises(StateError, match="no step yet"):
        recorder.gradients(model)
    train(model, optimizer, batches(2))
    other = torch.optim.Adam(model.parameters())
    train(model, other, batches(2))
    with pytest.raises(MatchError, match="another optimiser"):
        ba.Posterior.from_optimizer(model, other, 8, structure="low-rank", recorder=recorder)
    with pytest.raises(MatchError):
        recorder.gradients(nn.Linear(3, 4))
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    with pytest.raises(StateError, match=r"0\.weight.*not finite"):
        recorder.gradients(model)
