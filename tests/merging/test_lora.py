"""Adapters are merged as what they add to a weight, whatever their factors, ranks and scalings."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bayesadam as ba
from bayesadam.lora import Adapter, pairs_in, scaling_of_folder
from bayesadam.merging import merge, merge_checkpoints
from cases import fit
from floats import assert_close

OUT, RANK, IN = 6, 2, 5


def adapter(seed: int = 0, rank: int = RANK, scale: float = 0.5) -> Adapter:
    draw = torch.Generator().manual_seed(seed)
    up, down = torch.randn(OUT, rank, generator=draw).double(), torch.randn(rank, IN, generator=draw).double()
    return Adapter(
        up, down, torch.rand(OUT, rank, generator=draw).double(), torch.rand(rank, IN, generator=draw).double(), scale
    )


def test_the_curvature_of_the_product_is_recovered():
    # v_B and v_A as E[G²] = r cᵀ and independent entries make them.
    r, c, each = torch.rand(OUT).double(), torch.rand(IN).double(), adapter()
    s2 = each.scale**2
    up_moment = s2 * r[:, None] * (each.down.square() @ c)[None]
    down_moment = s2 * c[None] * (each.up.square().T @ r)[:, None]
    found = each._replace(up_moment=up_moment, down_moment=down_moment).curvature()
    assert_close(found, torch.outer(r, c))


@pytest.mark.parametrize("t", [0.1, 7.0])
def test_neither_curvature_nor_product_depend_on_how_it_is_split(t):
    each = adapter()
    other = Adapter(t * each.up, each.down / t, each.up_moment / t**2, each.down_moment * t**2, each.scale)
    assert_close(each.curvature(), other.curvature())
    assert_close(each.change(), other.change())


def test_a_factor_that_had_no_gradient_gives_no_curvature():
    each = adapter()
    assert not bool(each._replace(down_moment=torch.zeros(RANK, IN).double()).curvature().any())


@pytest.mark.parametrize("rank", [2, 5, 8])
def test_factors_are_the_nearest_of_their_rank_and_split_evenly(rank):
    change = torch.randn(OUT, IN).double()
    up, down = adapter(rank=rank, scale=0.25).nearest(change)
    assert (up.shape, down.shape) == ((OUT, rank), (rank, IN))
    left, values, right = torch.linalg.svd(change)
    best = (left[:, : min(rank, IN)] * values[:rank]) @ right[: min(rank, IN)]
    assert_close(0.25 * up @ down, best)
    assert_close(up.norm(dim=0), down.norm(dim=1))


def test_names_in_models_and_files():
    assert [p.prefix for p in pairs_in(["a.lora_A.weight", "a.lora_B.weight", "b.lora_A.weight"])] == ["a"]
    found = pairs_in(["e.lora_embedding_A.x", "e.lora_embedding_B.x"])
    assert [(p.prefix, p.adapter) for p in found] == [("e", "x")]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"lora_alpha": 8, "r": 4}, 2.0),
        ({"lora_alpha": 8, "r": 4, "use_rslora": True}, 4.0),
        ({"lora_alpha": 8, "r": 4, "alpha_pattern": {"query": 2}}, 0.5),
        ({"peft_type": "PREFIX_TUNING"}, None),
    ],
)
def test_scaling_by_the_folder(tmp_path, config, expected):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert scaling_of_folder(tmp_path)("model.layer.query", None, 4) == expected


class Adapted(nn.Module):
    """A frozen linear layer with an adapter under PEFT's names."""

    def __init__(self, rank: int, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base_layer = nn.Linear(IN, OUT).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(IN, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, OUT, bias=False)})
        self.scaling = {"default": scale}

    def forward(self, x):
        return self.base_layer(x) + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))


def tuned(seed, rank=RANK, scale=0.5):
    model = nn.ModuleDict({"q": Adapted(rank, scale)})
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2, betas=(0.9, 0.97))
    target = torch.randn(IN, OUT, generator=draw)
    fit(model["q"], optimizer, ((x, x @ target) for x in torch.randn(80, 16, IN, generator=draw)))
    return model, optimizer


def product(state, scale):
    return scale * state["q.lora_B.default.weight"].double() @ state["q.lora_A.default.weight"].double()


def test_posteriors_of_other_ranks_and_scalings_are_merged_by_their_products():
    found = [tuned(0, rank=2, scale=0.5), tuned(1, rank=4, scale=2.0)]
    merged = merge([ba.Posterior.from_optimizer(m, o, 1280, prior_precision=1.0) for m, o in found])
    changes, curvatures = [], []
    for model, optimizer in found:
        a, b = model["q"].lora_A["default"].weight, model["q"].lora_B["default"].weight
        v = [optimizer.state[p]["exp_avg_sq"] / (1 - 0.97**80) for p in (b, a)]
        each = Adapter(b.detach(), a.detach(), *v, model["q"].scaling["default"])
        changes.append(each.change().double())
        curvatures.append(each.curvature().double())
    curvatures = [1 + c / c.mean() for c in curvatures]
    share = torch.stack(curvatures) / sum(curvatures)
    whole = (share * torch.stack(changes)).sum(0)
    left, values, right = torch.linalg.svd(whole, full_matrices=False)
    best = (left[:, :4] * values[:4]) @ right[:4]
    assert merged["q.lora_A.default.weight"].shape == (4, IN)
    assert_close(product(merged, 2.0), best, atol=1e-4)
    assert torch.equal(merged["q.base_layer.weight"], found[0][0]["q"].base_layer.weight)
    assert any("rank 4" in note for note in merged.report.notes)
    found[1][0].load_state_dict(merged)


def test_an_adapter_merged_with_itself_is_itself():
    model, optimizer = tuned(0)
    one = ba.Posterior.from_optimizer(model, optimizer, 1280, prior_precision=1.0)
    merged = merge([one, one.replace()])
    assert_close(product(merged, 0.5), product(model.state_dict(), 0.5), atol=1e-5)


def test_other_methods_are_refused():
    models = [ba.Posterior.from_optimizer(*tuned(seed), 1280, prior_precision=1.0) for seed in range(2)]
    with pytest.raises(ba.errors.SettingError, match="LoRA adapters are merged by method='damped' or 'fisher'"):
        merge(models, base=models[0])


def folder_of(path, model, optimizer, alpha, rank):
    """An adapter's weights, state and configuration in files; the names of the state are those of the file."""
    path.mkdir()
    names = {n: n.replace(".default", "") for n, p in model.named_parameters() if p.requires_grad}
    save_file(
        {short: model.state_dict()[n].contiguous() for n, short in names.items()}, path / "adapter_model.safetensors"
    )
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = list(names.values())
    torch.save(state, path / "optimizer.pt")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": alpha, "r": rank}))
    return path


def test_folders_give_what_posteriors_give(tmp_path):
    found = [tuned(0), tuned(1)]
    live = merge([ba.Posterior.from_optimizer(m, o, 1280, prior_precision=1.0) for m, o in found])
    paths = [folder_of(tmp_path / str(i), m, o, alpha=1, rank=2) for i, (m, o) in enumerate(found)]
    merge_checkpoints(paths, tmp_path / "adapter_model.safetensors")
    file = load_file(tmp_path / "adapter_model.safetensors")
    again = {name.replace("A.", "A.default.").replace("B.", "B.default."): tensor for name, tensor in file.items()}
    assert_close(product(again, 0.5), product(live, 0.5), atol=1e-5)
    (paths[1] / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ba.errors.MatchError, match=r"adapter_config\.json"):
        merge(paths)
