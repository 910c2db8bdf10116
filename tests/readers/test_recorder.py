"""The recorder against a plain list of gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import bayesadam as ba
from bayesadam.errors import MatchError, SettingError
from bayesadam.readers import match_optimizers, read_recorder
from floats import assert_close, close
from readers.references import gradients_of


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batches(count: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 3, generator=generator) for _ in range(count)]


def train(model, optimizer, inputs) -> list[dict[str, torch.Tensor]]:
    return gradients_of(model, [optimizer], [lambda model, x=x: model(x).square().mean() for x in inputs])


def sorted_rows(stack: torch.Tensor) -> torch.Tensor:
    rows = stack.flatten(1)
    return rows[rows[:, 0].argsort()]


@pytest.mark.parametrize(
    ("kind", "keep", "every", "steps"),
    [(torch.optim.Adam, 4, 1, 3), (torch.optim.AdamW, 4, 1, 11), (torch.optim.SGD, 3, 5, 31)],
)
def test_it_keeps_the_last_of_every_kth_step(kind, keep, every, steps):
    model = network()
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    recorder = ba.Recorder(optimizer, keep=keep, every=every)
    expected = train(model, optimizer, batches(steps))[::every][-keep:]
    assert recorder.recorded == len(expected)
    for name, found in recorder.gradients(model).items():
        # Weight decay is not in them, whatever the optimiser does with it.
        assert_close(sorted_rows(found), sorted_rows(torch.stack([g[name] for g in expected])))


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
    assert_close(sorted_rows(recorder.gradients(model)["0.weight"]), sorted_rows(torch.stack(seen)))


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
    pair[0].step()
    with pytest.raises(MatchError, match="together"):
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


def test_a_diagonal_of_recorded_gradients_serves_sgd():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = ba.Recorder(optimizer, keep=6, every=1)
    seen = train(model, optimizer, batches(6))
    curvature, gradients = read_recorder(match_optimizers(model, optimizer, "ogd"), recorder)
    square = torch.stack([g["0.weight"] for g in seen]).square().mean(dim=0)
    assert_close(curvature.second_moment["0.weight"], square)
    assert curvature.steps["0.weight"] == len(gradients["0.weight"]) == 6


def test_misuse_is_told():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for options in ({"keep": 0}, {"every": 0}, {"keep": 2.5}, {"every": True}):
        with pytest.raises(SettingError, match="whole number"):
            ba.Recorder(optimizer, **options)
    with pytest.raises(MatchError, match="torch optimiser"):
        ba.Recorder(model)
    with pytest.raises(MatchError, match=r"every parameter of Linear is frozen: requires_grad_\(True\)"):
        ba.Recorder.from_batches(nn.Linear(3, 2).requires_grad_(False), [], nn.functional.mse_loss)
    recorder = ba.Recorder(optimizer, keep=2, every=1)
    with pytest.raises(MatchError, match="no step yet"):
        recorder.gradients(model)
    train(model, optimizer, batches(2))
    with pytest.raises(MatchError):
        recorder.gradients(nn.Linear(3, 4))
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    with pytest.raises(MatchError, match=r"0\.weight.*not finite"):
        recorder.gradients(model)


# --- a trained model, whatever trained it ---------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm and dropout, which differ in training, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.drop(self.norm(self.first(x)).tanh())))


def normed() -> Normed:
    torch.manual_seed(0)
    model = Normed()
    for x in batches(5, seed=9):
        model(x)
    return model.train()


def pairs(count: int, size: int = 8, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, generator=generator), torch.randint(2, (size,), generator=generator))
        for _ in range(count)
    ]


def by_hand(model: nn.Module, data) -> list[dict[str, torch.Tensor]]:
    """Gradients by backward() of a copy in eval mode."""
    model, found = copy.deepcopy(model).eval(), []
    for x, y in data:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_from_batches_takes_the_gradients_in_eval_mode():
    model, data = normed(), pairs(6)
    recorder = ba.Recorder.from_batches(model, data, nn.functional.cross_entropy)
    expected = by_hand(model, data)
    found = recorder.gradients(model)
    assert recorder.recorded == 6
    assert recorder.batch_size == 8
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad} == set(expected[0])
    for name, stack in found.items():
        assert_close(stack, torch.stack([g[name] for g in expected]), rtol=1e-6, atol=1e-8)
    trained_mode = copy.deepcopy(model).train()
    nn.functional.cross_entropy(trained_mode(data[0][0]), data[0][1]).backward()
    assert not close(found["first.weight"][0], trained_mode.first.weight.grad, rtol=0.05)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("grad", [True, False])
def test_from_batches_leaves_the_model_as_it_was(raises, grad):
    model, data = normed(), pairs(3)
    model.norm.eval()
    if grad:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, float(number)) if parameter.requires_grad else None
    before, modes = everything(model), {name: m.training for name, m in model.named_modules()}
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    calls = []

    def loss_fn(outputs, targets):
        calls.append(1)
        if raises and len(calls) == 2:
            raise RuntimeError("broken loss")
        return nn.functional.cross_entropy(outputs, targets)

    if raises:
        with pytest.raises(RuntimeError, match="broken loss"):
            ba.Recorder.from_batches(model, data, loss_fn)
    else:
        ba.Recorder.from_batches(model, data, loss_fn)
    assert len(calls) == (2 if raises else 3)
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(model).items())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["frozen.weight", "frozen.bias"]
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (grads[name] is None)
        assert grads[name] is None or torch.equal(parameter.grad, grads[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
