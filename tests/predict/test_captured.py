"""Captured graphs against plain work and a dense float64 reference; on CUDA alone."""

import copy

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.predict import _cuda
from floats import assert_close, close

pytestmark = pytest.mark.cuda


class Small(nn.Module):
    """Convolutions with strides, groups and a norm, then linear layers over places."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, groups=2),
        )
        self.mix = nn.Linear(16, 24)
        self.head = nn.Linear(24, classes)
        self.times = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).flatten(2).transpose(1, 2)
        return self.head(torch.tanh(self.mix(h)).mean(dim=1)) * self.times


def made(classes: int = 200, prior: float = 1.0) -> tuple[nn.Module, ba.Posterior, Tensor]:
    torch.manual_seed(0)
    model = Small(classes).cuda()
    x = torch.randn(6, 3, 9, 9, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.randint(classes, (6,), device="cuda")).backward()
        optimizer.step()
    model.eval()
    return model, ba.Posterior.from_optimizer(model, optimizer, 100, prior_precision=prior), x


def reference(posterior: ba.Posterior, x: Tensor, numbers: Tensor) -> Tensor:
    """Σ J² S in float64, example by example: (b, k)."""
    model = copy.deepcopy(posterior.model).double().eval()
    names = dict(model.named_parameters())
    rows = []
    for i in range(len(x)):
        outputs = model(x[i : i + 1].double())[0]
        row = []
        for k in numbers[i]:
            grads = torch.autograd.grad(outputs[k], list(names.values()), retain_graph=True)
            row.append(
                sum((g.square() * posterior.variance[n].double()).sum() for n, g in zip(names, grads, strict=True))
            )
        rows.append(torch.stack(row))
    return torch.stack(rows)


def is_replayed(p: ba.Predictive) -> bool:
    return "replayed" in p.plan


def test_captured_work_gives_what_plain_work_and_the_dense_reference_give() -> None:
    model, posterior, x = made()
    found = [posterior.predict(x, likelihood="classification", outputs="top", probes=0) for _ in range(5)]
    assert [is_replayed(p) for p in found] == [False, False, True, True, True]
    truth = reference(posterior, x, found[0].outputs)
    for p in found:
        assert torch.equal(p.outputs, found[0].outputs)
        assert_close(p.variance.double(), truth, rtol=5e-3)
    other = torch.randn_like(x)
    p = posterior.predict(other, likelihood="classification", outputs="top", probes=0)
    assert is_replayed(p)
    assert_close(p.variance.double(), reference(posterior, other, p.outputs), rtol=5e-3)
    assert_close(p.components[0].logits, model(other), atol=1e-5)


def test_scores_of_a_graph_have_the_signs_of_their_generator() -> None:
    _, posterior, x = made()

    def score(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return posterior.epistemic(x, likelihood="classification", probes=3, generator=generator).value

    plain = score(1), score(2)
    assert not close(*plain)
    for seed in (1, 2, 1):
        assert_close(score(seed), plain[seed - 1], rtol=1e-3)


def test_all_outputs_with_covariances_are_captured_too() -> None:
    _, posterior, x = made(classes=5)
    found = [posterior.predict(x, likelihood="classification", covariance=True) for _ in range(4)]
    for p in found[1:]:
        assert_close(p.covariance, found[0].covariance, rtol=1e-3, atol=1e-6)
        assert_close(p.novelty, found[0].novelty, rtol=1e-3)


def test_what_a_forward_looks_up_elsewhere_is_not_replayed() -> None:
    _, posterior, x = made()
    ask = {"likelihood": "classification", "outputs": "top", "probes": 0}
    scale = {"by": 1.0}

    def forward(network: nn.Module, batch: Tensor) -> Tensor:
        return network(batch) * scale["by"]

    found = [posterior.predict(x, forward=forward, **ask) for _ in range(4)]
    assert is_replayed(found[-1])
    scale["by"] = 2.0
    p = posterior.predict(x, forward=forward, **ask)
    assert not is_replayed(p)
    assert_close(p.variance, 4 * found[0].variance, rtol=5e-3)


def test_buffers_and_weights_are_read_anew_and_another_posterior_is_not_mistaken() -> None:
    model, posterior, x = made()
    ask = {"likelihood": "classification", "outputs": "top", "probes": 0}
    for _ in range(4):
        before = posterior.predict(x, **ask)
    model.body[1].running_var.mul_(3.0)
    after = posterior.predict(x, **ask)
    assert not close(after.variance, before.variance, rtol=1e-2)
    assert_close(after.variance.double(), reference(posterior, x, after.outputs), rtol=5e-3)
    narrower = posterior.replace(prior_precision=100.0)
    p = narrower.predict(x, **ask)
    assert_close(p.variance.double(), reference(narrower, x, p.outputs), rtol=5e-3)


def test_a_model_that_waits_for_the_device_is_run_plainly() -> None:
    _, posterior, x = made()

    def forward(network: nn.Module, batch: Tensor) -> Tensor:
        return network(batch) * (2.0 if float(batch.sum()) > 1e9 else 1.0)

    found = [
        posterior.predict(x, likelihood="classification", outputs="top", probes=0, forward=forward) for _ in range(5)
    ]
    assert not any(map(is_replayed, found))
    assert_close(found[-1].variance, found[0].variance)


def test_few_graphs_are_kept_and_none_beyond_the_model() -> None:
    model, posterior, x = made()
    for size in (2, 3, 4, 5):
        for _ in range(4):
            posterior.predict(x[:size], likelihood="classification", outputs="top", probes=0)
    graphs = [w for w in _cuda._known[model].values() if isinstance(w, _cuda._Graph)]
    assert len(graphs) == _cuda._KEPT
