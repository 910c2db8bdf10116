"""A checkpoint, weights by name and the optimiser's state, whoever wrote them; how to read and to match it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from bayesadam._alone import unwrap
from bayesadam._files import replacing
from bayesadam._shards import placed_like
from bayesadam._storage import write_tensors
from bayesadam._warnings import warn
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.readers.choose import choose, copies_of, dotted, matching
from bayesadam.readers.compression import PROBE_KEY, probe, same_weights
from bayesadam.readers.curvature import Curvature, origin_of, read_match
from bayesadam.readers.formats.contents import Keys, Network, Recorded, Rules
from bayesadam.readers.formats.huggingface import STATE
from bayesadam.readers.formats.lazy import gathered, identities, memory_of, outline_of, tensors_of
from bayesadam.readers.formats.registry import format_of
from bayesadam.readers.identify import identify_reader
from bayesadam.readers.match import (
    IN_ORDER,
    NAMES,
    Match,
    Pairing,
    Slot,
    candidates,
    match_pairs,
    own_parameters,
    pair,
    pair_by_names,
    shapes_listed,
    slots_of,
)
from bayesadam.readers.registry import StateDict, StateReader, damage_told, reader_named

if TYPE_CHECKING:
    from typing_extensions import Unpack


APART = ". Pass the file that has it as optimizer_path="


class CheckpointKeywords(TypedDict, total=False):
    """How a checkpoint is read: the keywords of everything that reads one.

    Attributes:
        optimizer_path: the file with the optimiser's state, where it is not that of the weights; a state next to the
            weights is then not opened.
        optimizer: the name of the optimiser that wrote the state, or a reader; None identifies it by the state's keys.
        param_names: the parameter names in the optimiser's order, where the state has none of its own.
        groups_in_order: whether each of several groups was filled in the model's order, which no file says.
        weights_key: which weights, where the file holds several; dots lead down, as in `"state.model"`. Several
            networks that one optimiser trained, in its order: `("actor", "critic")`, or `"actor,critic"`.
        optimizer_key: which optimiser's state, where the file holds several; `"optimizer_states.0"`.
    """

    optimizer_path: str | os.PathLike[str] | None
    optimizer: str | StateReader | None
    param_names: Sequence[str] | None
    groups_in_order: bool
    weights_key: str | Sequence[str] | None
    optimizer_key: str | None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trainer's weights and optimiser state; tensors stay on the disk until they are used.

    Attributes:
        weights: every tensor of the model, buffers too, by name without the prefixes of torch.compile and data
            parallelism; `places` are the keys that lead to them in the file.
        optimizer: the optimiser's state in torch's layout, `state` and `param_groups`.
        path: the file or folder with the weights; that with the state, where it is another, is `optimizer_path`.
        networks: the keys of the networks that `weights` are, and `left` those of the file's others.
        copies: of averages and other copies of them, the network and the weight's name by the keys of each tensor.
        ordered: whether `weights` are in the order in which the model registered them.
        weights_recorded, state_recorded: what the file with the weights, and another with the state, says of training.
        notes: which of the file's weights and states were taken and why; `choices` the options that would take others.
    """

    weights: Mapping[str, Tensor]
    optimizer: StateDict
    path: Path
    format: str
    places: Mapping[str, Keys]
    ordered: bool
    networks: tuple[Keys, ...] = ()
    left: tuple[Keys, ...] = ()
    copies: Mapping[Keys, tuple[Network, str]] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    weights_recorded: Recorded = field(default_factory=Recorded)
    state_recorded: Recorded = field(default_factory=Recorded)
    optimizer_path: Path | None = None
    notes: tuple[str, ...] = ()
    choices: str = ""

    @property
    def recorded(self) -> Recorded:
        """What the trainer wrote beside the weights, or else beside the state."""
        return self.weights_recorded.completed(self.state_recorded)

    def n_data_or(self, given: float | None) -> float:
        """N as given or, for None, as the trainer recorded it."""
        n_data = self.recorded.n_data if given is None else given
        if n_data is None:
            raise SettingError(f"{self.path} does not say how many training examples there were: pass n_data=")
        return n_data

    def batch_size_or(self, given: int | None) -> int | None:
        """B as given or, for None, as recorded, if it was."""
        return self.recorded.batch_size if given is None else given


