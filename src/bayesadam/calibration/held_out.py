"""Held-out data: which target belongs to which output, and the outputs of a network there."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bayesadam._alone import unwrap
from bayesadam.errors import BayesAdamWarning, CalibrationError, MatchError
from bayesadam.leverage import Leverage, Ratios, from_inputs, observed
from bayesadam.likelihoods import Component, Likelihood, agreed
from bayesadam.likelihoods import likelihood as record_of
from bayesadam.likelihoods.classification import IGNORED
from bayesadam.likelihoods.component import position_blocks
from bayesadam.posterior import Posterior
from bayesadam.predict.call import Call, Forward, batches_of, evaluating, to_device
from bayesadam.predict.moments import Rows as ChosenRows
from bayesadam.predict.moments import VarianceOf, moments, parameters_at_mean
from bayesadam.predict.plan import at_one_position, plan_for
from bayesadam.predict.prediction import MANY_CLASSES, Options

Batches = Sequence[tuple[Any, Tensor]]
# A model's own loss may differ by this share from the one computed here: bfloat16 leaves it that much.
_SAME = 0.01
# Positions of each text that count where there are many possible tokens.
_POSITIONS = 4


def aligned(
    posterior: Posterior, batches: Any, *, likelihood: str | None = None, forward: Forward | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """(inputs, targets) whose targets belong to the outputs at the same positions; its results may be passed in again.

    With a `forward` of the user's own, or without a class for each position, they already do. Otherwise labels inside a
    mapping are shifted where the model's own loss shifts them, and the inputs of a decoder are made from them.
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
    ignored = record_of(agreed(likelihood, posterior.likelihood)).ignored
    if ignored is not None and not any(bool((y != ignored).any()) or not y.numel() for _, y, _ in split):
        raise MatchError(f"there is nothing to score: every class is {ignored}, which is left out")
    if ignored is None or forward is not None:
        yield from ((inputs, y) for inputs, y, _ in split)
        return
    model = posterior.model
    unclear = [
        (_with_decoder_inputs(model, inputs, y), y)
        for inputs, y, own in split
        if _has_positions(y) and ((own and _takes_labels(model)) or _repeats_inputs(inputs, y))
    ]
    shifts = bool(unclear) and _model_shifts(posterior, unclear)
    for inputs, y, own in split:
        if not _has_positions(y):
            yield inputs, y
            continue
        if shifts and not own and _repeats_inputs(inputs, y):
            raise MatchError(
                f"the targets are the inputs at the same positions, and the loss of {type(model).__name__} compares an "
                "output with the next: leave them in their mapping, under 'labels', or shift them by one position"
            )
        yield _with_decoder_inputs(model, inputs, y), _shifted(y) if shifts and own else y


def _model_shifts(posterior: Posterior, batches: Sequence[tuple[Any, Tensor]]) -> bool:
    """Whether the model's own loss shifts the labels, by the first batch that shows it."""
    model, params = posterior.model, parameters_at_mean(posterior)
    device, kind = next(iter(params.values())).device, type(model).__name__
    if _takes_labels(model):
        with evaluating(model), torch.no_grad():
            for inputs, y in batches:
                found = _loss_shifts(Call(model), params, to_device(inputs, device), y.to(device))
                if found is not None:
                    return found
        reason = f"the labels cannot be matched with the outputs by the loss that {kind} computes itself"
    else:
        reason = f"the targets are the inputs at the same positions, and {kind} computes no loss of its own"
    raise MatchError(
        f"{reason}: pass forward=lambda model, batch: ... that returns the outputs, and (inputs, targets) with a "
        "target for each. A language model's output is for the next token: forward=lambda model, batch: "
        "model(**batch).logits[:, :-1] and labels[:, 1:]"
    )


def _loss_shifts(call: Call, params: Mapping[str, Tensor], inputs: Any, labels: Tensor) -> bool | None:
    """Whether the model's own loss compares each label with the output one position before; None where it is unclear.

    The names of classes do not say it: GPT2LMHeadModel does, XLNetLMHeadModel and BartForCausalLM do not. So the model
    is given labels at the first position alone, of which nothing is left where they are shifted. The loss of all labels
    must then be the mean negative log-likelihood of its outputs.
    """
    logits = call(params, inputs)
    keep = labels != IGNORED
    # First, for it refuses numbers that are not classes, which might leave a CUDA device unusable in the model's own
    # loss.
    plain, shifted = _mean_nll(logits, labels), _mean_nll(logits, _shifted(labels))
    if not keep.any():
        return None
    first = torch.full_like(labels, IGNORED)
    first[:, 0] = labels[keep][0]
    with_labels = Call(call.model, _call_with_labels)
    alone, whole = (_loss_in(with_labels.returned(params, (inputs, y))) for y in (first, labels))
    if alone is None or whole is None:
        return None
    shifts = not (alone.isfinite() and alone != 0)
    gap = abs((shifted if shifts else plain) - float(whole))
    return shifts if gap <= _SAME * abs(float(whole)) + 4 * torch.finfo(whole.dtype).eps else None


