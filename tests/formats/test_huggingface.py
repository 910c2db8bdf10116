"""Folders that the Trainer, PEFT and Accelerate wrote themselves give the posterior of their live optimisers."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bayesadam as ba
from bayesadam.errors import BayesAdamError, FileError, MatchError, SettingError
from bayesadam.readers import read_checkpoint, read_curvature
from bayesadam.readers.formats.huggingface import decay_orders, own_names
from cases import three_steps
from packages import lazy

transformers = lazy("transformers")
peft = lazy("peft")
accelerate = lazy("accelerate")

N = 12


# --- what is trained ------------------------------------------------------------------------------------------------


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def gpt2() -> nn.Module:
    """Its output layer is tied to its embedding."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=11,
        max_position_embeddings=8,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


def llama() -> nn.Module:
    """Norms that are no nn.LayerNorm: only their names tell."""
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=11,
        max_position_embeddings=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    """Saved under other names than it has in memory, in recent transformers."""
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
        num_labels=2,
    )
    return transformers.ViTForImageClassification(config)


def lora() -> Any:
    config = peft.LoraConfig(
        r=2,
        target_modules=["query", "value"],
        modules_to_save=["LayerNorm"],
        init_lora_weights=False,
        task_type="SEQ_CLS",
    )
    return peft.get_peft_model(bert(), config)


def examples(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (N, 6), generator=generator)
    classes = torch.randint(0, 2, (N,), generator=generator)
    kind = model.config.model_type  # type: ignore[union-attr]
    if kind == "vit":
        images = torch.randn(N, 3, 8, 8, generator=generator)
        return [{"pixel_values": x, "labels": y} for x, y in zip(images, classes, strict=True)]
    labels = classes if kind == "bert" else tokens
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


