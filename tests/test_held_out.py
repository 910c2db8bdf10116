"""Labels in a batch are scored as the model's own loss scores them: the independent reference is that very loss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packages import lazy

transformers = lazy("transformers")

import bayesadam as ba  # noqa: E402
from bayesadam.calibration import calibrate, fits, log_marginal_likelihood  # noqa: E402
from bayesadam.calibration.held_out import aligned  # noqa: E402
from bayesadam.errors import MatchError  # noqa: E402
from floats import approx, assert_close  # noqa: E402
from predict.cases_networks import jacobian, posterior_over  # noqa: E402

# Which probabilities made-up data prefer does not matter here, nor that they are few.
pytestmark = [
    pytest.mark.filterwarnings("ignore::bayesadam.errors.HeldOutWarning"),
]

WORDS, LENGTH, WIDTH = 9, 5, 4
_BERT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": WIDTH,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.5,
}
_BART: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": WIDTH,
    "decoder_ffn_dim": WIDTH,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "init_std": 0.5,
}
_T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "d_kv": 2,
    "d_ff": WIDTH,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.5,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def bert(kind: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"Bert{kind}")(transformers.BertConfig(**_BERT, **options))


# The model, and whether a label is held against the output before it. Their names do not tell.
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "GPT-2": (gpt2, True),
    "LLaMA": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_BERT)), True),
    "BERT, causal": (bert("LMHeadModel", is_decoder=True), True),
    "BERT, masked": (bert("ForMaskedLM"), False),
    "BERT, tokens": (bert("ForTokenClassification", num_labels=WORDS), False),
    "T5": (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5)), False),
    "BART": (lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**_BART)), False),
    "BART, causal": (lambda: transformers.BartForCausalLM(transformers.BartConfig(**_BART)), False),
    "XLNet": (
        lambda: transformers.XLNetLMHeadModel(
            transformers.XLNetConfig(vocab_size=WORDS, d_model=WIDTH, n_layer=1, n_head=2, d_inner=WIDTH)
        ),
        False,
    ),
}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double().eval()


def sentences(count: int, length: int, seed: int) -> dict[str, Tensor]:
    """Sentences of different lengths, padded on the right, the padding left out of the labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (count, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(2, length + 1, (count, 1), generator=generator)).long()
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def mean_nll(posterior: ba.Posterior, batches: Any, **options: Any) -> float:
    """The first term of the marginal likelihood; the others are taken off in closed form."""
    total = log_marginal_likelihood(posterior, batches, likelihood="classification", **options)
    for name, theta in posterior.mode.items():
        delta = posterior.prior_precision[name]
        total = total + 0.5 * (delta * theta.square() - (delta * posterior.variance[name]).log()).sum()
    return -float(total) / posterior.n_data


@pytest.mark.parametrize("name", MODELS)
def test_the_held_out_nll_is_the_models_own_loss(name: str):
    build, moves = MODELS[name]
    model = built(build)
    batches = [sentences(4, LENGTH, 0), sentences(3, LENGTH - 1, 1)]
    with torch.no_grad():
        losses = [float(model(**batch).loss) for batch in batches]
    counts = [int((batch["labels"][:, int(moves) :] != -100).sum()) for batch in batches]
    posterior = posterior_over(model)
    # The loss of some of them is computed in float32.
    for batch, loss in zip(batches, losses, strict=True):
        assert mean_nll(posterior, batch) == approx(loss, rel=1e-6)
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert mean_nll(posterior, batches) == approx(expected, rel=1e-6)
    assert mean_nll(posterior, [transformers.BatchEncoding(batch) for batch in batches]) == approx(expected, rel=1e-6)
    # A second time, as a callback does that has looked at the data before.
    again = list(aligned(posterior, batches, likelihood="classification"))
    assert mean_nll(posterior, again) == approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["GPT-2", "BERT, masked", "BART"])
