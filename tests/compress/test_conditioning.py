"""What stays of pruned networks, beside the normal equations of every row in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacfwd
from torch.nn.modules.conv import _ConvNd
from torch.utils.data import DataLoader, TensorDataset

import bayesadam as ba
from bayesadam.compress import condition
from bayesadam.errors import BayesAdamWarning
from bayesadam.readers import Rotation
from bayesadam.weights.diagonal import Diagonal
from cases import dense_moment, mlp, state_of, train
from compress.cases_compress import error, posterior_of, twice
from floats import assert_close
from predict.cases_networks import Attend, Conv1D, Lambda


def some(model: nn.Module, share: float = 0.5, seed: int = 0) -> dict[str, Tensor]:
    """Masks of the matrices, with a share of False."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.rand(p.shape, generator=generator) > share for name, p in model.named_parameters()}
    return {name: mask if mask.dim() > 1 else torch.ones_like(mask) for name, mask in drawn.items()}


def correlated(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).cumsum(-1)


def solved(a: Any, c: Any, w: Any, kept: Any) -> Any:
    """(A_RR + λ)⁻¹ (C_R + λ w_R) of one row."""
    ridge, new = 0.01 * a.diagonal().mean(), np.zeros(len(w))
    new[kept] = np.linalg.solve((a + ridge * np.eye(len(a)))[kept][:, kept], (c + ridge * w)[kept])
    return new


def exact(
    model: nn.Sequential, masks: Mapping[str, Tensor], dense: Tensor, small: Tensor | None = None
) -> dict[str, Tensor]:
    """The conditioned parameters: an output of a layer is linear in its parameters, with a Jacobian.

    The inputs are those of the dense network, and of the pruned one where they differ.
    """
    found: dict[str, Tensor] = {}
    small = dense if small is None else small
    for index, layer in enumerate(model):
        z, own = layer(dense), dict(layer.named_parameters())
        if isinstance(layer, nn.Linear | _ConvNd | Conv1D):
            axis = 1 if isinstance(layer, _ConvNd) else z.dim() - 1

            def jacobian(at: Tensor, f: nn.Module = layer, own: Any = own, axis: int = axis) -> Any:
                parts = jacfwd(lambda own: functional_call(f, own, at))(own)
                j = [part.movedim(axis, 0).reshape(part.shape[axis], -1, own[k].numel()) for k, part in parts.items()]
                return torch.cat(j, 2).detach().numpy()

            kept = torch.cat([masks[f"{index}.{key}"].flatten() for key in own]).numpy()
            w, new = torch.cat([p.detach().flatten() for p in own.values()]).numpy(), np.zeros(len(kept))
            outputs = z.movedim(axis, 0).flatten(1).detach().numpy()
            for row, out, of in zip(jacobian(small), outputs, jacobian(torch.randn_like(small)).any(1), strict=True):
                r = row[:, of]
                new[of] = solved(r.T @ r / len(r), r.T @ out / len(r), w[of], kept[of])
            parts = torch.from_numpy(new).split([p.numel() for p in own.values()])
            own = {key: part.view_as(own[key]) for key, part in zip(own, parts, strict=True)}
        found |= {f"{index}.{key}": p.detach() for key, p in own.items()}
        dense, small = z, functional_call(layer, own, small)
    return found


def assert_exact(mean: Mapping[str, Tensor], model: nn.Module, name: str, masks: Any, *inputs: Tensor) -> None:
    """Of one layer of the dense network."""
    layer = model.get_submodule(name)
    expected = exact(nn.Sequential(layer), {f"0.{key}": masks[f"{name}.{key}"] for key in layer.state_dict()}, *inputs)
    assert_close({key: mean[f"{name}.{key[2:]}"] for key in expected}, expected, rtol=1e-6)


