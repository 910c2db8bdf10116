"""Leverage against what it is by its definition: matrices written out, inputs left out one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import FileError
from bayesadam.leverage import Layer, Leverage, from_inputs, from_structure, layer_inputs, layers_of
from bayesadam.leverage.leverage import RIDGE, WIDEST, factor, leverages
from floats import assert_close

NOTHING = Leverage((), {}, "second moments")


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int = 100) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


def network(seed: int = 0) -> tuple[nn.Module, torch.optim.Adam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, trained(model, *blobs(64, 0))


def posterior(seed: int = 0) -> ba.Posterior:
    model, optimizer = network(seed)
    return ba.Posterior.from_optimizer(model, optimizer, n_data=64, batch_size=64, likelihood="classification")


def blobs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=generator)
    centres = torch.tensor([[2.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]])
    return centres[y] + 0.5 * torch.randn(n, 4, generator=generator), y


# --- layers ---------------------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """As transformers has it: a linear layer whose weight has its inputs first."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


LAYERS = {
    "linear": (nn.Linear(6, 5), torch.randn(7, 6)),
    "linear with positions": (nn.Linear(6, 5), torch.randn(7, 3, 6)),
    "convolution": (nn.Conv2d(6, 4, 3), torch.randn(7, 6, 5, 5)),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2), torch.randn(7, 6, 5, 5)),
    "one dimension": (nn.Conv1d(6, 4, 3), torch.randn(7, 6, 5)),
    "transposed": (nn.ConvTranspose2d(6, 4, 3), torch.randn(7, 6, 5, 5)),
    "transformers": (Conv1D(5, 6), torch.randn(7, 3, 6)),
    "embedding": (nn.Embedding(6, 4), torch.randint(6, (7, 3))),
    "attention": (nn.MultiheadAttention(6, 2), torch.randn(3, 7, 6)),
}


def run(module: nn.Module, x: Tensor) -> None:
    module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)


def pooled_by_hand(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.Embedding):
        return torch.stack([torch.bincount(row, minlength=6) / len(row) for row in x])
    if isinstance(module, nn.MultiheadAttention):
        return x.mean(dim=0)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):
        return x.flatten(2).mean(dim=2)
    return x if x.dim() == 2 else x.mean(dim=1)


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_are_averaged_over_positions(name):
    module, x = LAYERS[name]
    (layer,) = layers_of(module, dict(module.named_parameters()))
    with layer_inputs(module, [layer], 7) as seen:
        run(module, x)
    assert_close(seen[""], pooled_by_hand(module, x))
    assert not module._forward_pre_hooks


@pytest.mark.parametrize("name", LAYERS)
def test_columns_are_the_second_moment_of_each_input(name):
    """A gradient of W is a sum of d aᵀ: an input that is 0 leaves its columns 0."""
    module, _ = LAYERS[name]
    (layer,) = layers_of(module, dict(module.named_parameters()))
    weight = dict(module.named_parameters())[layer.weight]
    columns = layer.columns(weight.detach().square())
    assert columns.shape == (6,)
    for j in range(6):
        without = weight.detach().clone()
        if layer.inputs_first:
            without[j] = 0
        elif layer.groups > 1:
            of_group = weight.shape[0] // layer.groups
            group, own = divmod(j, 6 // layer.groups)
            without[group * of_group : (group + 1) * of_group, own] = 0
        else:
            without[:, j] = 0
        assert_close(columns[j], (weight.detach().square() - without.square()).sum())


def test_a_layer_that_runs_twice_has_the_mean():
    layer = nn.Linear(3, 3)
    (about,) = layers_of(layer, dict(layer.named_parameters()))
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    with layer_inputs(layer, [about], 4) as seen:
        layer(a), layer(b)
    assert_close(seen[""], (a + b) / 2)


def test_padding_is_left_out():
    layer, x = nn.Linear(3, 2), torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    (about,) = layers_of(layer, dict(layer.named_parameters()))
    with layer_inputs(layer, [about], 2, mask) as seen:
        layer(x)
    assert_close(seen[""], torch.stack([x[0, :2].mean(dim=0), x[1].mean(dim=0)]))


def test_a_forward_of_the_modules_own_is_kept():
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].forward = lambda x: 2 * nn.functional.linear(x, model[0].weight, model[0].bias)
    own, x = model[0].forward, torch.randn(5, 4)
    with layer_inputs(model, layers_of(model, dict(model.named_parameters())), 5) as seen:
        assert_close(model(x), own(x))
    assert_close(seen["0"], x)
    assert model[0].forward is own