def test_in_half_precision_and_without_any_preference(name: str):
    """Outputs that are all alike give every label the same probability: the loss alone would not tell."""
    build, moves = MODELS[name]
    batch = sentences(4, LENGTH, 0)
    labels = batch["labels"]
    expected = torch.cat([labels[:, 1:], torch.full((4, 1), -100)], dim=1) if moves else labels
    for model in (built(build).bfloat16(), built(build)):
        if model.dtype == torch.float64:
            nn.init.zeros_(model.get_output_embeddings().weight)
        ((_, y),) = aligned(posterior_over(model), batch, likelihood="classification")
        assert torch.equal(y, expected)


def test_a_sequence_classifier_keeps_its_labels():
    model = built(bert("ForSequenceClassification", num_labels=3))
    batch = sentences(6, LENGTH, 0) | {"labels": torch.tensor([0, 1, 2, 2, 1, 0])}
    with torch.no_grad():
        loss = float(model(**batch).loss)
    posterior = posterior_over(model)
    renamed = {{"labels": "label_ids"}.get(key, key): value for key, value in batch.items()}
    for given in (batch, renamed, ({key: batch[key] for key in ("input_ids", "attention_mask")}, batch["labels"])):
        assert mean_nll(posterior, given) == approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "predictive"),
    [
        ("validation", "linearised"),
        pytest.param("evidence", "linearised", marks=pytest.mark.slow),
        pytest.param("validation", "linearised-sampled", marks=pytest.mark.slow),
        ("evidence", "linearised-sampled"),
    ],
)
def test_calibration_on_labels_is_that_on_outputs_cut_by_hand(method: str, predictive: str, monkeypatch):
    monkeypatch.setattr(fits, "_RATIOS", 5)
    posterior = posterior_over(built(gpt2), n_data=4 * (LENGTH - 2))
    ids = torch.randint(3, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[:, :2] = -100  # a prompt of two tokens

    def of_the_answer(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return model(**inputs).logits[:, 1:-1]

    options: dict[str, Any] = {"likelihood": "classification", "method": method, "predictive": predictive}
    options["n_samples"] = 4
    found = calibrate(
        posterior, {"input_ids": ids, "labels": labels}, generator=torch.Generator().manual_seed(0), **options
    )
    expected = calibrate(
        posterior,
        ({"input_ids": ids}, ids[:, 2:]),
        forward=of_the_answer,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    assert found.settings.scale == approx(expected.settings.scale, rel=1e-6)
    assert found.prior_precision == approx(expected.prior_precision, rel=1e-6)


def test_the_curvature_of_a_language_model_is_an_average_over_the_tokens_that_count():
    """Σ w c = N E[Σ J² Λ], N and the mean over tokens, by the Jacobian of every single output."""
    model = built(gpt2)
    batch = sentences(3, LENGTH, 0)
    posterior = posterior_over(model, n_data=120)
    found = calibrate(posterior, batch, likelihood="classification", method="evidence")
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    keep = batch["labels"][:, 1:] != -100
    j = jacobian(model, list(posterior.mean), output).view(*output.shape, -1)[keep]
    p = output.softmax(dim=-1)[keep]
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    trace = 120 / len(p) * torch.einsum("ncp,ncd,ndp->", j, hessian, j)
    total = sum((1 / v - found.prior_precision[name]).sum() for name, v in found.variance.items())
    assert_close(total, trace.detach(), rtol=1e-4)


def test_a_mixture_of_language_models():
    batch = sentences(4, LENGTH, 0)
    members = [posterior_over(built(gpt2)), posterior_over(gpt2().double().eval())]
    found = calibrate(ba.Mixture(members), batch, likelihood="classification", method="evidence")
    for member, tuned in zip(members, found, strict=True):
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        expected = calibrate(
            member,
            (inputs, batch["labels"][:, 1:]),
            likelihood="classification",
            method="evidence",
            forward=lambda model, inputs: model(**inputs).logits[:, :-1],
        )
        assert tuned.settings.scale == approx(expected.settings.scale)


# --- what is refused ------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A language model whose loss is elsewhere, as in a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = gpt2()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.lm(input_ids, attention_mask=attention_mask).logits


class Smoothed(Wrapped):
    """A loss of its own that is no likelihood of the labels."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = super().forward(input_ids, attention_mask)
        if labels is None:
            return SimpleNamespace(logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.5)
        return SimpleNamespace(logits=logits, loss=loss)


class Silent(Wrapped):
    """Takes labels and tells nothing."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize("build", [Wrapped, Smoothed, Silent])
def test_labels_that_cannot_be_placed_are_refused_until_forward_says(build: Callable[[], nn.Module]):
    model = built(build)
    posterior, batch = posterior_over(model), sentences(4, LENGTH, 0)
    for scored in (calibrate, log_marginal_likelihood):
        with pytest.raises(MatchError, match=rf"{build.__name__} computes .*forward=lambda"):
            scored(posterior, batch, likelihood="classification")
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = (model if build is Wrapped else model.lm)(**inputs)
        logits = (logits if build is Wrapped else logits.logits)[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    def cut(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        output = model(**inputs)
        return getattr(output, "logits", output)[:, :-1]

    found = mean_nll(posterior, (inputs, batch["labels"][:, 1:]), forward=cut)
    assert found == approx(float(expected), rel=1e-9)


def test_targets_beside_the_inputs_belong_to_the_outputs_as_they_are():
    posterior = posterior_over(built(gpt2))
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = float(posterior.model(input_ids=ids, labels=ids).loss)
    for inputs in ({"input_ids": ids[:, :-1]}, ids[:, :-1], (ids[:, :-1],)):
        assert mean_nll(posterior, (inputs, ids[:, 1:])) == approx(expected, rel=1e-6)
    assert mean_nll(posterior, {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}) == approx(expected, rel=1e-6)
    for batch in (({"input_ids": ids}, ids), (ids, ids), {"input_ids": ids, "targets": ids}):
        with pytest.raises(MatchError, match="under 'labels', or shift them by one position"):
            log_marginal_likelihood(posterior, batch, likelihood="classification")
    with pytest.raises(MatchError, match="under 'labels'"):
        calibrate(posterior, [({"input_ids": ids}, ids)], likelihood="classification")


def test_an_encoder_decoder_is_given_the_inputs_of_its_decoder():
    """BART would otherwise feed its decoder with the source, and T5 refuse."""
    posterior = posterior_over(built(MODELS["BART"][0]))
    batch = sentences(4, LENGTH, 0)
    target = sentences(4, LENGTH, 5)["labels"]
    source = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = float(posterior.model(**source, labels=target).loss)
        own = posterior.model.prepare_decoder_input_ids_from_labels(target)
    for given in (
        {**source, "labels": target},
        (source, target),
        {**source, "labels": target, "decoder_input_ids": own},
    ):
        assert mean_nll(posterior, given) == approx(expected, rel=1e-6)


def test_labels_that_are_none_are_named():
    posterior = posterior_over(built(gpt2))
    batch = sentences(4, LENGTH, 0)
    for labels, match in (
        (torch.full((4, LENGTH), -100), "every class is -100"),
        (torch.full((4, LENGTH), WORDS), f"class indices must be 0 to {WORDS - 1}"),
        (torch.full((4, LENGTH), -1), f"class indices must be 0 to {WORDS - 1}"),
        (batch["labels"][:, 1:], r"expected class indices of shape \(4, 5\), got \(4, 4\)"),
        # The first place has no output before it.
        (F.pad(batch["labels"][:, :1], (0, LENGTH - 1), value=-100), "cannot be matched"),
    ):
        with pytest.raises(MatchError, match=match):
            calibrate(posterior, batch | {"labels": labels}, likelihood="classification")


def test_a_batch_without_targets_among_others():
    posterior = posterior_over(built(gpt2))
    batch = sentences(4, LENGTH, 0)
    nothing = batch | {"labels": torch.full((4, LENGTH), -100)}
    with torch.no_grad():
        expected = float(posterior.model(**batch).loss)
    assert mean_nll(posterior, [nothing, batch]) == approx(expected, rel=1e-6)
