"""From a checkpoint to states with names: which optimiser wrote it, and which parameter each state belongs to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam._shards import is_sharded, placed_like
from bayesadam.errors import MatchError
from bayesadam.readers import Curvature, StateReader, reader_named
from bayesadam.readers.formats.checkpoint import (
    DEFAULTS,
    Checkpoint,
    CheckpointKeywords,
    CheckpointOptions,
    clean_names,
)
from bayesadam.readers.formats.groups import Matched, matched
from bayesadam.readers.formats.identify import identify_reader
from bayesadam.readers.formats.lazy import renamed
from bayesadam.readers.formats.names import memory_of, parameter_names
from bayesadam.readers.formats.networks import match_weights, slots_of
from bayesadam.readers.match import Match, match_state_dict
from bayesadam.readers.read import read_match
from bayesadam.readers.reader import has_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack


def match_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module | None = None,
    options: CheckpointOptions = DEFAULTS,
    **changes: Unpack[CheckpointKeywords],
) -> Match:
    """Match the optimiser's state to the weights, with or without the model.

    Names are used where the state has them or the caller gives them. Otherwise the trainer's own rule decides, if there is
    one and it agrees with every shape; or the order of the file's weights, if shapes leave one answer: see
    `bayesadam.readers.formats.names`. A model distinguishes parameters from buffers, and has the order where the file has none;
    where file and model have different orders, both must give the same answer. The model may be a part of what was trained,
    such as the network inside a LightningModule.

    The model's own weights are neither used nor changed. `changes` are `options` as keywords.
    """
    return _matched(_resolve(checkpoint, model, replace(options, **changes)))


def explain(checkpoint: Checkpoint, options: CheckpointOptions = DEFAULTS) -> tuple[str, ...]:
    """How the file is read without the model, in sentences: what was taken and why, by which rule, what was left out."""
    return match_and_explain(checkpoint, options)[1]


def match_and_explain(checkpoint: Checkpoint, options: CheckpointOptions = DEFAULTS) -> tuple[Match, tuple[str, ...]]:
    """What `match_checkpoint` returns without the model, and `explain`."""
    resolved = _resolve(checkpoint, None, options)
    match = _matched(resolved)
    beside = "" if checkpoint.optimizer_path is None else f", the optimiser's state in {checkpoint.optimizer_path}"
    shapes = sum(slot.shape is not None for slot in slots_of(resolved.state_dict, resolved.reader))
    in_optimizer = sum(len(group["params"]) for group in checkpoint.optimizer["param_groups"])
    reasons = Counter(match.omitted.values())
    classes = checkpoint.classes
    others = len(checkpoint.weights) - len(match.entries) - len(match.omitted)
    left_out = [f"{count} {reason}" for reason, count in reasons.items()]
    left_out += [f"{others} that are no parameters, such as buffers"] if others else []
    return match, (
        f"{checkpoint.path}: format {checkpoint.format}{beside}.",
        *(f"{note[0].upper()}{note[1:]}." for note in checkpoint.notes),
        f"Optimiser: {resolved.reader.name}, {in_optimizer} parameters in {_counted(checkpoint.optimizer['param_groups'])}.",
        f"Matched by {resolved.words}.",
        f"{len(match.entries)} of {len(checkpoint.weights)} tensors have a state; {shapes} shapes were confirmed.",
        *([f"Left out: {'; '.join(left_out)}."] if left_out else []),
        *([f"Objects of these classes were read as data, none was imported: {', '.join(classes)}."] if classes else []),
    )


def _counted(groups: Sequence[Any]) -> str:
    return f"{len(groups)} group{'s' if len(groups) > 1 else ''}"


def read_curvature(
    checkpoint: Checkpoint,
    model: nn.Module | None = None,
    options: CheckpointOptions = DEFAULTS,
    **changes: Unpack[CheckpointKeywords],
) -> Curvature:
    """v̂ by parameter name; the arguments are those of `match_checkpoint`."""
    return read_match(match_checkpoint(checkpoint, model, options, **changes))


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the checkpoint's weights and buffers into the model, all or none of them."""
    inner = unwrap(model)
    narrowed = _narrowed(checkpoint, inner)
    weights = {name: narrowed.weights[key] for name, key in _own_names(narrowed, inner).items()}
    own = inner.state_dict(keep_vars=True)
    tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor)}
    # A tied tensor may be saved under one of its names.
    saved = {memory_of(tensors[name]) for name in weights if name in tensors}
    counters = {name for name in tensors if name.endswith("num_batches_tracked")}
    left = tensors.keys() - weights.keys() - counters
    missing = [name for name in tensors if name in left and memory_of(tensors[name]) not in saved]
    unknown = [name for name in weights if name not in tensors]
    if (missing and not checkpoint.rules.partial) or unknown:
        raise MatchError(
            f"{checkpoint.path} is another model's: {type(inner).__name__} "
            + (f"has no {unknown[:4]}" if unknown else f"has {missing[:4]}, which it lacks")
        )
    for name, tensor in weights.items():
        if tensor.shape != tensors[name].shape:
            raise MatchError(
                f"{checkpoint.path} is another model's: {name!r} has shape {tuple(tensor.shape)} in the file and "
                f"{tuple(tensors[name].shape)} in the model"
            )
    sharded = {name: tensor for name, tensor in tensors.items() if name in weights and is_sharded(tensor)}
    with torch.no_grad():
        for name, tensor in sharded.items():
            tensor.copy_(placed_like(weights[name], tensor))
    inner.load_state_dict({name: tensor for name, tensor in weights.items() if name not in sharded}, strict=False)