@dataclass
class Trained:
    """A folder, and what wrote it."""

    folder: Path
    build: Callable[[], Any]
    model: Any
    optimizer: torch.optim.Optimizer

    @property
    def order(self) -> list[list[str]]:
        """The true order, by identity."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]

    @property
    def shapes(self) -> list[list[torch.Size]]:
        return [[p.shape for p in group["params"]] for group in self.optimizer.param_groups]


def by_trainer(folder: Path, build: Callable[[], Any], **options: Any) -> Trained:
    model = seeded(build)
    trainer = transformers.Trainer(model, three_steps(folder), train_dataset=examples(model), **options)
    trainer.train()
    return Trained(folder / "checkpoint-3", build, model, trainer.optimizer)


CASES: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "bert": bert, "llama": llama, "vit": vit, "lora": lora}


@pytest.fixture(scope="module")
def wrote(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """(case) → what the Trainer left, trained once."""
    done: dict[str, Trained] = {}

    def get(case: str) -> Trained:
        if case not in done:
            torch.set_num_threads(1)
            done[case] = by_trainer(tmp_path_factory.mktemp(case), CASES[case])
        return done[case]

    return get


@pytest.fixture
def gpt2_copy(wrote: Any, tmp_path: Path) -> Path:
    """A folder to be broken."""
    return Path(shutil.copytree(wrote("gpt2").folder, tmp_path / "checkpoint-3"))


def by_accelerate(folder: Path, build: Callable[[], Any] = gpt2, safe: bool = True) -> Trained:
    model = seeded(build)
    runner = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = runner.prepare(model, optimizer, scheduler)
    rows = examples(model)
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    for _ in range(3):
        optimizer.zero_grad()
        runner.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
    runner.save_state(str(folder), safe_serialization=safe)
    return Trained(folder, build, model, optimizer)


def equal_states(read: Any, live: Any) -> bool:
    return (
        [group["params"] for group in read["param_groups"]] == [group["params"] for group in live["param_groups"]]
        and read["state"].keys() == live["state"].keys()
        and all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(live["state"][key][entry]))
            for key, state in read["state"].items()
            for entry, value in state.items()
        )
    )


def check_posterior(trained: Trained, folder: Path | None = None, fresh: Any = None, **options: Any) -> None:
    """The folder, with a model that was never trained, gives what the live optimiser does, to the last bit."""
    live = ba.Posterior.from_optimizer(trained.model, trained.optimizer, n_data=N)
    fresh = seeded(trained.build, seed=1) if fresh is None else fresh
    read = ba.Posterior.from_checkpoint(folder or trained.folder, fresh, n_data=N, **options)
    assert list(read.mode) == list(live.mode)
    for name, mode in live.mode.items():
        assert torch.equal(read.mode[name], mode), name
        assert torch.equal(read.structure.second_moment[name], live.structure.second_moment[name]), name
    assert dict(read.settings.prior_precision) == dict(live.settings.prior_precision)


# --- the Trainer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_trainers_folder_is_its_live_state(case: str, wrote: Any) -> None:
    trained = wrote(case)
    read = read_checkpoint(trained.folder)
    assert read.format == ("PEFT adapter" if case == "lora" else "Hugging Face Trainer")
    assert read.rules.partial == (case == "lora")
    assert (read.recorded.step, read.recorded.epoch, read.recorded.n_data) == (3, 1, None)
    own = trained.model.state_dict()
    assert read.rules.names is not None
    names = read.rules.names(trained.model)
    for key, tensor in read.weights.items():
        assert torch.equal(tensor, own[names.get(key, key)]), key
    assert equal_states(read.optimizer, trained.optimizer.state_dict())
    assert read.rules.orders is not None
    fitting = [
        order
        for order in read.rules.orders(seeded(trained.build, seed=1))
        if [[own[name].shape for name in group] for group in order] == trained.shapes
    ]
    assert fitting
    assert all(order == trained.order for order in fitting)
    assert [len(group) > 0 for group in trained.order] == [True, True]


@pytest.mark.parametrize("case", CASES)
def test_the_trainers_folder_gives_the_live_posterior(case: str, wrote: Any) -> None:
    check_posterior(wrote(case))


@pytest.mark.parametrize("case", ["gpt2", "bert", "llama", "vit"])
def test_the_config_builds_the_model_where_none_is_given(case: str, wrote: Any) -> None:
    trained = wrote(case)
    read = read_checkpoint(trained.folder)
    assert read.rules.model is not None
    before = torch.get_rng_state()
    built = read.rules.model()
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
    assert [name for name, _ in built.named_parameters()] == [name for name, _ in trained.model.named_parameters()]
    found = read_curvature(read).second_moment
    expected = ba.readers.read_optimizer(trained.model, trained.optimizer).second_moment
    own = own_names(list(read.weights), trained.model)
    assert {own.get(name, name) for name in found} == set(expected)
    for name, v in found.items():
        assert torch.equal(v, expected[own.get(name, name)])


@pytest.mark.parametrize("case", ["gpt2", "vit"])
def test_shards_are_one_model(case: str, wrote: Any, tmp_path: Path) -> None:
    trained = wrote(case)
    trained.model.save_pretrained(tmp_path, max_shard_size="1KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    for name in ("optimizer.pt", "trainer_state.json"):
        shutil.copy(trained.folder / name, tmp_path)
    whole, sharded = read_checkpoint(trained.folder), read_checkpoint(tmp_path)
    assert sharded.weights.keys() == whole.weights.keys()
    for name, tensor in whole.weights.items():
        assert torch.equal(sharded.weights[name], tensor)
    check_posterior(trained, tmp_path)


def test_files_of_torch_save_in_place_of_safetensors(gpt2_copy: Path, wrote: Any) -> None:
    trained = wrote("gpt2")
    (gpt2_copy / "model.safetensors").unlink()
    torch.save(trained.model.state_dict(), gpt2_copy / "pytorch_model.bin")
    read = read_checkpoint(gpt2_copy)
    assert read.ordered
    # Both names of the tied tensor are in such a file.
    assert read.weights.keys() == trained.model.state_dict().keys()
    check_posterior(trained, gpt2_copy)
    weights = dict(read.weights)
    (gpt2_copy / "pytorch_model.bin").unlink()
    names = sorted(weights)
    placed = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(names)}
    for shard in set(placed.values()):
        torch.save({name: weights[name] for name in names if placed[name] == shard}, gpt2_copy / shard)
    (gpt2_copy / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    assert not read_checkpoint(gpt2_copy).ordered
    check_posterior(trained, gpt2_copy)


def test_a_tied_tensor_may_be_saved_under_its_other_name(gpt2_copy: Path, wrote: Any) -> None:
    weights = load_file(gpt2_copy / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("transformer.wte.weight")
    save_file(weights, gpt2_copy / "model.safetensors")
    check_posterior(wrote("gpt2"), gpt2_copy)
    assert "lm_head.weight" in read_curvature(read_checkpoint(gpt2_copy)).second_moment


def test_an_optimiser_of_the_users_own_in_one_group(tmp_path: Path) -> None:
    def build() -> Any:
        model = bert()
        model.bert.embeddings.requires_grad_(False)  # type: ignore[union-attr,operator]
        return model

    model = seeded(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no"
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=examples(model), optimizers=(optimizer, None))
    trainer.train()
    trained = Trained(tmp_path / "checkpoint-2", build, model, trainer.optimizer)
    orders = read_checkpoint(trained.folder).rules.orders
    assert orders is not None
    assert trained.order in orders(seeded(build, seed=1))
    check_posterior(trained)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Named(nn.Module):
    """A module for every line of the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.Bias = nn.Parameter(torch.ones(3))
        self.ln_1 = nn.LayerNorm(3)
        self.rms = RMSNorm()
        self.q_norm = nn.BatchNorm1d(3)
        self.norm = nn.BatchNorm1d(3)
        self.normal = nn.Linear(3, 3)
        self.LayerNormal = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))])
        self.blocks[0].register_module("norm", nn.Linear(3, 3, bias=False))