def test_hooks_are_gone_where_the_model_fails():
    layer = nn.Linear(3, 2)
    (about,) = layers_of(layer, dict(layer.named_parameters()))
    with pytest.raises(RuntimeError), layer_inputs(layer, [about], 2):
        layer(torch.randn(2, 5))
    assert "forward" not in vars(layer)


# --- factors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
def test_leverage_is_the_quadratic_form(groups):
    layer, a = Layer("m", "m.weight", 6, groups), torch.randn(5, 6, dtype=torch.float64)
    root = torch.randn(groups, 6 // groups, 9, dtype=torch.float64)
    moment = root @ root.mT
    whole = torch.block_diag(*moment)
    ridge = RIDGE * whole.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    expected = torch.einsum("bi,ij,bj->b", a, torch.linalg.inv(whole + ridge), a)
    assert_close(leverages(a, factor(moment), layer).sum(dim=1), expected)
    diagonal = whole.diagonal()
    expected = (a.square() / (diagonal + RIDGE * diagonal.mean())).sum(dim=1)
    assert_close(leverages(a, factor(diagonal), layer).sum(dim=1), expected)


def test_each_input_is_left_out_of_its_own():
    """Exact but for the ridge, which stays that of all."""
    a, n = torch.randn(20, 5, dtype=torch.float64), 20
    layer = Layer("m", "m.weight", 5)
    _, log_h = from_inputs([layer], [{"m": a[:12]}, {"m": a[12:]}], NOTHING)
    moment = a.T @ a / n
    for i in range(n):
        rest = (moment * n - torch.outer(a[i], a[i])) / (n - 1)
        ridge = RIDGE * moment.diagonal().mean() * n / (n - 1) * torch.eye(5, dtype=torch.float64)
        assert_close(log_h[i, 0].exp(), a[i] @ torch.linalg.inv(rest + ridge) @ a[i])


def test_wide_layers_are_cut_in_blocks():
    layer = Layer("m", "m.weight", WIDEST + 3)
    found, _ = from_inputs([layer], [{"m": torch.randn(20, WIDEST + 3)}], NOTHING)
    assert found.factors["m"].shape == (2, WIDEST // 2 + 2, WIDEST // 2 + 2)


def test_the_state_gives_the_column_sums_of_v():
    model, optimizer = network()
    q = ba.Posterior.from_optimizer(model, optimizer, n_data=64)
    found = from_structure(q.layers, q.structure)
    assert [x.weight for x in found.layers] == ["0.weight", "2.weight"]
    assert found.source == "second moments"
    step = optimizer.state[model[0].weight]["step"]
    sums = (optimizer.state[model[0].weight]["exp_avg_sq"] / (1 - 0.999**step)).sum(dim=0)
    assert_close(found.factors["0"], (sums + RIDGE * sums.mean()).rsqrt())


def test_adafactors_column_factor_is_taken_as_it_is():
    x, y = blobs(64, 0)
    model, _ = network()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    found = ba.Posterior.from_optimizer(model, optimizer, n_data=64, batch_size=64).state_leverage
    for module in ("0", "2"):
        column = optimizer.state[model.get_submodule(module).weight]["col_var"].flatten()
        # The scale of a layer is the median's.
        expected = (column + RIDGE * column.mean()).rsqrt()
        assert_close(found.factors[module] / found.factors[module].mean(), expected / expected.mean(), rtol=1e-4)


def test_the_factors_of_peft_are_layers():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
    optimizer, (x, y) = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01), blobs(200, 0)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    found = ba.Posterior.from_optimizer(model, optimizer, n_data=200, batch_size=200, likelihood="classification")
    widths = {layer.module.rpartition("lora_")[2]: layer.width for layer in found.layers}
    assert widths == {"A.default": 4, "B.default": 2}
    calibrated = ba.calibrate(found, blobs(100, 1))
    assert calibrated.leverage.source == "inputs"
    assert float(calibrated.novelty(20 * x[:5]).min()) > float(calibrated.novelty(x).median())


@pytest.mark.filterwarnings("ignore:the posterior has 8 gradients")
def test_a_kronecker_posterior_gives_its_right_factor():
    model, _ = network()
    x, y = blobs(64, 1)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 64, 8)]
    recorder = ba.Recorder.from_batches(model, batches, nn.functional.cross_entropy)
    q = ba.Posterior.from_recorder(model, recorder, n_data=64, likelihood="classification")
    found = from_structure(q.layers, q.structure)
    assert found.source == "gradients"
    moment = torch.zeros(4, 4)
    for inputs, labels in batches:
        (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(inputs), labels), [model[0].weight])
        moment += grad.T @ grad / len(batches)
    ridge = RIDGE * moment.diagonal().mean() * torch.eye(4)
    assert_close(found.factors["0"][0] @ found.factors["0"][0].T @ (moment + ridge), torch.eye(4), rtol=1e-3, atol=1e-3)


