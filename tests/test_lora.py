"""A posterior over a LoRA adapter alone: its extent, its predictive against a full Jacobian, its calibration."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from packages import lazy

peft = lazy("peft")
transformers = lazy("transformers")

import bayesadam as ba  # noqa: E402
from cases import fit  # noqa: E402
from floats import assert_close  # noqa: E402

WORDS, LENGTH, CLASSES, WIDTH = 10, 6, 3, 16


@dataclass
class Adapted:
    """A trained adapter, its optimiser and held-out data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    held_out: dict[str, Tensor]
    n_data: int


def words(count: int, seed: int) -> dict[str, Tensor]:
    """Sentences of different lengths, padded."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
    return {"input_ids": x, "attention_mask": (torch.arange(LENGTH) < lengths).long()}


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits


@pytest.fixture(scope="module")
def adapted() -> Adapted:
    """The class is that of the first word, one in five drawn at random."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=WIDTH,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = peft.get_peft_model(
        transformers.BertForSequenceClassification(config),
        peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]),
    )

    inputs, generator = words(24, 0), torch.Generator().manual_seed(100)
    drawn = torch.randint(CLASSES, (24,), generator=generator)
    y = torch.where(torch.rand(24, generator=generator) < 0.2, drawn, inputs["input_ids"][:, 0] % CLASSES)
    model = model.double().train()
    # Plain AdamW over what is trainable, long enough to be over-confident.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2, weight_decay=0.01)
    drawn = [torch.randint(24, (8,), generator=generator) for _ in range(150)]
    batches = [({key: value[rows] for key, value in inputs.items()}, y[rows]) for rows in drawn]
    fit(partial(logits, model), optimizer, batches, nn.functional.cross_entropy)
    return Adapted(model.eval(), optimizer, words(60, 1), 24)


def posterior_of(adapted: Adapted) -> ba.Posterior:
    return ba.Posterior.from_optimizer(adapted.model, adapted.optimizer, adapted.n_data, "classification")


def test_the_posterior_is_over_the_adapter_and_nothing_else(adapted):
    posterior = posterior_of(adapted)
    trainable = {name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad}
    assert set(posterior.mode) == trainable
    assert all("lora_" in name or "modules_to_save" in name for name in trainable)
    assert set(posterior.omitted.values()) == {"frozen (requires_grad is False)"}
    assert set(posterior.omitted) | trainable == {name for name, _ in adapted.model.named_parameters()}


def test_the_predictive_variance_is_that_of_the_full_jacobian(adapted):
    """diag(J Σ Jᵀ) with J over the adapter's parameters, by reverse-mode differentiation of the whole model."""
    posterior = posterior_of(adapted)
    inputs = {key: value[:3] for key, value in adapted.held_out.items()}
    weights = {name: parameter.detach() for name, parameter in adapted.model.named_parameters()}
    own = {name: weights[name] for name in posterior.mode}

    class Forward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = adapted.model

        def forward(self) -> Tensor:
            return logits(self.inner, inputs)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        caller = Forward()
        jacobians = jacrev(
            lambda params: functional_call(caller, {f"inner.{name}": tensor for name, tensor in params.items()}, ())
        )(own)
        expected_mean = logits(adapted.model, inputs).detach()
    variance = posterior.variance
    expected = sum((jacobians[name].square() * variance[name]).flatten(expected_mean.dim()).sum(-1) for name in own)
    found = posterior.predict(inputs, forward=logits)
    assert_close(found.f_mean, expected_mean, rtol=1e-9, atol=1e-9)
    assert_close(found.f_variance, expected.detach(), rtol=1e-8, atol=1e-12)
    assert (found.f_variance > 0).all()
