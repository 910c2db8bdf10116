"""Adapters that the Trainer saved, read without the model: the base model's `config.json` alone gives the live
posterior.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bayesadam as ba
from bayesadam.__main__ import main
from bayesadam.errors import FileError, MatchError, MissingExtraError
from bayesadam.readers import match_checkpoint, read_checkpoint, read_curvature
from cases import quick_of, three_steps
from floats import approx
from packages import lazy

transformers = lazy("transformers")
peft = lazy("peft")

N = 12


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is fetched")

    torch.set_num_threads(1)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# --- what is trained ------------------------------------------------------------------------------------------------


_LLAMA = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_BERT = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 11,
    "max_position_embeddings": 8,
}


def llama(kind: str = "ForCausalLM", **changes: Any) -> Any:
    return getattr(transformers, f"Llama{kind}")(transformers.LlamaConfig(**{**_LLAMA, **changes}))


def bert(kind: str, **changes: Any) -> Any:
    return getattr(transformers, f"Bert{kind}")(transformers.BertConfig(**{**_BERT, **changes}))


def gpt2() -> Any:
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def t5() -> Any:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 11}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    )


def vit(**changes: Any) -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, **changes)
    return transformers.ViTForImageClassification(config)


@dataclass(frozen=True)
class Case:
    """How the base model is made for training, the adapter, and what the base model's `config.json` is of."""

    base: Callable[[], Any]
    config: Any
    pretrained: Callable[[], Any] | None = None
    adapter_name: str = "default"

    def build(self) -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(self.base(), self.config, adapter_name=self.adapter_name)


def lora(task: str | None = "CAUSAL_LM", targets: Any = ("q_proj", "v_proj"), **settings: Any) -> Any:
    targets = list(targets) if isinstance(targets, tuple) else targets
    return peft.LoraConfig(task_type=task, r=2, target_modules=targets, **settings)


QUERY = ("query", "value")
CASES = {
    # Every lora_A has one shape, every lora_B another: the order alone tells them apart.
    "causal": Case(llama, lora()),
    # The classifier is no part of the pretrained model, nor is its number of classes.
    "classifier": Case(
        lambda: bert("ForSequenceClassification", num_labels=3),
        lora("SEQ_CLS", QUERY, modules_to_save=["LayerNorm"]),
        lambda: bert("ForMaskedLM"),
    ),
    "score": Case(lambda: llama("ForSequenceClassification", num_labels=1), lora("SEQ_CLS"), llama),
    "tokens": Case(lambda: bert("ForTokenClassification", num_labels=5), lora("TOKEN_CLS", QUERY), None),
    "answers": Case(lambda: bert("ForQuestionAnswering"), lora("QUESTION_ANS", QUERY), lambda: bert("ForMaskedLM")),
    "seq2seq": Case(t5, lora("SEQ_2_SEQ_LM", ("q", "v"))),
    "images": Case(lambda: vit(num_labels=3), lora(None, "all-linear", modules_to_save=["classifier"]), vit),
    "conv1d": Case(gpt2, lora(targets=("c_attn", "c_proj"), fan_in_fan_out=True, bias="all")),
    "named": Case(gpt2, lora(targets=("c_attn",), fan_in_fan_out=True), adapter_name="mine"),
    "norms": Case(llama, lora(modules_to_save=["norm", "input_layernorm"])),
    "dora": Case(llama, lora(targets="all-linear", use_dora=True, use_rslora=True)),
    "patterns": Case(llama, lora(targets=".*(q|o)_proj", rank_pattern={"o_proj": 3})),
    "layers": Case(llama, lora(layers_to_transform=0, init_lora_weights="pissa")),
    "biases": Case(llama, lora(lora_bias=True, exclude_modules=["layers.0.self_attn.v_proj"])),
    "embedded": Case(llama, lora(targets=("embed_tokens", "q_proj"))),
    "some tokens": Case(llama, lora(trainable_token_indices={"embed_tokens": [1, 2]})),
}