def test_a_bias_that_the_posterior_does_not_hold_stays(tmp_path: Any) -> None:
    model, x = mlp(6, 5, 3).double(), correlated(40, 6)
    dense = posterior_of(model, names=["0.weight", "2.weight"])
    masks = {name: mask for name, mask in some(model).items() if name in dense.mode}
    small = condition(dense, masks, x)
    a, z = (x.T @ x / 40).numpy(), (model[0](x) - model[0].bias).detach()
    # A is of the inputs with the constant, whose diagonal λ is a share of.
    ridge = 0.01 * (np.trace(a) + 1) / 7 * np.eye(6)
    for row, w, out, kept in zip(small.mean["0.weight"], dense.mean["0.weight"], z.T, masks["0.weight"], strict=True):
        c = (x.T @ out / 40).numpy() + ridge @ w.numpy()
        assert_close(row[kept].numpy(), np.linalg.solve((a + ridge)[kept][:, kept], c[kept]), rtol=1e-6)
    small.save(tmp_path / "small.safetensors")
    loaded = ba.Posterior.load(tmp_path / "small.safetensors", copy.deepcopy(model)).model
    assert all(torch.equal(p, loaded.get_parameter(name)) for name, p in small.model.named_parameters())


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (lambda: [nn.Linear(6, 4)], (6,)),
        (lambda: [nn.Linear(6, 4, bias=False)], (3, 6)),
        (lambda: [nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2)], (4, 7)),
        (lambda: [nn.Conv2d(4, 6, (3, 2), padding=(2, 1), dilation=2, stride=(1, 2), groups=2, bias=False)], (4, 5, 6)),
        (lambda: [nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect")], (2, 4, 5)),
        (lambda: [nn.Conv3d(1, 2, 2)], (1, 3, 3, 3)),
        (lambda: [nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, output_padding=1, groups=2)], (4, 3, 4)),
        (lambda: [Conv1D(6, 4)], (2, 6)),
        (lambda: [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)], (6,)),
        (lambda: [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)], (2, 4, 4)),
    ],
)
def test_the_mean_is_the_gaussians_conditional(layers: Callable[[], list[nn.Module]], shape: tuple[int, ...]) -> None:
    model = nn.Sequential(*layers()).double().eval()
    masks, x = some(model), correlated(150, *shape)
    small = condition(posterior_of(model, delta=1.0), masks, x)
    expected = exact(model, masks, x)
    assert_close(dict(small.model.named_parameters()), expected, rtol=1e-8)
    assert_close(small.mean, expected, rtol=1e-8)


class Heads(nn.Module):
    """Attention of four linear layers."""

    def __init__(self, *, bias: bool, kdim: int, vdim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(n, 4, bias=bias) for n in (4, kdim, vdim, 4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [f(x).unflatten(-1, (2, 2)).transpose(1, 2) for f, x in ((self.q, q), (self.k, k), (self.v, v))]
        out: Tensor = self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("bias", "kdim", "vdim"), [(True, 4, 4), (False, 3, 5)])
def test_attention_is_four_linear_layers(batch_first: bool, bias: bool, kdim: int, vdim: int) -> None:
    model = Attend(bias=bias, kdim=kdim, vdim=vdim, batch_first=batch_first).double()
    heads = Heads(bias=bias, kdim=kdim, vdim=vdim).double()

    def to_heads(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name[10:].replace("out_proj", "out").replace("_proj_", "."): t for name, t in named.items()}
        for key in ("weight", "bias")[: bias + (kdim == 4)]:
            found |= {f"{x}.{key}": part for x, part in zip("qkv", found.pop(f"in.{key}").chunk(3), strict=True)}
        return found

    heads.load_state_dict(to_heads(model.state_dict()))
    masks, given = some(model), tuple(correlated(150, n, wide) for n, wide in ((5, 4), (7, kdim), (7, vdim)))
    small = to_heads(condition(posterior_of(model), masks, given).mean)
    assert_close(small, condition(posterior_of(heads), to_heads(masks), given).mean, rtol=1e-8)


def test_the_matrices_that_two_attentions_share_are_left() -> None:
    model = nn.Sequential(Attend(batch_first=True), Attend(batch_first=True)).double()
    model[1].attention.out_proj.weight = model[0].attention.out_proj.weight
    x = correlated(80, 3, 4)
    forward = lambda net, x: net[1](*[net[0](x, x, x)] * 3)  # noqa: E731
    dense, masks = posterior_of(model), some(model)
    small = condition(dense, masks, x, forward=forward)
    shared = "0.attention.out_proj.weight"
    assert torch.equal(small.mean[shared], dense.mode[shared] * masks[shared])
    for name in ("0.attention.in_proj_weight", "1.attention.in_proj_weight"):
        assert not small.mean[name][~masks[name]].any()
        assert not torch.equal(small.mean[name], dense.mode[name] * masks[name])


# --- inputs -----------------------------------------------------------------------------------------------------------


def deep(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 4)).to(dtype)


