"""Held-out data: which target belongs to which output."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._alone import unwrap
from bayesadam.errors import MatchError
from bayesadam.likelihoods import LikelihoodName
from bayesadam.likelihoods import likelihood as record_of
from bayesadam.likelihoods.classification import IGNORED, Classification
from bayesadam.posterior import Posterior
from bayesadam.predict.call import Call, Forward, batches_of, evaluating, to_device
from bayesadam.predict.moments import parameters_at_mean

# By so much of itself may a model's own loss differ from ours: bfloat16 leaves it that much.
_SAME = 0.01
_CLASSES = Classification()


def aligned(
    posterior: Posterior, batches: Any, *, likelihood: LikelihoodName, forward: Forward | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """(inputs, targets) whose targets belong to the outputs at the same places; what comes out may be put in again.

    With a `forward` of the user's own, or without classes for each place, that is what they do. Otherwise labels inside a
    mapping are moved where the model's own loss moves them, and the inputs of a decoder are made from them.
    """
    posterior.require_whole("calibration")
    split = list(batches_of(batches, posterior.model))
    if not split:
        raise MatchError("there is no held-out data: the loader gave no batch (a generator that was used up?)")
    if not any(len(y) for _, y, _ in split):
        raise MatchError("the held-out data are empty: they have no examples")
    lost = sum(int((~y.isfinite()).sum()) for _, y, _ in split if y.is_floating_point())
    if lost:
        raise MatchError(f"{lost} held-out targets are NaN or infinite: leave their examples out")
    ignored = record_of(likelihood).ignored
    if ignored is not None and not any(bool((y != ignored).any()) or not y.numel() for _, y, _ in split):
        raise MatchError(f"there is nothing to score: every class is {ignored}, which is left out")
    if ignored is None or forward is not None:
        yield from ((inputs, y) for inputs, y, _ in split)
        return
    model = posterior.model
    unclear = [
        (_with_decoder_inputs(model, inputs, y), y)
        for inputs, y, own in split
        if _has_places(y) and ((own and _takes_labels(model)) or _repeats_inputs(inputs, y))
    ]
    moves = _moves(posterior, unclear) if unclear else False
    for inputs, y, own in split:
        if not _has_places(y):
            yield inputs, y
            continue
        if moves and not own and _repeats_inputs(inputs, y):
            raise MatchError(
                f"the targets are the inputs at the same places, and the loss of {type(model).__name__} holds an output "
                "against the next: leave them in their mapping, under 'labels', or move them by one place"
            )
        yield _with_decoder_inputs(model, inputs, y), _next_places(y) if moves and own else y


def _moves(posterior: Posterior, batches: Sequence[tuple[Any, Tensor]]) -> bool:
    """Whether the model's own loss moves the labels, by the first batch that shows it."""
    model, params = posterior.model, parameters_at_mean(posterior)
    device, kind = next(iter(params.values())).device, type(model).__name__
    if _takes_labels(model):
        with evaluating(model), torch.no_grad():
            for inputs, y in batches:
                found = _moves_labels(Call(model), params, to_device(inputs, device), y.to(device))
                if found is not None:
                    return found
        reason = f"the labels cannot be matched with the outputs by the loss that {kind} computes itself"
    else:
        reason = f"the targets are the inputs at the same places, and {kind} computes no loss of its own"
    raise MatchError(
        f"{reason}: pass forward=lambda model, batch: ... that returns the outputs, and (inputs, targets) with a target for "
        "each. A language model's output is for the next token: forward=lambda model, batch: model(**batch).logits[:, :-1] "
        "and labels[:, 1:]"
    )


def _next_places(labels: Tensor) -> Tensor:
    """The labels of a causal language model where its outputs are: each one place earlier, none for the last place.

    >>> _next_places(torch.tensor([[3, 4, 5]]))
    tensor([[   4,    5, -100]])
    """
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def _has_places(y: Tensor) -> bool:
    """Whether there is a class for each place of a sequence, so that outputs may be for another place than their own."""
    return y.dim() == 2 and not y.is_floating_point()


def _takes_labels(model: nn.Module) -> bool:
    """Whether the model, inside PEFT's wrapper where it has one, has an argument `labels`, as those of transformers have."""
    return "labels" in inspect.signature(_own_model(model).forward).parameters


def _with_decoder_inputs(model: nn.Module, inputs: Any, labels: Tensor) -> Any:
    """The inputs with those of an encoder-decoder's second half, which transformers makes from the labels."""
    make = getattr(_own_model(model), "prepare_decoder_input_ids_from_labels", None)
    if make is None or not isinstance(inputs, Mapping) or {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
        return inputs
    return {**inputs, "decoder_input_ids": make(labels=labels)}


def _repeats_inputs(inputs: Any, y: Tensor) -> bool:
    """Whether the targets that count are the tokens at the very places they are for, and not the next ones."""
    given = inputs["input_ids"] if isinstance(inputs, Mapping) and "input_ids" in inputs else inputs
    tokens = next((leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)), None)
    if tokens is None or tokens.shape != y.shape or tokens.is_floating_point():
        return False
    tokens = tokens.to(y.device)[:, 1:]
    own, following = y[:, 1:], y[:, :-1]
    return not _differ(tokens, own) and _differ(tokens, following)


def _moves_labels(call: Call, params: Mapping[str, Tensor], inputs: Any, labels: Tensor) -> bool | None:
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
    as_they_are, moved = _mean_nll(logits, labels), _mean_nll(logits, _next_places(labels))
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