def examples(model: Any) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (N, 6), generator=generator)
    kind = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    count = getattr(model.config, "num_labels", 2)
    classes = torch.randint(0, count, (N,), generator=generator)
    if "Image" in kind:
        images = torch.randn(N, 3, 8, 8, generator=generator)
        return [{"pixel_values": x, "labels": y} for x, y in zip(images, classes, strict=True)]
    if "Question" in kind:
        return [{"input_ids": x, "start_positions": x[0] % 6, "end_positions": x[1] % 6} for x in tokens]
    labels: Any = tokens
    if "Sequence" in kind:
        labels = classes.float() if count == 1 else classes
    elif "Token" in kind:
        labels = tokens % count
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


@dataclass(frozen=True)
class Trained:
    """A folder, and what wrote it."""

    folder: Path
    model: Any
    optimizer: torch.optim.Optimizer


def train(folder: Path, model: Any) -> Trained:
    trainer = transformers.Trainer(model, three_steps(folder), train_dataset=examples(model))
    trainer.train()
    return Trained(folder / "checkpoint-3", model, trainer.optimizer)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    done: dict[str, Trained] = {}

    def get(case: str) -> Trained:
        if case not in done:
            done[case] = train(tmp_path_factory.mktemp("run"), CASES[case].build())
        return done[case]

    return get


@pytest.fixture
def copied(trained_once: Any, tmp_path: Path) -> Callable[[str], Trained]:
    """(case) → what the Trainer left, in a folder of its own, without any `config.json`."""

    def get(case: str) -> Trained:
        once = trained_once(case)
        folder = Path(shutil.copytree(once.folder, tmp_path / "run" / "checkpoint-3"))
        assert not list(folder.rglob("config.json"))
        return Trained(folder, once.model, once.optimizer)

    return get


def write_config(case: str, folder: Path) -> Path:
    """The base model's, as a folder of the pretrained model has it."""
    made = CASES[case].pretrained or CASES[case].base
    model = made()
    # Saving writes the class down.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder / "config.json"


def name_base(folder: Path, base: Any, **changes: Any) -> None:
    for path in folder.rglob("adapter_config.json"):
        config = {**json.loads(path.read_text()), "base_model_name_or_path": base, **changes}
        path.write_text(json.dumps(config))


def check_live(trained: Trained, folder: Path | None = None) -> None:
    """Parameter by parameter, known by its values: the second moment is that of the live optimiser, to the last bit."""
    checkpoint = read_checkpoint(folder or trained.folder)
    found = read_curvature(checkpoint).second_moment
    live = ba.readers.read_optimizer(trained.model, trained.optimizer).second_moment
    parameters = dict(trained.model.named_parameters())
    behind = {
        name: [own for own in live if torch.equal(parameters[own].detach(), checkpoint.weights[name])] for name in found
    }
    assert all(len(own) == 1 for own in behind.values()), behind
    assert len(found) == len(live) == len({own for (own,) in behind.values()})
    for name, (own,) in behind.items():
        assert torch.equal(found[name], live[own]), name
    decays = {id(p): group["weight_decay"] for group in trained.optimizer.param_groups for p in group["params"]}
    for entry in match_checkpoint(checkpoint).entries:
        assert entry.weight_decay == decays[id(parameters[behind[entry.name][0]])]


# --- what is read ---------------------------------------------------------------------------------------------------


QUICK = ("causal", "classifier", "seq2seq", "images", "named", "some tokens")


@pytest.mark.parametrize("case", quick_of(CASES, *QUICK))
def test_the_base_config_gives_the_live_state(case: str, copied: Any) -> None:
    trained = copied(case)
    write_config(case, trained.folder)
    before = torch.get_rng_state()
    built = read_checkpoint(trained.folder).rules.model()
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
    check_live(trained)


def test_an_adapter_that_transformers_put_on(tmp_path: Path) -> None:
    """Without a PeftModel around it."""
    torch.manual_seed(0)
    model = llama()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    trained = train(tmp_path / "run", model)
    write_config("causal", trained.folder)
    check_live(trained)


def test_an_optimiser_of_the_users_own_in_one_group(tmp_path: Path) -> None:
    for frozen in (True, False):
        model = CASES["classifier"].build()
        chosen = [p for p in model.parameters() if p.requires_grad or frozen]
        optimizer = torch.optim.AdamW(chosen, lr=0.01)
        rows = examples(model)
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        for _ in range(3):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        folder = tmp_path / str(frozen)
        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        write_config("classifier", folder)
        if not frozen:
            check_live(Trained(folder, model, optimizer))
            continue
        with pytest.raises(MatchError, match=r"word_embeddings.* are not among the weights"):
            read_curvature(read_checkpoint(folder))