class _Resolved(NamedTuple):
    """What `match_state_dict` needs; what the names rest on, in words; and the parameters that no state can be read for."""

    model: nn.Module
    state_dict: Mapping[str, Any]
    reader: StateReader
    names: list[str]
    words: str
    unread: Mapping[str, str] = {}


def _matched(resolved: _Resolved) -> Match:
    match = match_state_dict(resolved.model, resolved.state_dict, resolved.reader, resolved.names)
    return replace(match, omitted={**match.omitted, **resolved.unread})


class _Weights(nn.Module):
    """Stands in for the model where there is none: parameters by name, over the checkpoint's own memory."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.named = {n: nn.Parameter(tensor.detach(), tensor.is_floating_point()) for n, tensor in named.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, in the file's order."""
        return iter(self.named.items())


def _resolve(checkpoint: Checkpoint, model: nn.Module | None, options: CheckpointOptions) -> _Resolved:
    if model is not None:
        checkpoint = _narrowed(checkpoint, unwrap(model), options)
    reader = options.optimizer or identify_reader(checkpoint.optimizer, checkpoint.recorded.optimizer)
    record = reader_named(reader) if isinstance(reader, str) else reader
    known, words = options.param_names, "the names that were given"
    if known is None:
        known, words = checkpoint.param_names, "the names in the state"
    if known is None:
        known, words = _by_rules(checkpoint, record, model), "the trainer's own rule"
    if model is None:
        return _readable(_without_model(checkpoint, record, known, words, options.groups_in_order))
    parameters = dict(unwrap(model).named_parameters())
    shapes = _shapes_for(checkpoint, unwrap(model))
    for name, parameter in parameters.items():
        if name in shapes and shapes[name] != parameter.shape:
            raise MatchError(
                f"{checkpoint.path} is another model's: {name!r} has shape {tuple(shapes[name])} in the file and "
                f"{tuple(parameter.shape)} in the model"
            )
    if known is not None:
        resolved = _Resolved(model, checkpoint.optimizer, record, list(known), words)
    else:
        found = _by_model(checkpoint, record, parameters, shapes, options.groups_in_order)
        resolved = _restricted(model, checkpoint.optimizer, record, found)
    if checkpoint.rules.partial:
        _require_stored(checkpoint, resolved, shapes)
    return _readable(resolved)


def _without_model(
    checkpoint: Checkpoint, record: StateReader, known: Sequence[str] | None, words: str, in_order: bool
) -> _Resolved:
    weights, candidates = checkpoint.weights, parameter_names(checkpoint.weights)
    slots = slots_of(checkpoint.optimizer, record)
    if known is not None:
        known = _clean(known, weights)
        chosen = [name for name in weights if name in {*candidates.single, *known}]
        return _Resolved(_Weights({n: weights[n] for n in chosen}), checkpoint.optimizer, record, known, words)
    found = match_weights(slots, weights, ordered=checkpoint.ordered, in_order=in_order)
    listed = {*candidates.enough_for(len(slots)), *found.names.values()}
    stand_in = _Weights({name: weights[name] for name in weights if name in listed})
    return _restricted(stand_in, checkpoint.optimizer, record, found)