def read_checkpoint(path: str | os.PathLike[str], **options: Unpack[CheckpointKeywords]) -> Checkpoint:
    """Read a checkpoint of any known format, identified by its content."""
    if unknown := sorted(options.keys() - CheckpointKeywords.__annotations__.keys()):
        raise TypeError(f"unknown options {unknown}; there are {', '.join(CheckpointKeywords.__annotations__)}")
    path, second, weights_key = Path(path), options.get("optimizer_path"), options.get("weights_key")
    kind = format_of(path)
    contents = state = kind.read(path)
    if second is None and not contents.states and len(contents.beside) == 1:
        second = contents.beside[0]
    if second is not None:
        second = Path(second)
        state = format_of(second).read(second)
    if not contents.networks:
        raise FileError(f"{path} holds no weights that can be identified: found {contents.summary}")
    if not state.states:
        beside = f"; there are {' and '.join(file.name for file in contents.beside)}" if contents.beside else ""
        raise FileError(
            f"{second or path} holds no optimiser state: found {state.summary}{APART}{beside}. Weights alone give no "
            "posterior: ba.calibrate(model, held_out) takes a model without one"
        )
    weights_key = weights_key if weights_key is None or isinstance(weights_key, str) else ",".join(weights_key)
    choice = choose(contents.networks, state.states, path, weights_key, options.get("optimizer_key"))
    behind = choice.places()
    weights = gathered({name: (network.tensors, key) for name, (network, key) in behind.items()})
    optimizer = state.states[choice.state]
    with damage_told():
        # A saved posterior knows a few of its weights. Other shapes are refused by name once states are matched.
        states = {} if second is None else outline_of(optimizer["state"])
        saved = {n: state[PROBE_KEY] for n, state in states.items() if n in weights and PROBE_KEY in state}
        read = {name: probe(weights[name]) for name in saved}
        is_alike = bool(saved) and all(saved[name].shape == read[name].shape for name in saved)
        if is_alike and not same_weights(saved, read):
            raise MatchError(f"the weights in {path} are not those that the saved posterior belongs to")
    names = {place: name for name, place in behind.items()}
    copies = {
        (*copy.path, key): (copy, name)
        for copy, original in copies_of(choice.networks, contents.networks).items()
        for key, other in matching(copy, original).items()
        if (name := names.get((original, other))) is not None
    }
    chosen = tuple(network.path for network in choice.networks)
    others = {"weights_key": [network.path for network in contents.networks], "optimizer_key": list(state.states)}
    return Checkpoint(
        weights,
        optimizer,
        path,
        kind.name,
        places={name: (*network.path, key) for name, (network, key) in behind.items()},
        ordered=all(network.ordered for network in choice.networks),
        networks=chosen,
        left=tuple(n.path for n in contents.networks if n.path not in {*chosen, *(c.path for c, _ in copies.values())}),
        copies=copies,
        rules=contents.rules,
        weights_recorded=contents.recorded,
        state_recorded=Recorded() if second is None else state.recorded,
        optimizer_path=second,
        notes=(*dict.fromkeys((*contents.notes, *state.notes)), *choice.notes),
        choices="; ".join(f"{o}= may be {', '.join(map(dotted, k))}" for o, k in others.items() if len(k) > 1),
    )