def test_another_config_in_the_folder(copied: Any) -> None:
    trained = copied("causal")
    # What else is called so says nothing of a model.
    (trained.folder / "config.json").write_text('{"learning_rate": 0.1}')
    with pytest.raises(MatchError, match=r"config\.json is not in the adapter's folder"):
        read_curvature(read_checkpoint(trained.folder))
    (trained.folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(FileError, match=r"config\.json is truncated"):
        read_curvature(read_checkpoint(trained.folder))


def test_the_commands(copied: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = copied("classifier")
    write_config("classifier", trained.folder)
    stored = load_file(trained.folder / "adapter_model.safetensors")
    capsys.readouterr()
    assert run("inspect", trained.folder, "--json", "--why", "--n-data", N) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"].keys() == stored.keys()
    assert found["format"] == "PEFT adapter"
    assert "Matched by the trainer's own rule." in found["why"]
    pruned = tmp_path / "pruned.safetensors"
    assert run("prune", trained.folder, "--fraction", 0.5, "-o", pruned, "-q") == 0
    zeroed = load_file(pruned)
    assert zeroed.keys() == stored.keys()
    share = sum(int((w == 0).sum()) for w in zeroed.values()) / sum(w.numel() for w in zeroed.values())
    assert share == approx(0.5, abs=0.01)
    # PEFT loads what was written.
    fresh = CASES["classifier"].build()
    assert not peft.set_peft_model_state_dict(fresh, zeroed).unexpected_keys
    # By signal-to-noise ratio, the same weights as with the model.
    posterior = ba.Posterior.from_checkpoint(trained.folder, CASES["classifier"].build(), n_data=N)
    snr = torch.cat([posterior.mode[n].abs().flatten() * v.flatten() ** 0.25 for n, v in second_moments(posterior)])
    names = read_checkpoint(trained.folder).rules.names
    assert names is not None
    own = {name: key for key, name in names(fresh).items()}
    kept = torch.cat([zeroed[own[n]].flatten() != 0 for n, _ in second_moments(posterior)])
    assert snr[kept].min() >= snr[~kept].max()


def run(*arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def second_moments(posterior: Any) -> list[tuple[str, torch.Tensor]]:
    return list(posterior.structure.second_moment.items())


# --- what is refused ------------------------------------------------------------------------------------------------


def test_no_config_at_hand(copied: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trained = copied("causal")
    name_base(trained.folder, "org/tiny")
    assert run("inspect", trained.folder) == 2
    said = capsys.readouterr().err
    assert f"config.json --local-dir {trained.folder}" in said
    assert "Posterior.from_checkpoint" in said
    for base in ("a" * 5000, 3, ["x"], "", "a\0b"):
        name_base(trained.folder, base)
        with pytest.raises(MatchError, match=r"is not in the adapter's folder") as refused:
            read_curvature(read_checkpoint(trained.folder))
        assert len(str(refused.value)) < 1200
    # With the model, or the names, nothing of that matters.
    names = {id(parameter): name for name, parameter in trained.model.named_parameters()}
    order = [names[id(p)].replace(".default", "") for g in trained.optimizer.param_groups for p in g["params"]]
    assert len(match_checkpoint(read_checkpoint(trained.folder), param_names=order).entries) == len(order)
    ba.Posterior.from_checkpoint(trained.folder, CASES["causal"].build(), n_data=N)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "causal",
            {"hidden_size": 16},
            r"lora_A\.weight' has shape \(2, 8\) in the adapter and \(2, 16\) in the Llama",
        ),
        ("causal", {"num_hidden_layers": 3}, r"layers\.2\..* is not in the adapter and in the Llama"),
        ("causal", {"num_hidden_layers": 1}, r"layers\.1\..* is in the adapter and not in the Llama"),
        ("causal", {"num_key_value_heads": 1}, r"lora_B\.weight' has shape \(8, 2\) in the adapter and \(4, 2\)"),
        ("classifier", {"hidden_size": 16}, r"has shape \(8,\) in the adapter and \(16,\)"),
        ("classifier", {"num_hidden_layers": 3}, r"layer\.2\..* is not in the adapter"),
        (
            "classifier",
            {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]},
            "PEFT cannot put this",
        ),
        (
            "causal",
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "PEFT cannot put this adapter on GPT2",
        ),
        ("causal", {"model_type": "mine", "architectures": ["Mine"]}, "'Mine', which transformers does not define"),
        ("causal", {"model_type": "mine", "architectures": None}, "says which class"),
        ("causal", {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "names code of its own"),
        ("causal", {"hidden_size": "wide"}, "cannot build 'LlamaForCausalLM'"),
    ],
)
def test_another_base_models_config(case: str, changes: dict[str, Any], message: str, copied: Any) -> None:
    trained = copied(case)
    path = write_config(case, trained.folder)
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "head_dim"}
    path.write_text(json.dumps({**config, **changes}))
    with pytest.raises(MatchError, match=message):
        read_curvature(read_checkpoint(trained.folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "of kind 'IA3', which is not built here"),
        ({"peft_type": "XLORA", "adapters": {"0": "org/other"}}, "of kind 'XLORA'"),
        ({"task_type": "POETRY"}, r"PEFT cannot put this adapter on LlamaForCausalLM \(Invalid task type"),
        ({"task_type": ["CAUSAL_LM"]}, "PEFT cannot put this adapter on"),
        (
            {"auto_mapping": {"base_model_class": "Mine", "parent_library": "evil"}},
            "'Mine', which transformers does not",
        ),
        ({"target_modules": ["k_proj", "v_proj"]}, "q_proj.* is in the adapter and not in the Llama"),
        ({"target_modules": ["q_proj"]}, "v_proj.* is in the adapter and not in the Llama"),
        ({"r": 3}, r"has shape \(2, 8\) in the adapter and \(3, 8\)"),
        ({"r": "many"}, "PEFT cannot put this adapter on"),
        ({"modules_to_save": ["norm"]}, "norm.* is not in the adapter and in the Llama"),
    ],
)
def test_another_adapters_config(
    changes: dict[str, Any], message: str, copied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('code was run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    trained = copied("causal")
    write_config("causal", trained.folder)
    name_base(trained.folder, None, **changes)
    with pytest.raises(MatchError, match=message):
        read_curvature(read_checkpoint(trained.folder))


def test_what_was_trained_and_not_saved(copied: Any) -> None:
    trained = copied("classifier")
    write_config("classifier", trained.folder)
    weights = load_file(trained.folder / "adapter_model.safetensors")
    lost = next(name for name in weights if "LayerNorm" in name)
    save_file({n: w for n, w in weights.items() if n != lost}, trained.folder / "adapter_model.safetensors")
    with pytest.raises(MatchError, match=r"LayerNorm.* is not in the adapter and in the BertForSequenceClassification"):
        read_curvature(read_checkpoint(trained.folder))
    # Unfrozen beside the adapter, which PEFT does not save.
    model = CASES["causal"].build()
    model.base_model.model.lm_head.requires_grad_(True)
    beside = train(trained.folder.parent.parent / "beside", model)
    write_config("causal", beside.folder)
    with pytest.raises(MatchError, match="9 parameters, the weights 8 tensors"):
        read_curvature(read_checkpoint(beside.folder))


def test_another_adapters_state(copied: Any, trained_once: Any) -> None:
    trained = copied("causal")
    write_config("causal", trained.folder)
    for other in ("patterns", "dora", "classifier"):
        shutil.copy(trained_once(other).folder / "optimizer.pt", trained.folder)
        with pytest.raises(MatchError):
            read_curvature(read_checkpoint(trained.folder))
    state = torch.load(trained_once("causal").folder / "optimizer.pt", weights_only=True)
    listed = state["param_groups"][0]["params"]
    listed[:] = listed[::-1]
    torch.save(state, trained.folder / "optimizer.pt")
    with pytest.raises(MatchError, match=r"param_names="):
        read_curvature(read_checkpoint(trained.folder))


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_a_package_that_is_missing(package: str, copied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = copied("causal")
    write_config("causal", trained.folder)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"'{package}'.*pip install 'bayesadam\[transformers\]'"):
        read_curvature(read_checkpoint(trained.folder))