@pytest.mark.parametrize("types", [(nn.LayerNorm,), (nn.LayerNorm, RMSNorm)])
@pytest.mark.parametrize(
    "patterns",
    [
        ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"],
        ["bias", "layernorm", "rmsnorm"],
        None,
    ],
)
def test_the_rules_of_all_releases_are_among_the_answers(types: Any, patterns: Any) -> None:
    """Against transformers' own function, with what each release gave it."""
    from transformers.trainer_pt_utils import get_parameter_names

    if patterns is not None and len(patterns) == 5:
        types = (nn.LayerNorm,)
    model = Named()
    decayed = set(get_parameter_names(model, types, patterns))
    if patterns is None:
        decayed = {name for name in decayed if "bias" not in name}
    names = [name for name, _ in model.named_parameters()]
    expected = [[name for name in names if name in decayed], [name for name in names if name not in decayed]]
    answers = decay_orders(model, names)
    assert expected in answers
    assert [names] in answers


# --- adapters -------------------------------------------------------------------------------------------------------


def test_an_adapter_read_into_what_peft_loads(wrote: Any) -> None:
    """Loaded for inference, nothing of it is trainable: the order must not depend on that."""
    trained = wrote("lora")
    base = seeded(bert)
    base.load_state_dict(
        {
            name.removeprefix("base_model.model.").replace("base_layer.", "").replace("original_module.", ""): tensor
            for name, tensor in trained.model.state_dict().items()
            if "lora_" not in name and "modules_to_save" not in name
        }
    )
    for trainable in (True, False):
        loaded = peft.PeftModel.from_pretrained(base, trained.folder, is_trainable=trainable)
        orders = read_checkpoint(trained.folder).rules.orders
        assert orders is not None
        assert trained.order in orders(loaded)
        loaded.unload()
        base = seeded(bert)


