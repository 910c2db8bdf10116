"""Which target belongs to which output: labels as a model's own loss takes them, and places that no loss counts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam.curvature.match import unwrap
from bayesadam.likelihoods.classification import IGNORED, Classification
from bayesadam.predict.call import Call

# By so much of itself may a model's own loss differ from ours: bfloat16 leaves it that much.
_SAME = 0.01
_CLASSES = Classification()


def next_places(labels: Tensor) -> Tensor:
    """The labels of a causal language model where its outputs are: each one place earlier, none for the last place.

    >>> next_places(torch.tensor([[3, 4, 5]]))
    tensor([[   4,    5, -100]])
    """
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def has_places(y: Tensor) -> bool:
    """Whether there is a class for each place of a sequence, so that outputs may be for another place than their own."""
    return y.dim() == 2 and not y.is_floating_point()


def takes_labels(model: nn.Module) -> bool:
    """Whether the model, inside PEFT's wrapper where it has one, has an argument `labels`, as those of transformers have."""
    return "labels" in inspect.signature(_own_model(model).forward).parameters


def with_decoder_inputs(model: nn.Module, inputs: Any, labels: Tensor) -> Any:
    """The inputs with those of an encoder-decoder's second half, which transformers makes from the labels."""
    make = getattr(_own_model(model), "prepare_decoder_input_ids_from_labels", None)
    if make is None or not isinstance(inputs, Mapping) or {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
        return inputs
    return {**inputs, "decoder_input_ids": make(labels=labels)}


def repeats_inputs(inputs: Any, y: Tensor) -> bool:
    """Whether the targets that count are the tokens at the very places they are for, and not the next ones."""
    leaves = pytree.tree_leaves(
        inputs["input_ids"] if isinstance(inputs, Mapping) and "input_ids" in inputs else inputs
    )
    tokens = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if tokens is None or tokens.shape != y.shape or tokens.is_floating_point():
        return False
    tokens = tokens.to(y.device)[:, 1:]
    own, following = y[:, 1:], y[:, :-1]
    return not _differ(tokens, own) and _differ(tokens, following)


def moves_labels(call: Call, params: Mapping[str, Tensor], inputs: Any, labels: Tensor) -> bool | None:
    """Whether the model's own loss holds each label against the output one place before; None where it does not tell.

    The names of classes do not say it: GPT2LMHeadModel does, XLNetLMHeadModel and BartForCausalLM do not. So the model is
    given labels at the first place alone, of which nothing is left where they are moved. The loss of all labels must then
    be the mean negative log-likelihood of its outputs.
    """
    logits = call(params, inputs)
    keep = _CLASSES.counted(logits, labels)
    if not keep.any():
        return None
    first = torch.full_like(labels, IGNORED)
    first[:, 0] = labels[keep][0]
    # First, for it names numbers that are no class; the model's own loss might take the device with it.
    as_they_are, moved = _mean_nll(logits, labels), _mean_nll(logits, next_places(labels))
    asked = Call(call.model, _with_labels)
    alone, whole = (_loss_in(asked.returned(params, (inputs, y))) for y in (first, labels))
    if alone is None or whole is None:
        return None
    moves = not (alone.isfinite() and alone != 0)
    gap = abs((moved if moves else as_they_are) - float(whole))
    return moves if gap <= _SAME * abs(float(whole)) + 4 * torch.finfo(whole.dtype).eps else None


def _own_model(model: nn.Module) -> nn.Module:
    model = unwrap(model)
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return found


def _with_labels(model: nn.Module, batch: tuple[Any, Tensor]) -> Any:
    inputs, labels = batch
    if isinstance(inputs, Mapping):
        return model(**inputs, labels=labels)
    return model(*(inputs if isinstance(inputs, tuple | list) else (inputs,)), labels=labels)


def _loss_in(output: Any) -> Tensor | None:
    """The loss in what a model returned: `.loss`, `["loss"]`, or the first of a tuple; None where there is none."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = output[0] if isinstance(output, tuple | list) and output else getattr(output, "loss", None)
    return loss.detach().squeeze() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _mean_nll(logits: Tensor, y: Tensor) -> float:
    """Over the places that count; not a number where none does."""
    keep = _CLASSES.counted(logits, y)
    rows = logits.detach()[keep].cpu().double()
    return -float(_CLASSES.predictive(rows, torch.zeros_like(rows)).log_prob(y[keep].cpu()).mean())


def _differ(tokens: Tensor, y: Tensor) -> bool:
    return bool(((tokens != y) & (y != IGNORED)).any())