def _readable(resolved: _Resolved) -> _Resolved:
    """Without the parameters that are not real numbers, which no Gaussian can be put on."""
    parameters = dict(unwrap(resolved.model).named_parameters())
    unread = {n: str(p.dtype).removeprefix("torch.") for n, p in parameters.items() if not p.is_floating_point()}
    if not unread:
        return resolved
    keys = [key for group in resolved.state_dict["param_groups"] for key in group["params"]]
    if len(keys) != len(resolved.names):
        return resolved
    kept = {key: name for key, name in zip(keys, resolved.names, strict=True) if name not in unread}
    reasons = {name: f"not of real numbers ({kind})" for name, kind in unread.items()}
    restricted = _restricted(resolved.model, resolved.state_dict, resolved.reader, Matched(kept, resolved.words))
    return restricted._replace(unread=reasons)


def _require_stored(checkpoint: Checkpoint, resolved: _Resolved, stored: Container[str]) -> None:
    """What was trained must be in the file, or the posterior would be about weights that were never trained."""
    keys = [key for group in resolved.state_dict["param_groups"] for key in group["params"]]
    absent = [(key, name) for key, name in zip(keys, resolved.names, strict=True) if name not in stored]
    lost = [name for key, name in absent if has_tensors(resolved.state_dict["state"].get(key))]
    if lost:
        raise MatchError(
            f"{checkpoint.path} does not hold {lost[:4]}, which the optimiser trained: load those weights yourself and use "
            "Posterior.from_state_dict, or read the posterior from the live model and optimiser"
        )


def _by_rules(checkpoint: Checkpoint, record: StateReader, model: nn.Module | None) -> list[str] | None:
    """The names in the optimiser's order by the trainer's own rule; None where it has none, or the state is not like it.

    Every version of the rule is held against the sizes of the groups and all shapes, and what is left must agree.
    """
    rules = checkpoint.rules
    if rules.orders is None:
        return None
    whole = unwrap(model) if model is not None else rules.model() if rules.model is not None else None
    if whole is None:
        return None
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    slots = slots_of(checkpoint.optimizer, record)
    sizes = [len(group["params"]) for group in checkpoint.optimizer["param_groups"]]
    answers = {
        tuple(name for group in order for name in group)
        for order in rules.orders(whole)
        if [len(group) for group in order] == sizes
    }
    wanted = [slot.shape for slot in slots]
    fitting = sorted(n for n in answers if all(s in (None, shapes[name]) for s, name in zip(wanted, n, strict=True)))
    if len(fitting) > 1:
        place = next(i for i, names in enumerate(zip(*fitting, strict=True)) if len(set(names)) > 1)
        raise MatchError(
            f"{checkpoint.path}: versions of its trainer order the parameters differently, and the state under key "
            f"{slots[place].key!r} may belong to {' or to '.join(repr(names[place]) for names in fitting)}. Pass "
            "param_names=[...], the parameter names in the order in which the optimiser was given them"
        )
    if not fitting:
        return None
    if model is not None or rules.names is None:
        return list(fitting[0])
    stored = {own: name for name, own in rules.names(whole).items()}
    return [stored.get(name, name) for name in fitting[0]]


def _narrowed(checkpoint: Checkpoint, model: nn.Module, options: CheckpointOptions = DEFAULTS) -> Checkpoint:
    """The part of a checkpoint that is the model's, where the model is a part of what was trained; else all of it."""
    prefix = _prefix(checkpoint, model)
    if prefix is None:
        return checkpoint
    whole = _resolve(checkpoint, None, options)
    names = iter(whole.names)
    groups: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    for group in whole.state_dict["param_groups"]:
        mine = [(key, name) for key, name in zip(group["params"], names, strict=False) if name.startswith(prefix)]
        groups.append({**group, "params": [name.removeprefix(prefix) for _, name in mine]})
        states |= {name.removeprefix(prefix): whole.state_dict["state"].get(key, {}) for key, name in mine}
    inside = {name: name.removeprefix(prefix) for name in checkpoint.weights if name.startswith(prefix)}
    return replace(
        checkpoint,
        weights=renamed(checkpoint.weights, {short: name for name, short in inside.items()}),
        stored_names={short: checkpoint.stored_names[name] for name, short in inside.items()},
        optimizer={"state": states, "param_groups": [group for group in groups if group["params"]]},
    )


