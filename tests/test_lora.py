"""A posterior over a LoRA adapter alone: its extent, and its predictive against a full Jacobian."""

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


def words(count: int, seed: int) -> dict[str, Tensor]:
    """Sentences of different lengths, padded."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
    return {"input_ids": x, "attention_mask": (torch.arange(LENGTH) < lengths).long()}


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).logits


@pytest.fixture(scope="module")
def posterior() -> ba.Posterior:
    """Of an adapter trained to tell the class of the first word."""
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
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(transformers.BertForSequenceClassification(config), lora).double().train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    inputs = words(24, 0)
    batches = 30 * [(inputs, inputs["input_ids"][:, 0] % CLASSES)]
    fit(partial(logits, model), optimizer, batches, nn.functional.cross_entropy)
    return ba.Posterior.from_optimizer(model.eval(), optimizer, 24, "classification")


def test_the_posterior_is_over_the_adapter_and_nothing_else(posterior):
    parameters = dict(posterior.model.named_parameters())
    trainable = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert set(posterior.mode) == trainable
    assert all("lora_" in name or "modules_to_save" in name for name in trainable)
    assert set(posterior.omitted.values()) == {"frozen (requires_grad is False)"}
    assert set(posterior.omitted) | trainable == parameters.keys()


def test_the_predictive_variance_is_that_of_the_full_jacobian(posterior):
    """diag(J Σ Jᵀ) with J over the adapter's parameters, by reverse-mode differentiation of the whole model."""
    inputs = words(3, 1)

    class Forward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = posterior.model

        def forward(self) -> Tensor:
            return logits(self.inner, inputs)

    def outputs(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(Forward(), {f"inner.{name}": tensor for name, tensor in weights.items()}, ())

    own = {name: posterior.model.get_parameter(name).detach() for name in posterior.mode}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        jacobians, mean = jacrev(outputs)(own), outputs(own)
    variance = sum((j.square() * posterior.variance[name]).flatten(mean.dim()).sum(-1) for name, j in jacobians.items())
    found = posterior.predict(inputs, forward=logits)
    assert_close(found.f_mean, mean, rtol=1e-9, atol=1e-9)
    assert_close(found.f_variance, variance.detach(), rtol=1e-8, atol=1e-12)
    assert (found.f_variance > 0).all()