# --- what grows with it ---------------------------------------------------------------------------------------------


def test_ratios_are_means_over_layers_relative_to_medians():
    log_h = torch.randn(9, 3, dtype=torch.float64)
    found = Leverage((), {}, "inputs").against(log_h)
    other = torch.randn(4, 3, dtype=torch.float64)
    h, medians = log_h.exp(), log_h.quantile(0.5, dim=0).exp()
    gentle, steep = (h / medians).log().mean(dim=1).exp(), (h / medians).mean(dim=1)
    expected = (other.exp() / medians).log().mean(dim=1).exp() / gentle.quantile(0.5)
    assert_close(found.ratios(other).gentle, expected)
    assert_close(found.ratios(other).steep, (other.exp() / medians).mean(dim=1) / steep.quantile(0.5))
    assert_close(found.ratios(other).growth, ((1 + expected) / 2).sqrt())
    assert_close(found.ratios(log_h).gentle.quantile(0.5), torch.ones((), dtype=torch.float64))


def test_temperatures_grow_with_leverage():
    data = blobs(200, 2)
    q = ba.calibrate(posterior(), data)
    assert q.calibration.method == "temperature"
    assert q.leverage.source == "inputs"
    x = torch.cat([data[0][:50], 10 * torch.randn(50, 4)])
    p, plain = q.predict(x), q.predict(x, shift=False)
    with torch.no_grad():
        logits = q.model(x)
    with layer_inputs(q.model, q.leverage.layers, 100) as seen, torch.no_grad():
        q.model(x)
    growth = q.leverage.ratios(q.leverage.log_h(seen)).growth
    assert_close(p.probs, (logits / q.temperature / growth[:, None]).softmax(dim=1))
    assert_close(plain.probs, (logits / q.temperature).softmax(dim=1))
    assert float(growth[50:].median()) > 2 * float(growth[:50].median())
    assert float(p.novelty[50:].median()) > float(p.novelty[:50].median())


def test_novelty_is_the_entropy_at_a_steeper_temperature():
    q = ba.calibrate(posterior(), blobs(200, 2))
    x = torch.randn(20, 4)
    with layer_inputs(q.model, q.leverage.layers, 20) as seen, torch.no_grad():
        logits = q.model(x)
    r = q.leverage.ratios(q.leverage.log_h(seen)).steep
    at = logits / (1 + 10 * math.pi / 4 * r**1.5).sqrt()[:, None]
    assert_close(q.predict(x).novelty, torch.distributions.Categorical(logits=at).entropy())


