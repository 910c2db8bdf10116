"""Folders that the Trainer, PEFT and Accelerate wrote themselves give the posterior of their live optimisers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bayesadam as ba
from bayesadam.errors import FileError, MatchError
from bayesadam.readers import read_checkpoint
from bayesadam.readers.formats.huggingface import _adapter_names, decay_orders, own_names
from cases import three_steps
from formats.same import same

pytestmark = pytest.mark.slow


class Late:
    """A package that is imported when something of it is used: imports take longer than all other tests of formats."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(pytest.importorskip(self._name), attribute)


transformers, peft, accelerate = (Late(name) for name in ("transformers", "peft", "accelerate"))

N = 12
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11}


# --- what is trained ------------------------------------------------------------------------------------------------


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def gpt2() -> nn.Module:
    """Its output layer is tied to its embedding."""
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, max_position_embeddings=8, num_labels=2)
    )


def llama() -> nn.Module:
    """Norms that are no nn.LayerNorm: only their names tell."""
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
    return transformers.LlamaForCausalLM(config)


def lora() -> Any:
    parts = {"target_modules": ["query", "value"], "modules_to_save": ["LayerNorm"]}
    config = peft.LoraConfig(r=2, init_lora_weights=False, task_type="SEQ_CLS", **parts)
    return peft.get_peft_model(bert(), config)


def examples(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (N, 6), generator=generator)
    classes = torch.randint(0, 2, (N,), generator=generator)
    labels = classes if model.config.model_type == "bert" else tokens  # type: ignore[union-attr]
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


def others() -> Iterator[Any]:
    parts = {"target_modules": ["query"], "task_type": "SEQ_CLS"}
    yield peft.LoraConfig(r=2, use_dora=True, bias="lora_only", **parts)
    yield peft.LoraConfig(r=2, target_modules=["query", "word_embeddings"], task_type="SEQ_CLS")
    yield peft.AdaLoraConfig(total_step=10, **parts)
    yield peft.IA3Config(feedforward_modules=[], **parts)
    yield peft.VeraConfig(r=2, **parts)


CASES: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "bert": bert, "llama": llama, "lora": lora}


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
    assert same(read.optimizer, trained.optimizer.state_dict())
    assert read.rules.orders is not None
    fitting = [
        order
        for order in read.rules.orders(seeded(trained.build, seed=1))
        if [[own[name].shape for name in group] for group in order] == trained.shapes
    ]
    assert fitting
    assert all(order == trained.order for order in fitting)
    assert [len(group) > 0 for group in trained.order] == [True, True]


def test_shards_are_one_model(wrote: Any, tmp_path: Path) -> None:
    trained = wrote("gpt2")
    trained.model.save_pretrained(tmp_path, max_shard_size="1KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    for name in ("optimizer.pt", "trainer_state.json"):
        shutil.copy(trained.folder / name, tmp_path)
    whole, sharded = read_checkpoint(trained.folder), read_checkpoint(tmp_path)
    assert same({name: sharded.weights[name] for name in whole.weights}, dict(whole.weights))
    assert len(sharded.weights) == len(whole.weights)


def test_names_that_transformers_changes_on_saving_are_the_models_again(tmp_path: Path) -> None:
    text = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2})
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=4, patch_size=2, projection_dim=8)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text)
    model = seeded(lambda: transformers.LlavaForConditionalGeneration(config))
    model.save_pretrained(tmp_path)
    weights, own = load_file(tmp_path / "model.safetensors"), model.state_dict()
    names = own_names(list(weights), model)
    assert weights.keys() - own.keys() == names.keys() != set()
    assert all(torch.equal(tensor, own[names.get(key, key)]) for key, tensor in weights.items())


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
        ba.Posterior.from_checkpoint(trained.folder, wide, n_data=N)
    both = Path(shutil.copytree(trained.folder, tmp_path / "both"))
    (both / "other").mkdir()
    shutil.copy(both / "adapter_config.json", both / "other")
    with pytest.raises(FileError, match=r"2 adapters, 'default', 'other'.*from_optimizer"):
        read_checkpoint(both)


def test_the_names_of_other_adapters(tmp_path: Path) -> None:
    for number, config in enumerate(others()):
        model = peft.get_peft_model(seeded(bert), config)
        model.save_pretrained(tmp_path / str(number))
        weights = load_file(tmp_path / str(number) / "adapter_model.safetensors")
        shapes = {key: tensor.shape for key, tensor in weights.items()}
        names = _adapter_names(tmp_path, shapes, model)
        own = model.state_dict()
        assert names.keys() == weights.keys()
        assert all(torch.equal(own[names[key]], tensor) for key, tensor in weights.items())


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
    assert same(read.optimizer, trained.optimizer.state_dict())
    own = trained.model.state_dict()
    for name, tensor in read.weights.items():
        assert torch.equal(tensor, own[name])