@pytest.mark.parametrize("kind", ["loader", "ragged", "numpy", "labelled", "named"])
def test_inputs_come_in_any_form(kind: str) -> None:
    dense, x = posterior_of(deep()), correlated(150, 6)
    y = torch.zeros(150)
    given = {
        "loader": iter([x[:100], x[100:]]),
        "ragged": DataLoader(TensorDataset(x, y), batch_size=64),
        "numpy": x.numpy(),
        "labelled": [(x, y)],
        "named": [{"input": x, "labels": y}],
    }[kind]
    expected = condition(dense, some(dense.model), x).mean
    assert_close(condition(dense, some(dense.model), given).mean, expected, rtol=1e-7)


@pytest.mark.parametrize("turned", [True, False])
def test_padding_does_not_count(turned: bool) -> None:
    """Position by position, with the sequence first or second inside."""

    def forward(self: Any, x: Tensor, attention_mask: Tensor) -> Any:
        z = self.second(self.first(x.transpose(0, 1) if turned else x).tanh())
        return (z.transpose(0, 1) if turned else z).mean(1)

    model = Lambda(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 2)).double()
    dense, x = posterior_of(model), correlated(150, 7, 4)
    mask = (torch.arange(7) < torch.randint(1, 8, (150, 1))).long()
    filled = torch.where(mask[..., None] == 1, x, 50 * torch.randn_like(x))
    found = [condition(dense, some(dense.model), {"x": each, "attention_mask": mask}).mean for each in (x, filled)]
    assert_close(found[0], found[1], rtol=1e-8)
    # The same as without the padded positions.
    alone = condition(
        dense, some(dense.model), {"x": x[mask == 1][:, None], "attention_mask": torch.ones(int(mask.sum()), 1)}
    )
    assert_close(found[0], alone.mean, rtol=1e-8)


def test_a_layer_used_twice_meets_both_inputs_of_the_dense_network() -> None:
    model, x = twice().double(), correlated(100, 4)
    masks = some(model)
    small = condition(posterior_of(model), masks, x)
    assert_exact(small.mean, model, "layer", masks, torch.cat([x, model.layer(x).tanh()]))