def _prefix(checkpoint: Checkpoint, model: nn.Module) -> str | None:
    """What every name of the model has before it in the file; None where the model is the whole, or no such is there."""
    held = model.state_dict(keep_vars=True).items()
    own = {name: value.shape for name, value in held if isinstance(value, Tensor)}
    if checkpoint.rules.partial or not own or not _own_names(checkpoint, model).keys().isdisjoint(own):
        return None
    first = next(iter(own))
    found = {name.removesuffix(first) for name in checkpoint.weights if name.endswith("." + first)}
    fitting = [prefix for prefix in sorted(found) if all(prefix + name in checkpoint.weights for name in own)]
    if len(fitting) > 1:
        # Networks of one architecture and other sizes.
        outline = getattr(checkpoint.weights, "outline", checkpoint.weights)
        alike = [p for p in fitting if all(outline[p + name].shape == shape for name, shape in own.items())]
        fitting = alike or fitting
    if len(fitting) > 1:
        raise MatchError(
            f"{checkpoint.path} holds the model's weights more than once, under {' and '.join(map(repr, fitting))}: "
            "pass the module that was trained"
        )
    return fitting[0] if fitting else None


def _by_model(
    checkpoint: Checkpoint,
    record: StateReader,
    parameters: Mapping[str, nn.Parameter],
    stored: Mapping[str, torch.Size],
    in_order: bool,
) -> Matched:
    """The names by the model's order, and by the file's where it has another: the class may have changed since."""
    slots = slots_of(checkpoint.optimizer, record)
    trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    names = trainable if len(slots) == len(trainable) else list(parameters)
    shapes = {name: parameters[name].shape for name in names}
    found = matched(slots, shapes, ordered=True, in_order=in_order)
    filed = [name for name in stored if name in shapes]
    if checkpoint.ordered and len(filed) == len(names) and filed != names:
        other = matched(slots, {name: shapes[name] for name in filed}, ordered=True, in_order=in_order).names
        differing = [key for key, name in found.names.items() if other.get(key) != name]
        if differing:
            key = differing[0]
            raise MatchError(
                f"{checkpoint.path} has the weights in another order than the model: the state under key {key!r} would "
                f"be that of {other.get(key)!r} by the file, of {found.names[key]!r} by the model. Pass param_names=[...], the "
                "parameter names in the order in which the optimiser was given them"
            )
    return found


def _restricted(model: nn.Module, state_dict: Mapping[str, Any], record: StateReader, found: Matched) -> _Resolved:
    """The state of the keys that have a name; the others hold nothing."""
    groups = [
        {**group, "params": [key for key in group["params"] if key in found.names]}
        for group in state_dict["param_groups"]
    ]
    names = [found.names[key] for group in groups for key in group["params"]]
    nameless = {key for group in state_dict["param_groups"] for key in group["params"]} - found.names.keys()
    states = {key: state for key, state in state_dict["state"].items() if key not in nameless}
    return _Resolved(model, {"state": states, "param_groups": groups}, record, names, found.words)


def _clean(names: Sequence[str], weights: Mapping[str, Tensor]) -> list[str]:
    """Names as the weights have them."""
    behind = {key: name for name, key in clean_names(names).items()}
    cleaned = [name if name in weights else behind.get(name, name) for name in names]
    unknown = [name for name in cleaned if name not in weights]
    if unknown:
        raise MatchError(
            f"the optimiser's parameters {unknown[:4]} are not among the weights: is it another model's state?"
        )
    return cleaned


def _own_names(checkpoint: Checkpoint, model: nn.Module) -> dict[str, str]:
    """The model's names of the weights, which may themselves begin with what looks like a wrapper's prefix, and ours."""
    names = set(model.state_dict(keep_vars=True))
    stored = {checkpoint.stored_names[name]: name for name in checkpoint.weights}
    if checkpoint.rules.names is not None:
        own = checkpoint.rules.names(model)
        return {own.get(key, key): name for key, name in stored.items()}
    by_file = len(names & stored.keys()) > len(names & checkpoint.weights.keys())
    return {key if by_file else name: name for key, name in stored.items()}


def _shapes_for(checkpoint: Checkpoint, model: nn.Module) -> dict[str, torch.Size]:
    """Shapes by the model's names."""
    outline = getattr(checkpoint.weights, "outline", checkpoint.weights)
    return {own: outline[name].shape for own, name in _own_names(checkpoint, model).items()}