def test_an_adapter_by_another_name(wrote: Any, tmp_path: Path) -> None:
    """The name is the user's; the Trainer's folder has the adapter in a folder of that name."""

    def build() -> Any:
        return peft.get_peft_model(
            gpt2(),
            peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
            adapter_name="mine",
        )

    trained = by_trainer(tmp_path, build)
    assert (trained.folder / "mine" / "adapter_model.safetensors").is_file()
    assert [len(group) for group in trained.order] == [4, 0]
    check_posterior(trained)
    default = Path(shutil.copytree(trained.folder, tmp_path / "renamed"))
    for path in (default / "mine").iterdir():
        path.rename(default / path.name)
    check_posterior(trained, default)


def test_an_adapter_without_a_peft_model_around_it(tmp_path: Path) -> None:
    def build() -> Any:
        model = gpt2()
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))  # type: ignore[operator]
        return model

    trained = by_trainer(tmp_path, build)
    assert read_checkpoint(trained.folder).format == "PEFT adapter"
    check_posterior(trained)


def test_adapters_that_are_refused(wrote: Any, tmp_path: Path) -> None:
    trained = wrote("lora")
    read = read_checkpoint(trained.folder)
    names, orders = read.rules.names, read.rules.orders
    assert names is not None
    assert orders is not None
    with pytest.raises(MatchError, match=r"BertForSequenceClassification has none.*PeftModel\.from_pretrained"):
        names(bert())
    two = lora()
    two.add_adapter("other", peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["LayerNorm"]))
    with pytest.raises(MatchError, match=r"'default' and 'other': pass the model with that one alone"):
        names(two)
    # Of another size, the other cannot be meant.
    apart = lora()
    apart.add_adapter("other", peft.LoraConfig(r=3, target_modules=["query", "value"]))
    assert names(apart) == names(lora())
    wide = peft.get_peft_model(bert(), peft.LoraConfig(r=3, target_modules=["query", "value"]))
    with pytest.raises(MatchError, match="is another model's adapter"):
        names(wide)
    with pytest.raises(MatchError, match="is another model's adapter"):
        ba.Posterior.from_checkpoint(trained.folder, wide, n_data=N)
    both = Path(shutil.copytree(trained.folder, tmp_path / "both"))
    (both / "other").mkdir()
    shutil.copy(both / "adapter_config.json", both / "other")
    with pytest.raises(FileError, match=r"2 adapters, 'default', 'other'.*from_optimizer"):
        read_checkpoint(both)
    # Something else was trained as well, and PEFT did not save it.
    few = Path(shutil.copytree(trained.folder, tmp_path / "few"))
    weights = load_file(few / "adapter_model.safetensors")
    save_file({name: w for name, w in weights.items() if "LayerNorm" not in name}, few / "adapter_model.safetensors")
    with pytest.raises(MatchError, match="may belong to"):
        ba.Posterior.from_checkpoint(few, lora(), n_data=N)
    (few / "adapter_config.json").write_text("{}")
    with pytest.raises(FileError, match="no 'peft_type'"):
        read_checkpoint(few)