def test_experts_that_some_batches_use() -> None:
    """The sign of a batch chooses the expert; one is never chosen."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.head(self.experts[int(x.mean() > 0)](x).tanh())

    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model, x = Lambda(forward, experts=experts, head=nn.Linear(4, 2)).double(), correlated(60, 4)
    masks, batches = some(model), (x.abs(), -x.abs(), x.abs() / 2)
    with pytest.warns(BayesAdamWarning, match=r"no input reaches experts\.2\.weight"):
        small = condition(posterior_of(model), masks, iter(batches))
    dense, pruned = [], []
    for index, inputs in ((0, batches[1]), (1, torch.cat([batches[0], batches[2]]))):
        assert_exact(small.mean, model, f"experts.{index}", masks, inputs)
        dense.append(model.experts[index](inputs).tanh())
        pruned.append(small.model.experts[index](inputs).tanh())
    # The head has seen what both of them give.
    assert_exact(small.mean, model, "head", masks, torch.cat(dense).detach(), torch.cat(pruned).detach())
    assert torch.equal(small.mean["experts.2.weight"], model.experts[2].weight * masks["experts.2.weight"])


def test_tied_weights_and_tables_are_removed_and_left() -> None:
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12, bias=False)).double()
    model[2].weight = model[0].weight
    dense, masks = posterior_of(model), some(model)
    small = condition(dense, masks, torch.randint(12, (90, 2)))
    assert small.model[2].weight is small.model[0].weight
    assert torch.equal(small.mean["0.weight"], dense.mode["0.weight"] * masks["0.weight"])
    assert not torch.equal(small.mean["1.weight"], dense.mode["1.weight"] * masks["1.weight"])


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_type_is_nearer_than_masking(dtype: torch.dtype, compiled: bool) -> None:
    model, x = deep(dtype).eval(), correlated(150, 6).to(dtype)
    dense = posterior_of(model)
    if compiled:
        model.compile(backend="eager")
        model(x)
    masks = some(model)
    small, masked = condition(dense, masks, x).model, condition(dense, masks).model
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert all(not p[~masks[name]].any() for name, p in small.named_parameters())
    assert error(small, model, x) < 0.5 * error(masked, model, x)


@pytest.mark.parametrize("inputs", [None, correlated(150, 6)])
def test_nothing_removed_moves_nothing_and_nothing_of_the_users_changes(inputs: Tensor | None) -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 4)).double().train()
    before, dense = state_of(model), posterior_of(model)
    mode = copy.deepcopy(dense.mode)
    state, whole = torch.get_rng_state(), some(model, share=-1.0)
    small = condition(dense, whole, inputs)
    assert_close(small.mean, dense.mode, rtol=1e-12)
    condition(dense, some(model), inputs)
    ba.prune(dense, 0.0, inputs=inputs)
    ba.prune(dense, 0.5, inputs=inputs)
    assert state_of(model) == before
    assert_close(dense.mode, mode, rtol=1e-300)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("structure", ["diagonal", "inputs"])
def test_biases_outside_the_masks_are_removed_too(structure: str) -> None:
    model, x = deep(), correlated(150, 6)
    dense = posterior_of(model, delta=1.0)
    masks = {name: torch.rand(p.shape) > 0.5 for name, p in model.named_parameters()}
    small = condition(dense, masks, x) if structure == "diagonal" else condition(dense.with_inputs(x), masks)
    assert all(not p[~masks[name]].any() for name, p in small.model.named_parameters())
    if structure == "diagonal":
        assert_close(small.mean, exact(model.eval(), masks, x), rtol=1e-8)


@pytest.mark.parametrize("moved", [True, False])
def test_the_dense_network_is_that_of_the_mean(moved: bool) -> None:
    dense, x = posterior_of(deep(), delta=20.0, form="map" if moved else "likelihood"), correlated(150, 6)
    for p in dense.model.parameters() if moved else ():
        p.data *= 2
    assert_close(condition(dense, some(dense.model, share=-1.0), x).mean, dense.mean)
    assert_close(ba.prune(dense, 0.0, inputs=x, rounds=1).mean, dense.mean)


@pytest.mark.slow
def test_an_adapters_base_is_conditioned() -> None:
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False))
    x = correlated(150, 6).float()
    names = [name for name, p in model.named_parameters() if "lora_" in name]
    dense = posterior_of(model, names=names)
    masks = {name: mask for name, mask in some(model).items() if name.endswith("base_layer.weight")}
    small, masked = condition(dense, masks, x).model, condition(dense, masks).model
    assert all(not small.get_parameter(name)[~mask].any() for name, mask in masks.items())
    assert error(small, model, x) < 0.5 * error(masked, model, x)


# --- the posterior's own input sides ----------------------------------------------------------------------------------


def test_inputs_are_known_to_a_posterior_with_them() -> None:
    model, x = deep(), correlated(150, 6)
    small = condition(posterior_of(model, delta=1.0).with_inputs(x), masks := some(model))
    for name, inputs in (("0", x), ("3", model[0](x).tanh().detach())):
        assert_exact(small.mean, model, name, masks, inputs)


@pytest.mark.parametrize("layer", [nn.Linear(5, 4), nn.Conv1d(3, 4, 2), Conv1D(5, 4)])
@pytest.mark.parametrize("sides", ["both", "inputs"])
def test_kronecker_factors_stand_in_for_inputs(layer: nn.Module, sides: str) -> None:
    layer = copy.deepcopy(layer).double()
    w = layer.weight.detach()
    q: list[Tensor | None] = [torch.linalg.qr(correlated(n, n)).Q.contiguous() for n in (len(w), w[0].numel())]
    if sides == "inputs":
        q[1 if isinstance(layer, Conv1D) else 0] = None
    moment = torch.rand(w.shape, dtype=torch.float64)
    dense = posterior_of(layer, {"weight": moment, "bias": torch.ones(4)}, delta=1.0)
    curvature = Diagonal(dense.curvature.second_moment, {"weight": Rotation(*q)})
    dense = ba.Posterior(dense.mode, curvature, dense.settings, dense.omitted, model=layer)
    mask = some(layer)["weight"]
    v = dense_moment(Diagonal({"weight": moment}, {"weight": Rotation(*q)})).reshape(len(w), -1, len(w), w[0].numel())
    transposed = isinstance(layer, Conv1D)
    a = torch.einsum("aibi->ab" if transposed else "iaib->ab", v).numpy()
    rows, kept = (t.T if transposed else t.flatten(1) for t in (w, mask))
    expected = [solved(a, a @ row, row, keep) for row, keep in zip(rows.numpy(), kept.numpy(), strict=True)]
    found = condition(dense, {"weight": mask}).mean["weight"]
    assert_close(found.T if transposed else found.flatten(1), torch.from_numpy(np.stack(expected)), rtol=1e-8)


# --- pruning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 8])
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("exclude", [(), ("3.weight",)])
@pytest.mark.parametrize("structure", ["diagonal", "inputs"])
def test_exactly_the_fraction_is_removed(rounds: int, scope: Any, exclude: Any, structure: str, tmp_path: Any) -> None:
    model, x = deep(torch.float32), correlated(150, 6).float()
    dense = posterior_of(model, delta=1.0)
    given = {"inputs": x} if structure == "diagonal" else {}
    dense = dense if given else dense.with_inputs(x)
    small = ba.prune(dense, 0.45, scope=scope, exclude=exclude, rounds=rounds, **given)
    zeros = {name: p == 0 for name, p in small.model.named_parameters()}
    sizes = [54] if exclude else [54, 36]
    counts = [round(0.45 * n) for n in sizes] if scope == "layer" else [round(0.45 * sum(sizes))]
    assert sum(int(zero.sum()) for zero in zeros.values()) == sum(counts)
    small.save(tmp_path / "small.safetensors")
    for each in (small, ba.Posterior.load(tmp_path / "small.safetensors", deep(torch.float32))):
        assert_close(each.mean, dict(small.model.named_parameters()))
        if given:
            draws, variance = each.sample(20), each.variance
            for name, zero in zeros.items():
                assert not zero.any() or float(draws[name][:, zero].abs().max()) < 1e-13
                assert_close(variance[name], torch.where(zero, 0, dense.variance[name]), atol=1e-25)


@pytest.mark.parametrize("rounds", [1, 8])
def test_a_pattern_is_kept(rounds: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)).double()
    x = correlated(100, 4, 4, 4)
    small = ba.prune(posterior_of(model), pattern="2:4", inputs=x, rounds=rounds).model
    for weight in (small[0].weight.movedim(1, -1), small[3].weight):
        assert ((weight.reshape(-1, 4) != 0).sum(1) == 2).all()


def test_by_default_a_weight_is_worth_what_no_other_makes_up_for() -> None:
    model, x = nn.Sequential(nn.Linear(6, 4)).double(), correlated(150, 6)
    dense = posterior_of(model)
    a = F.pad(x, (0, 1), value=1.0).numpy()
    a = a.T @ a / len(a)
    v, ridged = dense.curvature.second_moment["0.weight"].numpy(), a + 0.01 * a.diagonal().mean() * np.eye(7)
    g = v.sum(1, keepdims=True) / a.diagonal()[:6].sum()
    scores = np.abs(dense.mode["0.weight"].numpy()) * (g / np.linalg.inv(ridged).diagonal()[:6]) ** 0.375
    kept = torch.from_numpy(scores > np.sort(scores, axis=None)[11])
    expected = exact(model, {"0.weight": kept, "0.bias": torch.ones(4, dtype=torch.bool)}, x)
    assert_close(ba.prune(dense, 0.5, inputs=x, rounds=1).mean, expected, rtol=1e-8)


def test_rounds_are_nearer_than_one_and_one_than_masking() -> None:
    model, x = mlp(6, 30, 30, 1), correlated(400, 6).float()
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2), steps=100)
    dense = posterior_of(model, {name: torch.ones(p.shape) for name, p in model.named_parameters()})
    pruned = [ba.prune(dense, 0.7, inputs=x, rounds=rounds).model for rounds in (8, 1)]
    pruned.append(ba.prune(dense, 0.7, exclude="biases").model)
    errors = [error(each, model, x) for each in pruned]
    assert errors[0] < 0.8 * errors[1]
    assert errors[1] < 0.1 * errors[2]


@pytest.mark.slow
def test_the_transposed_layer_is_transformers_own() -> None:
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 6).double()
    own = Conv1D(6, 4).double()
    own.load_state_dict(layer.state_dict())
    x = correlated(150, 6)
    expected = condition(posterior_of(own), some(own), x).mean
    assert_close(condition(posterior_of(layer), some(layer), x).mean, expected, rtol=1e-12)
