"""Held-out data: what a batch may look like, and which target belongs to which output."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesadam.errors import MatchError
from bayesadam.likelihoods import LikelihoodName
from bayesadam.likelihoods import likelihood as record_of
from bayesadam.posterior import Posterior
from bayesadam.predict.call import Call, Forward, evaluating, plain, to_device
from bayesadam.predict.gaussian import parameters_at_mean
from bayesadam.predict.targets import (
    has_places,
    moves_labels,
    next_places,
    repeats_inputs,
    takes_labels,
    with_decoder_inputs,
)

# As a model's own loss takes them, and as they belong to the outputs.
_OWN_LABELS = ("labels", "label", "label_ids")
_LABELS = (*_OWN_LABELS, "targets", "target", "y")


class Batch(NamedTuple):
    """Inputs, their targets, and whether these are a model's own labels, out of a mapping with its inputs."""

    inputs: Any
    targets: Tensor
    own: bool


def aligned(
    posterior: Posterior, batches: Any, *, likelihood: LikelihoodName, forward: Forward | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """(inputs, targets) whose targets belong to the outputs at the same places; what comes out may be put in again.

    With a `forward` of the user's own, or without classes for each place, that is what they do. Otherwise labels inside a
    mapping are moved where the model's own loss moves them, and the inputs of a decoder are made from them.
    """
    posterior.require_whole("calibration")
    split = list(batches_of(batches))
    if not split:
        raise MatchError("there is no held-out data: the loader gave no batch (a generator that was used up?)")
    ignored = record_of(likelihood).ignored
    if ignored is not None and not any(bool((y != ignored).any()) or not y.numel() for _, y, _ in split):
        raise MatchError(f"there is nothing to score: every class is {ignored}, which is left out")
    if ignored is None or forward is not None:
        yield from ((inputs, y) for inputs, y, _ in split)
        return
    model = posterior.model
    doubtful = [
        (with_decoder_inputs(model, inputs, y), y)
        for inputs, y, own in split
        if has_places(y) and ((own and takes_labels(model)) or repeats_inputs(inputs, y))
    ]
    moves = _moves(posterior, doubtful) if doubtful else False
    for inputs, y, own in split:
        if not has_places(y):
            yield inputs, y
            continue
        if moves and not own and repeats_inputs(inputs, y):
            raise MatchError(
                f"the targets are the inputs at the same places, and the loss of {type(model).__name__} holds an output "
                "against the next: leave them in their mapping, under 'labels', or move them by one place"
            )
        yield with_decoder_inputs(model, inputs, y), next_places(y) if moves and own else y


def _moves(posterior: Posterior, batches: Sequence[tuple[Any, Tensor]]) -> bool:
    """Whether the model's own loss moves the labels, told by the first batch that does tell."""
    model, params = posterior.model, parameters_at_mean(posterior)
    kind = type(model).__name__
    device = next(iter(params.values())).device
    if takes_labels(model):
        with evaluating(model), torch.no_grad():
            for inputs, y in batches:
                found = moves_labels(Call(model), params, to_device(inputs, device), y.to(device))
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


def batches_of(batches: Any) -> Iterator[Batch]:
    """What a loader of tuples or mappings gives, or a single one of these, as it was put there."""
    if isinstance(batches, Mapping) or (
        isinstance(batches, tuple | list) and len(batches) == 2 and isinstance(batches[1], Tensor | np.ndarray)
    ):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise MatchError(f"batches must be a loader of (inputs, targets), got {type(batches).__name__}")
    for batch in batches:
        inputs: Any
        if isinstance(batch, Batch):
            yield batch
            continue
        if isinstance(batch, Mapping):
            key = next((key for key in _LABELS if key in batch), None)
            if key is None:
                keys = sorted(map(str, batch))
                raise MatchError(f"no targets in a batch with keys {keys}: name them one of {_LABELS}")
            inputs, y, own = {k: v for k, v in batch.items() if k != key}, batch[key], key in _OWN_LABELS
        elif isinstance(batch, tuple | list) and len(batch) >= 2:
            # The fields of a named tuple say which it is; else it is the last.
            names = getattr(batch, "_fields", ())
            place = next((names.index(key) for key in _LABELS if key in names), len(batch) - 1)
            others = (*batch[:place], *batch[place + 1 :])
            inputs, y, own = others[0] if len(others) == 1 else others, batch[place], False
        else:
            raise MatchError(f"a batch must be (inputs, targets) or a mapping with labels, got {type(batch).__name__}")
        if not isinstance(y, Tensor):
            array = isinstance(y, np.ndarray)
            raise MatchError(
                f"the targets of a batch must be a tensor, got {type(y).__name__}: "
                + ("pass torch.from_numpy(...) of inputs and targets" if array else "collate the examples first")
            )
        yield Batch(plain(inputs), y, own)