def _mean_nll(logits: Tensor, y: Tensor) -> float:
    """Over the positions that count; NaN where none does."""
    record = record_of("classification")
    keep = record.counted(logits, y)
    mean = logits.detach()[keep].cpu().double()
    return -float(record.predictive([Component(mean, torch.zeros_like(mean))]).log_prob(y[keep].cpu()).mean())


def _shifted(labels: Tensor) -> Tensor:
    """The labels of a causal language model at its outputs: each one position earlier, none for the last.

    >>> _shifted(torch.tensor([[3, 4, 5]]))
    tensor([[   4,    5, -100]])
    """
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def _has_positions(y: Tensor) -> bool:
    """Whether there is a class for each position of a sequence, so that outputs may be for another than their own."""
    return y.dim() == 2 and not y.is_floating_point()


def _own_model(model: nn.Module) -> nn.Module:
    """The model inside PEFT's wrapper, where it has one."""
    model = unwrap(model)
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return found


def _takes_labels(model: nn.Module) -> bool:
    return "labels" in inspect.signature(_own_model(model).forward).parameters


def _with_decoder_inputs(model: nn.Module, inputs: Any, labels: Tensor) -> Any:
    """The inputs with those of an encoder-decoder's second half, which transformers makes from the labels."""
    make = getattr(_own_model(model), "prepare_decoder_input_ids_from_labels", None)
    if make is None or not isinstance(inputs, Mapping) or {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
        return inputs
    return {**inputs, "decoder_input_ids": make(labels=labels)}


def _repeats_inputs(inputs: Any, y: Tensor) -> bool:
    """Whether the targets that count are the tokens at their own positions, and not the next ones."""
    given = inputs["input_ids"] if isinstance(inputs, Mapping) and "input_ids" in inputs else inputs
    tokens = next((leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)), None)
    if tokens is None or tokens.shape != y.shape or tokens.is_floating_point():
        return False
    tokens = tokens.to(y.device)[:, 1:]
    own, following = (bool(((tokens != part) & (part != IGNORED)).any()) for part in (y[:, 1:], y[:, :-1]))
    return not own and following


def _call_with_labels(model: nn.Module, batch: tuple[Any, Tensor]) -> Any:
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


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of predictions that the user did not ask for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayesAdamWarning)
        yield


class Rows(NamedTuple):
    """Targets that count, y, (n, ...), and moments of their outputs: variances are (k, n, ...)."""

    mean: Tensor
    variances: Tensor
    covariance: Tensor | None
    y: Tensor