@damage_told()
def match_checkpoint(
    checkpoint: Checkpoint, model: nn.Module | None = None, **options: Unpack[CheckpointKeywords]
) -> Match:
    """Match the optimiser's state to the weights, with or without the model, whose own weights are not used.

    By names, where the state, the caller or the trainer's own rule has them; else by the order of the model, or of the
    file's weights, and every shape, which must give one answer (`bayesadam.readers.match`).
    """
    state, weights = checkpoint.optimizer, checkpoint.weights
    reader = reader_named(options.get("optimizer") or identify_reader(state))
    slots = slots_of(state, reader)
    if model is None:
        pairing = _pair_file(checkpoint, slots, options)
        # Without a model every weight that may have been trained is a parameter.
        listed = {*candidates(weights, len(slots)), *pairing.names.values()}
        tensors = {name: weights[name].detach() for name in weights if name in listed}
        parameters = {name: nn.Parameter(tensor, tensor.is_floating_point()) for name, tensor in tensors.items()}
        return match_pairs(parameters, state, reader, pairing)
    stored, is_part = _stored_by_name(checkpoint, unwrap(model))
    parameters = own_parameters(model)
    if is_part:
        pairing = _pair_file(checkpoint, slots, options)
        inner = {name: key for key, name in stored.items() if key in parameters}
        own = {key: inner[name] for key, name in pairing.names.items() if name in inner}
        return match_pairs(parameters, state, reader, Pairing(own, pairing.why))
    shapes = shapes_listed(parameters, len(slots))
    filed = {name: shapes[name] for name in stored if name in shapes}
    # The class may have changed since; that its order is the optimiser's nobody can then state.
    moved = checkpoint.ordered and len(filed) == len(shapes) and list(filed) != list(shapes)
    how: Any = {"ordered": True, "in_order": options.get("groups_in_order", False), "remedy": "" if moved else IN_ORDER}
    how["rules"] = () if checkpoint.rules.orders is None else checkpoint.rules.orders(unwrap(model))
    named = pair_by_names(state, parameters, options.get("param_names"))
    pairing = named or pair(slots, shapes, **how)
    other = pairing.names if named is not None or not moved else pair(slots, filed, **how).names
    if odd := [key for key, name in pairing.names.items() if other.get(key) != name]:
        raise MatchError(
            f"{checkpoint.path} has the weights in another order than the model: the state under key {odd[0]!r} would "
            f"be that of {other.get(odd[0])!r} by the file, of {pairing.names[odd[0]]!r} by the model. {NAMES}"
        )
    trained = {slot.key for slot in slots if slot.needed}
    lost = [name for key, name in pairing.names.items() if name not in stored and key in trained]
    if checkpoint.rules.partial and lost:
        # The posterior would be about weights that were never trained.
        raise MatchError(
            f"{checkpoint.path} does not hold {lost[:4]}, which the optimiser trained: load those weights yourself and "
            "use Posterior.from_state_dict, or read the posterior from the live model and optimiser"
        )
    return match_pairs(parameters, state, reader, pairing)


def read_curvature(
    checkpoint: Checkpoint, model: nn.Module | None = None, **options: Unpack[CheckpointKeywords]
) -> Curvature:
    """v̂ by parameter name; the arguments are those of `match_checkpoint`."""
    return read_match(match_checkpoint(checkpoint, model, **options))


def explain(checkpoint: Checkpoint, match: Match | None = None) -> tuple[str, ...]:
    """How the file is read without the model, in sentences; `match` is the result of `match_checkpoint` without it."""
    match = match or match_checkpoint(checkpoint)
    beside = "" if checkpoint.optimizer_path is None else f", the optimiser's state in {checkpoint.optimizer_path}"
    sizes = [len(group["params"]) for group in checkpoint.optimizer["param_groups"]]
    left_out = [f" {count} {reason}." for reason, count in Counter(match.omitted.values()).items()]
    return (
        f"{checkpoint.path}: format {checkpoint.format}{beside}.",
        *(f"{note[0].upper()}{note[1:]}." for note in checkpoint.notes),
        f"Optimiser: {match.optimizers[0]}; parameters by group: {', '.join(map(str, sizes))}.",
        f"Matched by {match.why}.",
        f"{len(match.entries)} of {len(checkpoint.weights)} tensors have a state.{''.join(left_out)}",
    )


