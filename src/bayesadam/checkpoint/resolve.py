"""From a checkpoint to states with names: which optimiser wrote it, and which parameter each state belongs to."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam._shards import is_sharded, placed_like
from bayesadam.checkpoint.checkpoint import DEFAULTS, Checkpoint, CheckpointKeywords, CheckpointOptions, clean_names
from bayesadam.checkpoint.identify import identify_reader, shape_behind
from bayesadam.checkpoint.lazy import renamed
from bayesadam.checkpoint.names import Slot, assign, memory_of, parameter_names
from bayesadam.curvature import Curvature, StateReader, reader_named
from bayesadam.curvature.match import Match, match_state_dict
from bayesadam.curvature.read import read_match
from bayesadam.curvature.reader import has_tensors
from bayesadam.errors import MatchError

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
    `bayesadam.checkpoint.names`. A model distinguishes parameters from buffers, and has the order where the file has none;
    where file and model have different orders, both must give the same answer. The model may be a part of what was trained,
    such as the network inside a LightningModule.

    The model's own weights are neither used nor changed. `changes` are `options` as keywords.
    """
    return match_state_dict(*_resolve(checkpoint, model, replace(options, **changes)))


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
    """What `match_state_dict` needs."""

    model: nn.Module
    state_dict: Mapping[str, Any]
    reader: StateReader
    names: list[str]


class _Weights(nn.Module):
    """Stands in for the model where there is none: parameters by name, over the checkpoint's own memory."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.named = {name: nn.Parameter(tensor.detach()) for name, tensor in named.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, in the file's order."""
        return iter(self.named.items())


def _resolve(checkpoint: Checkpoint, model: nn.Module | None, options: CheckpointOptions) -> _Resolved:
    if model is not None:
        checkpoint = _narrowed(checkpoint, unwrap(model), options)
    state_dict, in_order = checkpoint.optimizer, options.groups_in_order
    reader = options.optimizer or identify_reader(checkpoint.optimizer, checkpoint.recorded.optimizer)
    record = reader_named(reader) if isinstance(reader, str) else reader
    known = options.param_names if options.param_names is not None else checkpoint.param_names
    if known is None:
        known = _by_rules(checkpoint, record, model)
    if model is None:
        candidates, repeats = parameter_names(checkpoint.weights)
        single = [name for name in candidates if name not in repeats]
        slots = _slots(state_dict, record)
        # Memory is also shared by parameters that were made from one tensor and never tied.
        chosen = candidates if len(slots) > len(single) else single
        if known is not None:
            known = _clean(known, checkpoint.weights)
            chosen = [name for name in checkpoint.weights if name in {*single, *known}]
        stand_in = _Weights({name: checkpoint.weights[name] for name in chosen})
        if known is not None:
            return _Resolved(stand_in, state_dict, record, known)
        outline = getattr(checkpoint.weights, "outline", checkpoint.weights)
        shapes = {name: outline[name].shape for name in chosen}
        found = assign(slots, shapes, ordered=checkpoint.ordered, in_order=in_order)
        return _Resolved(stand_in, *_restricted(state_dict, record, found))
    parameters = dict(unwrap(model).named_parameters())
    shapes = _shapes_for(checkpoint, unwrap(model))
    for name, parameter in parameters.items():
        if name in shapes and shapes[name] != parameter.shape:
            raise MatchError(
                f"{checkpoint.path} is another model's: {name!r} has shape {tuple(shapes[name])} in the file and "
                f"{tuple(parameter.shape)} in the model"
            )
    if known is not None:
        resolved = _Resolved(model, state_dict, record, list(known))
    else:
        found = _by_model(checkpoint, record, parameters, shapes, in_order)
        resolved = _Resolved(model, *_restricted(state_dict, record, found))
    if checkpoint.rules.partial:
        _require_stored(checkpoint, resolved, shapes)
    return resolved


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
    slots = _slots(checkpoint.optimizer, record)
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
    own = [name for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)]
    if checkpoint.rules.partial or not own or not _own_names(checkpoint, model).keys().isdisjoint(own):
        return None
    found = {name.removesuffix(own[0]) for name in checkpoint.weights if name.endswith("." + own[0])}
    fitting = [prefix for prefix in sorted(found) if all(prefix + name in checkpoint.weights for name in own)]
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
) -> dict[Any, str]:
    """The names by the model's order, and by the file's where it has another: the class may have changed since."""
    slots = _slots(checkpoint.optimizer, record)
    trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    names = trainable if len(slots) == len(trainable) else list(parameters)
    shapes = {name: parameters[name].shape for name in names}
    found = assign(slots, shapes, ordered=True, in_order=in_order)
    filed = [name for name in stored if name in shapes]
    if checkpoint.ordered and len(filed) == len(names) and filed != names:
        other = assign(slots, {name: shapes[name] for name in filed}, ordered=True, in_order=in_order)
        differing = [key for key in found if other.get(key) != found[key]]
        if differing:
            key = differing[0]
            raise MatchError(
                f"{checkpoint.path} has the weights in another order than the model: the state under key {key!r} would "
                f"be that of {other.get(key)!r} by the file, of {found[key]!r} by the model. Pass param_names=[...], the "
                "parameter names in the order in which the optimiser was given them"
            )
    return found


def _slots(state_dict: Mapping[str, Any], record: StateReader) -> list[Slot]:
    keys = [(key, number) for number, group in enumerate(state_dict["param_groups"]) for key in group["params"]]
    held = [(key, number, state_dict["state"].get(key, {})) for key, number in keys]
    always = record.statistic == "identity"
    return [Slot(key, number, shape_behind(record, s), always or has_tensors(s)) for key, number, s in held]


def _restricted(
    state_dict: Mapping[str, Any], record: StateReader, found: Mapping[Any, str]
) -> tuple[dict[str, Any], StateReader, list[str]]:
    """The state of the keys that have a name; the others hold nothing."""
    groups = [
        {**group, "params": [key for key in group["params"] if key in found]} for group in state_dict["param_groups"]
    ]
    names = [found[key] for group in groups for key in group["params"]]
    nameless = {key for group in state_dict["param_groups"] for key in group["params"]} - found.keys()
    states = {key: state for key, state in state_dict["state"].items() if key not in nameless}
    return {"state": states, "param_groups": groups}, record, names


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