class Observed(NamedTuple):
    """What forward passes over held-out data show.

    Attributes:
        outputs: of the mean network, (n, ...), a row for each target that counts.
        targets: those targets, (n, ...).
        owners: the number of the example that each row belongs to.
        leverage: of the held-out inputs.
        ratios: their own, (examples,), each left out.
        last: the inputs of the last layer, (examples, width); None where the network has no layer that is known.
    """

    outputs: Tensor
    targets: Tensor
    owners: Tensor
    leverage: Leverage
    ratios: Ratios
    last: Tensor | None = None


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out data and how the model is called on it; `step` is called after every batch."""

    posterior: Posterior
    batches: Batches
    options: Options
    seed: int
    step: Callable[[], object] = lambda: None

    @cached_property
    def observed(self) -> Observed:
        """One pass of the mean network; of long texts with many possible tokens a few positions count."""
        record, posterior, first = self.options.record, self.posterior, 0
        layers, rows, pooled = posterior.layers, [], []
        for number, (inputs, y) in enumerate(self.batches):
            device = next(iter(posterior.mode.values())).device
            look = partial(observed, posterior, layers, forward=self.options.forward)
            try:
                outputs, seen = look(to_device(inputs, device))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if _takes(look, y.to(device)):
                    raise MatchError(
                        "pass (inputs, targets), not (targets, inputs): the network takes the second of each pair, and "
                        f"of the first it says: {error}"
                    ) from error
                raise
            y = record.matched(y.to(outputs.device), outputs)
            keep = record.counted(outputs, y)
            own = torch.arange(first, first + len(y)).view(-1, *[1] * (y.dim() - 1)).expand(y.shape)
            if isinstance(keep, Tensor) and keep.dim() > 1 and outputs.shape[-1] > MANY_CLASSES:
                keep = keep & _some(keep, number)
            rows.append((outputs[keep], y[keep], own[keep.cpu()] if isinstance(keep, Tensor) else own))
            pooled.append(seen)
            first += len(y)
            self.step()
        outputs, y, owners = (torch.cat(part) for part in zip(*rows, strict=True))
        if not all(bool(a.isfinite().all()) for a in (outputs, *(a for seen in pooled for a in seen.values()))):
            raise CalibrationError(
                "the network's outputs on the held-out data, or the inputs of its layers, are not finite; the "
                "posterior is unchanged. Do the held-out inputs contain NaN or infinities?"
            )
        leverage, log_h = from_inputs(layers, pooled, posterior.state_leverage)
        ratios = leverage.ratios(log_h) if leverage.layers else Ratios.usual(outputs.new_empty(first))
        last = torch.cat([list(seen.values())[-1] for seen in pooled]) if all(pooled) else None
        return Observed(outputs, y, owners.flatten(1)[:, 0] if owners.dim() > 1 else owners, leverage, ratios, last)

    def moments(
        self,
        posterior: Posterior,
        variances: Sequence[VarianceOf],
        *,
        covariance: bool = False,
    ) -> Iterator[Rows]:
        """Of the linearised network at a posterior's mean, batch by batch, under each of k variances of the weights.

        Classes have a row for every position that counts. Where there are many, a few positions of each example have
        one, and variances of 0 but for the largest outputs, as predictions have them.
        """
        record, params = self.options.record, parameters_at_mean(posterior)
        call, device = Call(self.posterior.model, self.options.forward), next(iter(params.values())).device
        of_weights: Any = {"params": params, "variances": variances}
        ask: Any = partial(moments, **of_weights, budget=self.options.memory_budget, structure=posterior.structure)
        with evaluating(self.posterior.model):
            for number, (inputs, y) in enumerate(self.batches):
                self.step()
                inputs, y = to_device(inputs, device), y.to(device)
                plan = plan_for(call, params, inputs)
                if replace(self.options, predictive="linearised").has_many(plan.shape) and not covariance:
                    for given, at, rows, targets in _at_some_positions(
                        record, call, params, inputs, y, plan.shape, number
                    ):
                        found = ask(at, inputs=given, rows=ChosenRows(record, k=10, top=True))
                        spread = found.variance.new_zeros(len(found.variance), *found.mean.shape)
                        spread = spread.scatter(2, found.indices.expand(len(spread), -1, -1), found.variance)
                        yield Rows(found.mean[rows], spread[:, rows], None, targets[rows])
                    continue
                found = ask(call, inputs=inputs, covariance=covariance, plan=plan)
                y = record.matched(y, found.mean)
                keep = record.counted(found.mean, y)
                block = None if found.covariance is None else position_blocks(found.covariance[0], found.mean)[keep]
                yield Rows(found.mean[keep], found.variance[:, keep], block, y[keep])


def _takes(look: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether the network runs on it."""
    try:
        look(x)
    except Exception:
        return False
    return True


def _at_some_positions(
    record: Likelihood[Any],
    call: Call,
    params: Mapping[str, Tensor],
    inputs: Any,
    y: Tensor,
    shape: torch.Size,
    seed: int,
) -> Iterator[tuple[Any, Call, Tensor, Tensor]]:
    """Inputs, the call for them, which rows count and their targets, position after position.

    The positions are drawn at random among those that count, always the same.
    """
    if len(shape) == 1:
        yield inputs, call, torch.ones(len(y), dtype=torch.bool, device=y.device), y
        return
    # The shape of the outputs is all that is looked at.
    outputs = torch.empty(len(y), *shape, device="meta")
    counted = record.counted(outputs, record.matched(y, outputs))
    assert isinstance(counted, Tensor)
    counted = counted.reshape(len(y), -1)
    at, _ = at_one_position(call, params, inputs)
    for position in _some(counted, seed).to(torch.uint8).topk(min(_POSITIONS, counted.shape[1]), dim=1).indices.T:
        rows = counted.gather(1, position[:, None]).squeeze(1)
        if bool(rows.any()):
            yield (inputs, position), at, rows, y.reshape(len(y), -1).gather(1, position[:, None]).squeeze(1)


def _some(counted: Tensor, seed: int) -> Tensor:
    """Up to four of the positions that count of each example, drawn at random, always the same."""
    flat = counted.flatten(1)
    order = torch.rand(flat.shape, generator=torch.Generator().manual_seed(seed)).to(flat.device) * flat
    chosen = order.topk(min(_POSITIONS, flat.shape[1]), dim=1).indices
    return torch.zeros_like(flat).scatter_(1, chosen, value=True).view_as(counted)