def _pair_file(checkpoint: Checkpoint, slots: Sequence[Slot], options: CheckpointKeywords) -> Pairing:
    in_order = options.get("groups_in_order", False)
    if named := pair_by_names(checkpoint.optimizer, checkpoint.weights, options.get("param_names")):
        return named
    try:
        shapes = candidates(checkpoint.weights, len(slots))
        return pair(slots, shapes, ordered=checkpoint.ordered, in_order=in_order)
    except MatchError as error:
        remedy = "" if checkpoint.ordered else "; or pass the model, whose order it is (Posterior.from_checkpoint)"
        remedy += f". In {checkpoint.path} {checkpoint.choices}" if checkpoint.choices else ""
        raise type(error)(f"{error}{remedy}") from None


def _stored_by_name(checkpoint: Checkpoint, model: nn.Module) -> tuple[dict[str, str], bool]:
    """The name in the checkpoint by the name in the model, and whether the model is a part of what was trained."""
    tensors, rules = tensors_of(model), checkpoint.rules
    outline = outline_of(checkpoint.weights)
    places, is_one = checkpoint.places, len(checkpoint.networks) < 2
    stored = {places[name][-1] if is_one else dotted(places[name]): name for name in checkpoint.weights}
    if rules.names is not None:
        renamed = rules.names(model)
        names = {renamed.get(key, key): name for key, name in stored.items()}
    else:
        by_file = len(tensors.keys() & stored.keys()) > len(tensors.keys() & outline.keys())
        names = {key if by_file else name: name for key, name in stored.items()}
    if rules.partial or not tensors or not names.keys().isdisjoint(tensors):
        for name, key in names.items():
            if name in tensors and outline[key].shape != tensors[name].shape:
                raise MatchError(
                    f"build the model as it was trained: {name!r} has shape {tuple(outline[key].shape)} in "
                    f"{checkpoint.path} and {tuple(tensors[name].shape)} in the model"
                )
        others = {key for name, key in names.items() if name not in tensors} & candidates(checkpoint.weights).keys()
        is_part = bool(tensors and others) and tensors.keys() <= names.keys()
        return names, is_part and not rules.partial and rules.orders is None
    # The model may be a part of what was trained, under a prefix.
    first = next(iter(tensors))
    prefixes = sorted({name.removesuffix(first) for name in outline if name.endswith("." + first)})
    fitting = [
        prefix
        for prefix in prefixes
        if all(prefix + n in outline and outline[prefix + n].shape == t.shape for n, t in tensors.items())
    ]
    if len(fitting) > 1:
        raise MatchError(
            f"{checkpoint.path} holds the model's weights more than once, under {' and '.join(map(repr, fitting))}: "
            "pass the module that was trained"
        )
    if not fitting:
        return names, False
    return {name.removeprefix(fitting[0]): name for name in outline if name.startswith(fitting[0])}, True


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the checkpoint's weights and buffers into the model, all or none of them; a part of a model gets its own."""
    inner = unwrap(model)
    names, is_part = _stored_by_name(checkpoint, inner)
    tensors = tensors_of(inner)
    # A tied tensor may be saved under one of its names.
    saved = {memory_of(tensors[name]) for name in names if name in tensors}
    absent = [name for name in tensors if name not in names and memory_of(tensors[name]) not in saved]
    missing = [name for name in absent if not name.endswith("num_batches_tracked")]
    unknown = [name for name in names if name not in tensors]
    if (missing and not checkpoint.rules.partial) or (unknown and not is_part):
        raise MatchError(
            f"{checkpoint.path} is another model's: {type(inner).__name__} "
            + (f"has no {unknown[:4]}" if unknown else f"has {missing[:4]}, which it lacks")
        )
    if unknown:
        more = f"{len(unknown)} tensors that {type(inner).__name__} has not, {', '.join(unknown[:4])}"
        warn(f"{checkpoint.path} holds {more}: left out. Build the model as it was trained if it should have them")
    with torch.no_grad():
        for name in names.keys() & tensors.keys():
            tensors[name].copy_(placed_like(checkpoint.weights[names[name]], tensors[name]))


def write_network(checkpoint: Checkpoint, model: nn.Module, out: str | os.PathLike[str]) -> None:
    """Write the file again with the parameters of a pruned network, `write_pruned` with its zeros as the masks."""
    parameters = unwrap(model).named_parameters(remove_duplicate=False)
    names, _ = _stored_by_name(checkpoint, unwrap(model))
    moved = {names[name]: parameter.detach() for name, parameter in parameters if name in names}
    write_pruned(checkpoint, {name: weight != 0 for name, weight in moved.items()}, out, moved)