def test_what_was_trained_beside_the_adapter_is_not_made_up(wrote: Any, tmp_path: Path) -> None:
    """One group with every parameter, frozen ones too: the states tell which of them were trained."""
    model = seeded(lora)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = examples(model)
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    check_posterior(Trained(tmp_path, lora, model, optimizer))
    weights = load_file(tmp_path / "adapter_model.safetensors")
    lost = next(name for name in weights if "LayerNorm" in name)
    save_file({name: w for name, w in weights.items() if name != lost}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(MatchError, match=r"does not hold .*LayerNorm.* which the optimiser trained"):
        ba.Posterior.from_checkpoint(tmp_path, seeded(lora, seed=1), n_data=N)


# --- Accelerate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_saves_the_live_state(safe: bool, tmp_path: Path) -> None:
    trained = by_accelerate(tmp_path, safe=safe)
    read = read_checkpoint(tmp_path)
    assert (read.format, read.ordered) == ("Accelerate", not safe)
    assert equal_states(read.optimizer, trained.optimizer.state_dict())
    own = trained.model.state_dict()
    for name, tensor in read.weights.items():
        assert torch.equal(tensor, own[name])
    check_posterior(trained)


def test_accelerate_in_shards(tmp_path: Path) -> None:
    trained = by_accelerate(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    accelerate.Accelerator(cpu=True).save_model(trained.model, str(tmp_path), max_shard_size="1KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    check_posterior(trained)


def test_several_models_and_optimisers_are_read_from_their_files(tmp_path: Path) -> None:
    runner = accelerate.Accelerator(cpu=True)
    models = [nn.Linear(3, 2), nn.Linear(2, 4)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    prepared = runner.prepare(*models, *optimizers)
    for model, optimizer in zip(prepared[:2], prepared[2:], strict=True):
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizer.step()
    runner.save_state(str(tmp_path))
    with pytest.raises(FileError, match=r"optimizer\.bin and optimizer_1\.bin: pass .* optimizer_path="):
        read_checkpoint(tmp_path)
    with pytest.raises(SettingError, match=r"optimizer_key='optimizer_1' makes no sense"):
        read_checkpoint(tmp_path, optimizer_key="optimizer_1")
    trained = Trained(tmp_path, lambda: nn.Linear(2, 4), prepared[1], prepared[3])
    check_posterior(trained, tmp_path / "model_1.safetensors", optimizer_path=tmp_path / "optimizer_1.bin")


# --- refused --------------------------------------------------------------------------------------------------------


def test_a_folder_of_checkpoints_names_the_newest(wrote: Any, tmp_path: Path) -> None:
    for number in (9, 10, 200):
        shutil.copytree(wrote("gpt2").folder, tmp_path / f"checkpoint-{number}")
    with pytest.raises(
        FileError,
        match="folder of checkpoints, checkpoint-9, checkpoint-10, checkpoint-200: .*"
        rf"{re.escape(str(tmp_path))}/checkpoint-200",
    ):
        read_checkpoint(tmp_path)
    # Beside the final model there is no optimiser's state.
    wrote("gpt2").model.save_pretrained(tmp_path)
    with pytest.raises(FileError, match=r"no optimiser state.*checkpoint-200', 'checkpoint-9"):
        read_checkpoint(tmp_path)
    check_posterior(wrote("gpt2"), tmp_path, optimizer_path=tmp_path / "checkpoint-9" / "optimizer.pt")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(FileError, match=r"no weights.*'checkpoint-9'"):
        read_checkpoint(tmp_path)


def test_shards_that_are_refused(wrote: Any, tmp_path: Path) -> None:
    trained = wrote("gpt2")
    trained.model.save_pretrained(tmp_path, max_shard_size="1KB")
    shutil.copy(trained.folder / "optimizer.pt", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    name, shard = next(iter(whole["weight_map"].items()))

    def refused(message: str) -> None:
        model = seeded(gpt2, seed=1)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(FileError, match=message):
            ba.Posterior.from_checkpoint(tmp_path, model, n_data=N)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    content = (tmp_path / shard).read_bytes()
    (tmp_path / shard).write_bytes(content[:-8])
    refused(f"{shard} is truncated")
    (tmp_path / shard).write_bytes(b"")
    refused(f"{shard} is empty")
    (tmp_path / shard).unlink()
    refused(rf"lacks {shard}, one of \d+ files")
    (tmp_path / shard).write_bytes(content)
    outside = tmp_path.parent / "outside.safetensors"
    outside.write_bytes(content)
    for path in (f"../{outside.name}", str(outside), "sub/a.safetensors", "..\\outside.safetensors", "..", ""):
        index.write_text(json.dumps({"weight_map": {**whole["weight_map"], name: path}}))
        refused("not in its own folder")
    other = next(value for value in whole["weight_map"].values() if value != shard)
    index.write_text(json.dumps({"weight_map": {**whole["weight_map"], name: other}}))
    refused(f"{other} lacks '{name}'")
    for broken in ("{", "[]", "{}", '{"weight_map": {"a": 3}}'):
        index.write_text(broken)
        refused(r"model\.safetensors\.index\.json (is|holds|has)")
    index.unlink()
    refused("copy the whole folder")


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin"])
def test_no_code_is_run(name: str, plain: bool, gpt2_copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "code was run"
    if name == "pytorch_model.bin":
        (gpt2_copy / "model.safetensors").unlink()
    for other in ("training_args.bin", "rng_state.pth", "scheduler.pt"):
        (gpt2_copy / other).write_bytes(pickle.dumps(Evil(marker)))
    if plain:
        (gpt2_copy / name).write_bytes(pickle.dumps(Evil(marker)))
    else:
        torch.save({"state": Evil(marker)}, gpt2_copy / name)
    with pytest.raises(FileError, match=r"made to run code|truncated, damaged"):
        read_checkpoint(gpt2_copy)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists()


def test_the_trainers_own_pickles_are_not_opened(gpt2_copy: Path, wrote: Any, tmp_path: Path) -> None:
    marker = tmp_path / "code was run"
    for name in ("training_args.bin", "rng_state.pth", "scheduler.pt"):
        (gpt2_copy / name).write_bytes(pickle.dumps(Evil(marker)))
    check_posterior(wrote("gpt2"), gpt2_copy)
    assert not marker.exists()


def test_damaged_folders(gpt2_copy: Path) -> None:
    for name, message in (
        ("model.safetensors", "truncated or damaged"),
        ("optimizer.pt", "truncated, damaged"),
        ("trainer_state.json", r"trainer_state\.json is truncated"),
        ("config.json", r"config\.json is truncated"),
    ):
        content = (gpt2_copy / name).read_bytes()
        (gpt2_copy / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(FileError, match=message):
            ba.Posterior.from_checkpoint(gpt2_copy, gpt2(), n_data=N)
        (gpt2_copy / name).write_bytes(content)
    torch.save({"lr": 0.1}, gpt2_copy / "optimizer.pt")
    with pytest.raises(FileError, match=r"optimizer\.pt holds no optimiser's state"):
        read_checkpoint(gpt2_copy)
    (gpt2_copy / "optimizer.pt").unlink()
    with pytest.raises(FileError, match=r"no optimiser state.*optimizer_path="):
        read_checkpoint(gpt2_copy)
    with pytest.raises(SettingError, match="makes no sense"):
        read_checkpoint(gpt2_copy, weights_key="model")


@pytest.mark.parametrize("case", ["gpt2", "lora", "accelerate"])
def test_a_damaged_state_is_not_opened_where_another_is_named(case: str, wrote: Any, tmp_path: Path) -> None:
    trained = by_accelerate(tmp_path / "written") if case == "accelerate" else wrote(case)
    folder = Path(shutil.copytree(trained.folder, tmp_path / "damaged"))
    own = next(folder / name for name in ("optimizer.pt", "optimizer.bin") if (folder / name).is_file())
    other = Path(shutil.copy(own, tmp_path / "kept.pt"))
    pickled = pickle.dumps(Evil(tmp_path / "code was run"))
    for content in (other.read_bytes()[: other.stat().st_size // 2], b"", pickled):
        own.write_bytes(content)
        with pytest.raises(FileError, match=rf"{own.name} (is truncated, damaged|is empty|would call)"):
            read_checkpoint(folder)
        read = read_checkpoint(folder, optimizer_path=other)
        assert equal_states(read.optimizer, trained.optimizer.state_dict())
        assert read.optimizer_path == other
    check_posterior(trained, folder, optimizer_path=other)
    # The one that is named is the one that counts.
    shutil.copy(other, own)
    bad = tmp_path / "bad.pt"
    bad.write_bytes(other.read_bytes()[: other.stat().st_size // 2])
    with pytest.raises(FileError, match=r"bad\.pt is truncated, damaged"):
        read_checkpoint(folder, optimizer_path=bad)


def test_two_states_in_a_folder_need_no_key_where_a_third_is_named(gpt2_copy: Path, wrote: Any, tmp_path: Path) -> None:
    other = shutil.copy(gpt2_copy / "optimizer.pt", tmp_path / "kept.pt")
    shutil.copy(gpt2_copy / "optimizer.pt", gpt2_copy / "optimizer.bin")
    with pytest.raises(FileError, match="one as optimizer_path="):
        read_checkpoint(gpt2_copy)
    check_posterior(wrote("gpt2"), gpt2_copy, optimizer_path=other)


def test_the_named_state_is_the_one_that_an_adapter_is_matched_with(wrote: Any, tmp_path: Path) -> None:
    """The folder's own state is of another shape: nothing of it may reach the order of the parameters."""
    folder = Path(shutil.copytree(wrote("lora").folder, tmp_path / "checkpoint-3"))
    other = shutil.copy(folder / "optimizer.pt", tmp_path / "kept.pt")
    shutil.copy(wrote("gpt2").folder / "optimizer.pt", folder / "optimizer.pt")
    check_posterior(wrote("lora"), folder, optimizer_path=other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MyOwnModel"]}, "'MyOwnModel', which transformers does not define"),
        ({"architectures": ["Trainer"]}, "'Trainer', which transformers does not define"),
        ({"n_embd": "wide"}, "cannot build 'GPT2LMHeadModel'"),
        ({"architectures": None}, None),
        ({"architectures": []}, None),
        ({"architectures": ["GPT2LMHeadModel", "GPT2Model"]}, None),
        ({"auto_map": {"AutoModel": "somewhere--modeling.Mine"}}, None),
        ({"vision": [{"backbone_config": {"model_type": "timm_backbone"}}]}, None),
    ],
)
def test_what_the_config_cannot_build(change: Any, message: str | None, gpt2_copy: Path, wrote: Any) -> None:
    path = gpt2_copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    build = read_checkpoint(gpt2_copy).rules.model
    if message is None:
        assert build is None
    else:
        assert build is not None
        with pytest.raises(MatchError, match=message + ".*pass it"):
            build()
    # With the model, none of that matters.
    check_posterior(wrote("gpt2"), gpt2_copy)


def test_another_models_state(gpt2_copy: Path, wrote: Any) -> None:
    shutil.copy(wrote("llama").folder / "optimizer.pt", gpt2_copy)
    with pytest.raises(MatchError):
        ba.Posterior.from_checkpoint(gpt2_copy, gpt2(), n_data=N)
    with pytest.raises(MatchError):
        read_curvature(read_checkpoint(gpt2_copy))
    with pytest.raises(MatchError):
        ba.Posterior.from_checkpoint(wrote("llama").folder, gpt2(), n_data=N)


def test_states_in_another_order(gpt2_copy: Path) -> None:
    state = torch.load(gpt2_copy / "optimizer.pt", weights_only=True)
    first = state["param_groups"][0]["params"]
    first[:] = first[::-1]
    torch.save(state, gpt2_copy / "optimizer.pt")
    with pytest.raises(MatchError, match="param_names="):
        ba.Posterior.from_checkpoint(gpt2_copy, gpt2(), n_data=N)


def test_moments_that_are_not_numbers(gpt2_copy: Path) -> None:
    state = torch.load(gpt2_copy / "optimizer.pt", weights_only=True)
    state["state"][2]["exp_avg_sq"].fill_(float("nan"))
    torch.save(state, gpt2_copy / "optimizer.pt")
    with pytest.raises(BayesAdamError, match=r"nan|finite"):
        ba.Posterior.from_checkpoint(gpt2_copy, gpt2(), n_data=N)
