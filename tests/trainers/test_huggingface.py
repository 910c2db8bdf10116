"""The callback in a real Trainer of transformers, beside its own optimiser and loggers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from packages import lazy

transformers = lazy("transformers")
lazy("accelerate")

import bayesadam as ba  # noqa: E402
from bayesadam.errors import NoPosteriorWarning, SettingError, StateError  # noqa: E402
from bayesadam.trainers.huggingface import PosteriorCallback  # noqa: E402
from floats import approx  # noqa: E402
from processes import run_python  # noqa: E402

N, LENGTH, VOCABULARY = 40, 6, 12


def examples(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Sentences whose first word tells the class."""
    words = torch.randint(1, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x[0] % 3} for x in words]


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield from examples(N, 0)


def classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def trainer(folder: Path, *, train: Any = None, model: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": 10,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "report_to": "none",
        "logging_steps": 5,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return transformers.Trainer(
        model=model or classifier(),
        args=transformers.TrainingArguments(**{**settings, **options}),
        train_dataset=examples(N, 0) if train is None else train,
        eval_dataset=examples(30, 1),
    )


def trained(folder: Path, callback_options: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    run = trainer(folder, **options)
    callback = PosteriorCallback(**(callback_options or {}))
    run.add_callback(callback)
    run.train()
    return run, callback


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show of the one run in a folder."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (logs,) = (folder / "runs").iterdir()
    assert len(list(logs.iterdir())) == 1, "one run is one file of events"
    events = accumulators.EventAccumulator(str(logs))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def equal(a: ba.Posterior, b: ba.Posterior) -> bool:
    return list(a.mode) == list(b.mode) and all(
        torch.equal(a.mode[name], b.mode[name]) and torch.equal(a.variance[name], b.variance[name]) for name in a.mode
    )


def test_the_posterior_is_that_of_the_live_optimiser_saved_and_logged(tmp_path):
    run, callback = trained(tmp_path, {}, report_to="tensorboard")
    expected = ba.Posterior.from_optimizer(run.model, run.optimizer, N)
    assert callback.posterior.n_data == callback.n_data == N
    assert equal(callback.posterior, expected)
    assert equal(ba.Posterior.load(tmp_path / "posterior.safetensors", run.model), expected)
    # The trainer's own groups: biases and norms have no decay, and so no prior.
    assert {float(delta) for delta in expected.prior_precision.values()} == {1.0, N * 0.1}
    shown, snr = scalars(tmp_path), expected.snr()
    every = torch.cat([values.flatten() for values in snr.values()])
    for tag, value in {
        "snr_median": every.median(),
        "snr_below_1": (every < 1).double().mean(),
    }.items():
        assert shown[f"train/posterior/{tag}"] == [(10, approx(float(value), rel=1e-5))]
    (logged,) = [line for line in run.state.log_history if "posterior/snr_median" in line]
    assert logged["posterior/snr_median"] == approx(float(every.median()))


def test_calibration_is_on_the_evaluation_data_and_shows_in_the_logger(tmp_path):
    run, callback = trained(
        tmp_path, {"calibrate": True, "likelihood": "classification", "path": tmp_path / "here.safetensors"}
    )
    raw = ba.Posterior.from_optimizer(run.model, run.optimizer, N)
    expected = ba.calibrate(raw, run.get_eval_dataloader(), likelihood="classification")
    for found in (callback.posterior, ba.Posterior.load(tmp_path / "here.safetensors", run.model)):
        assert equal(found, expected)
        assert (found.temperature, found.averaged) == (expected.temperature, expected.averaged)
    (logged,) = [line for line in run.state.log_history if "posterior/nll" in line]
    assert logged["posterior/nll"] == approx(min(expected.calibration.nll.values()), rel=1e-4)
    assert logged["posterior/network_nll"] == approx(run.evaluate()["eval_loss"], rel=1e-4)


def test_resumed_training_gives_the_posterior_of_all_of_it(tmp_path):
    trained(tmp_path, save_strategy="steps", save_steps=5, max_steps=5)
    recorded = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    assert recorded["stateful_callbacks"]["bayesadam"] == {"n_data": N}
    run = trainer(tmp_path, max_steps=8, restore_callback_states_from_checkpoint=True)
    callback = PosteriorCallback()
    run.add_callback(callback)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert {int(state["step"]) for state in run.optimizer.state.values()} == {8}
    assert equal(callback.posterior, ba.Posterior.from_optimizer(run.model, run.optimizer, N))


def test_the_best_model_comes_with_the_state_that_its_optimiser_had(tmp_path):
    """Weights of one step with the second moments of another would be nobody's posterior."""
    best: dict[str, ba.Posterior] = {}

    class Watch(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            best[state.global_step] = ba.Posterior.from_optimizer(kwargs["model"], kwargs["optimizer"], N)

    run = trainer(
        tmp_path,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        # The later, the "better" the loss would be; asking for the greatest makes an early step the best.
        greater_is_better=True,
    )
    callback = PosteriorCallback()
    run.add_callback(callback)
    run.add_callback(Watch())
    run.train()
    step = int(Path(run.state.best_model_checkpoint).name.removeprefix("checkpoint-"))
    assert step < run.state.global_step == 10
    assert equal(callback.posterior, best[step])
    assert not equal(best[step], best[10])


def test_n_that_cannot_be_told_is_asked_for_before_the_first_step(tmp_path):
    run = trainer(tmp_path, train=Endless())
    run.add_callback(PosteriorCallback())
    with pytest.raises(SettingError, match=r"PosteriorCallback\(n_data="):
        run.train()
    assert run.state.global_step == 0
    _, callback = trained(tmp_path, {"n_data": 500}, train=Endless(), max_steps=3)
    assert callback.posterior.n_data == 500


def test_what_would_fail_at_the_end_is_refused_at_the_start(tmp_path):
    run = trainer(tmp_path)
    with pytest.raises(SettingError, match="needs likelihood="):
        PosteriorCallback(calibrate=True)
    run.eval_dataset = None
    run.add_callback(PosteriorCallback(calibrate=True, likelihood="classification"))
    with pytest.raises(SettingError, match="held_out="):
        run.train()
    assert run.state.global_step == 0
    with pytest.raises(SettingError, match="none has called it"):
        PosteriorCallback().on_train_begin(run.args, run.state, run.control)
    with pytest.raises(SettingError, match="save_only_model=False"):
        trained(
            tmp_path,
            save_strategy="steps",
            eval_strategy="steps",
            eval_steps=5,
            save_steps=5,
            load_best_model_at_end=True,
            save_only_model=True,
        )


@pytest.mark.parametrize("moved", [True, False])
def test_a_language_model_is_scored_as_its_own_loss_scores_it(tmp_path, moved):
    """Next tokens of GPT-2, with padding; the hidden words of a masked BERT."""
    torch.manual_seed(0)
    if moved:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=LENGTH)
        )
    else:
        model = transformers.BertForMaskedLM(classifier().config)
    rows = examples(N, 0)
    for number, row in enumerate(rows):
        row["labels"] = row["input_ids"].clone()
        row["labels"][2 + number % 3 :] = -100
    run = trainer(tmp_path, train=rows, model=model)
    run.eval_dataset = rows[:30]
    held_out = None if moved else [run.data_collator(rows[:20]), run.data_collator(rows[20:30])]
    callback = PosteriorCallback(100, calibrate=True, likelihood="classification", held_out=held_out)
    run.add_callback(callback)
    run.train()
    logged = {key: value for entry in run.state.log_history for key, value in entry.items()}
    with torch.no_grad():
        own = float(model.eval()(**run.data_collator(rows[:30])).loss)
    assert logged["posterior/network_nll"] == approx(own, rel=1e-4)
    assert logged["posterior/nll"] <= own + 1e-3
    assert callback.posterior.n_data == 100


def test_a_failure_at_the_end_leaves_the_run_whole(tmp_path):
    with pytest.warns(NoPosteriorWarning, match="keeps no second moment"):
        run, callback = trained(tmp_path, optim="sgd")
    assert run.state.global_step == 10
    with pytest.raises(StateError, match="keeps no second moment"):
        _ = callback.posterior
    run.save_model(str(tmp_path / "kept"))
    assert (tmp_path / "kept" / "model.safetensors").is_file()


def test_an_adapter_alone(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        classifier(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    )
    _, callback = trained(tmp_path, {"calibrate": True, "likelihood": "classification"}, model=model)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(callback.posterior.mode) == trainable
    assert set(ba.Posterior.load(tmp_path / "posterior.safetensors", model).mode) == trainable


@pytest.mark.slow
def test_a_missing_package_names_its_extra():
    done = run_python("import sys; sys.modules['transformers'] = None; import bayesadam.trainers.huggingface")
    assert "pip install 'bayesadam[transformers]'" in done.stderr