def write_pruned(
    checkpoint: Checkpoint,
    masks: Mapping[str, Tensor],
    out: str | os.PathLike[str],
    moved: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the file again with the masked weights at zero: same keys, same order, everything else untouched.

    Averages and other copies of the weights in the file are pruned by the same masks, a tied tensor under all its
    names. Masks are True where a weight stays; `moved` has those weights that have changed, by name. To a path that
    ends in `.safetensors` the weights alone are written, one by one. The checkpoint's own file may be the one written
    to.
    """
    out, weights = Path(out), checkpoint.weights
    if unknown := sorted(masks.keys() - weights.keys()):
        raise MatchError(f"the checkpoint has no weights {unknown[:4]} to prune; it has {list(weights)[:4]}, …")
    memory = identities(weights)
    masked: dict[tuple[object, ...], list[str]] = {}
    for name in masks:
        masked.setdefault(memory[name], []).append(name)

    def pruned(name: str, average: Tensor | None = None) -> Tensor:
        weight = (weights[name] if average is None else average).detach()
        if average is None and moved is not None and name in moved:
            weight = moved[name].to(weight)
        # A mask may be computed when it is accessed.
        for other in masked.get(memory[name], ()):
            if (mask := masks[other]).dtype != torch.bool or mask.shape != weight.shape:
                raise MatchError(f"the mask of {other!r} must be torch.bool of shape {tuple(weight.shape)}")
            # A product would keep NaN.
            weight = torch.where(mask.cpu(), weight, weight.new_zeros(()))
        return weight

    kind = format_of(checkpoint.path)
    if out.suffix == ".safetensors" and kind.name != "safetensors":
        with replacing(out) as temporary:
            write_tensors(temporary, outline_of(weights), pruned)
        return
    if kind.name == "safetensors" and out.suffix != ".safetensors":
        raise FileError(f"{checkpoint.path} is a safetensors file: give {out} that ending, too")
    if kind.rewrite is None:
        raise FileError(f"format {kind.name!r} cannot be written; choose a path that ends in .safetensors")
    places: dict[Keys, tuple[str, Tensor | None]] = {checkpoint.places[name]: (name, None) for name in weights}
    places |= {keys: (name, network.tensors[keys[-1]]) for keys, (network, name) in checkpoint.copies.items()}
    changed = {keys: place for keys, place in places.items() if memory[place[0]] in masked}
    with replacing(out) as temporary:
        kind.rewrite(checkpoint.path, changed.keys(), lambda keys: pruned(*changed[keys]), temporary)


def moments_apart(checkpoint: Checkpoint, match: Match) -> str | None:
    """How weights and state differ in age, in words with the remedy; None where nothing shows it.

    Two files are compared by the epochs and steps inside; the folder of a Hugging Face Trainer by its own count of
    steps and the optimiser's.
    """
    path, apart = checkpoint.path, []
    for word in ("epoch", "step"):
        weights, state = (getattr(record, word) for record in (checkpoint.weights_recorded, checkpoint.state_recorded))
        if weights is not None and state is not None and weights != state:
            apart.append(f"{path} says {word} {weights}, {checkpoint.optimizer_path} {word} {state}")
    counted, steps = checkpoint.recorded.step, origin_of(match).steps
    # A loss scaler's skipped steps are in the trainer's count and not in the optimiser's: at most 20, or 5 %.
    if counted is not None and steps is not None and (path / STATE).is_file():
        skipped = counted - steps[1]
        if not -1 < skipped <= max(20, 0.05 * counted):
            apart.append(f"{path / STATE} counts {counted} steps, the optimiser {steps[1]:g}")
    if not apart:
        return None
    return (
        f"the weights are of another moment of training than the optimiser's state: {apart[0]}. The second moment "
        "describes the network at its own step alone: pass the state that was saved with these weights"
    )