def test_familiar_inputs_have_uniform_p_values():
    q = ba.calibrate(posterior(), blobs(400, 2))
    p = q.predict(blobs(4000, 3)[0]).novelty_pvalue
    for level in (0.05, 0.2, 0.5):
        # Both samples count: the held-out scores have a deviation of their own.
        error = math.sqrt(level * (1 - level) * (1 / 400 + 1 / 4000))
        assert abs(float((p <= level).double().mean()) - level) < 4 * error


def test_without_held_out_data_a_batch_is_its_own_reference():
    q = posterior()
    x = torch.cat([blobs(50, 3)[0], 30 * torch.randn(50, 4)])
    ranks = q.novelty(x)
    assert ba.scores.auroc(ranks[:50], ranks[50:]) > 0.75
    assert_close(q.novelty([(x[:30],), (x[30:],)]), ranks)
    few = q.novelty(x, reference=blobs(10, 4)[0])
    assert ba.scores.auroc(few[:50], few[50:]) > 0.9


def test_a_mixture_has_the_mean_of_its_members():
    members = [posterior(0), posterior(1)]
    q = ba.calibrate(ba.Mixture(members), blobs(100, 2))
    x = torch.randn(10, 4)
    each = [ba.calibrate(member, blobs(100, 2)).predict(x) for member in members]
    p = q.predict(x)
    assert_close(p.novelty, (each[0].novelty + each[1].novelty) / 2)
    assert_close(p.probs, (each[0].probs + each[1].probs) / 2)


def test_it_is_saved(tmp_path):
    q, x = ba.calibrate(posterior(), blobs(100, 2)), torch.randn(10, 4)
    q.save(tmp_path / "q.safetensors")
    again = ba.Posterior.load(tmp_path / "q.safetensors", network(5)[0])
    for name in ("probs", "novelty", "novelty_pvalue"):
        assert_close(getattr(again.predict(x), name), getattr(q.predict(x), name))


def test_it_is_published(tmp_path):
    found, (x, _) = ba.calibrate(posterior(), blobs(100, 1)), blobs(20, 2)
    with pytest.warns(ba.errors.BayesAdamWarning, match="less than the memory"):
        found.export(tmp_path / "curvature.safetensors")
    again = ba.Posterior.load(tmp_path / "curvature.safetensors", found.model)
    assert again.leverage.source == "inputs"
    assert_close(again.novelty(x), found.novelty(x))


def test_another_models_leverage_is_refused(tmp_path):
    q = ba.calibrate(posterior(), blobs(100, 2))
    with pytest.raises(FileError, match="leverage"):
        Leverage.loaded("a file", q.layers[:1], q.leverage.header(), q.leverage.tensors())
    wrong = {name: tensor[..., :2] for name, tensor in q.leverage.tensors().items()}
    with pytest.raises(FileError, match="leverage"):
        Leverage.loaded("a file", q.layers, q.leverage.header(), wrong)


def test_many_outputs_take_one_forward_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2000))
    optimizer = trained(model, torch.randn(64, 4), torch.randint(2000, (64,)), steps=5)
    q = ba.Posterior.from_optimizer(model, optimizer, n_data=64, likelihood="classification")
    q = ba.calibrate(q, (torch.randn(50, 4), torch.randint(2000, (50,))))
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    p = q.predict(torch.randn(5, 4))
    handle.remove()
    assert p.probs.shape == (5, 2000)
    assert p.novelty.shape == p.novelty_pvalue.shape == (5,)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore::bayesadam.errors.InputRangeWarning")
def test_numbers_have_their_leverage_as_novelty():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    x = torch.linspace(-1, 1, 200)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        (model(x) - x.sin()).square().mean().backward()
        optimizer.step()
    q = ba.Posterior.from_optimizer(model, optimizer, n_data=200, batch_size=200, likelihood="regression")
    q = ba.calibrate(q, (x[::2], x[::2].sin() + 0.1 * torch.randn(100, 1)))
    novelty = q.predict(torch.tensor([[0.5], [3.0], [30.0]])).novelty
    assert bool((novelty.diff() > 0).all())
