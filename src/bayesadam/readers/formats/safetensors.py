"""Safetensors files: weights alone, or a saved posterior as a checkpoint; and how pruned weights are written."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesadam._files import damage_named
from bayesadam._storage import is_of_kind, map_tensors, read_mapped, write_tensors
from bayesadam.errors import FileError
from bayesadam.readers.compression import PROBE_KEY, moment, moment_shape, probe, widened
from bayesadam.readers.curvature import RECORDED_MARK, Origin
from bayesadam.readers.formats.contents import Contents, Keys, Network, Recorded
from bayesadam.readers.formats.lazy import Lazy, meta, outline_of, renamed
from bayesadam.readers.formats.registry import Format, states_beside
from bayesadam.readers.rotated import BETA_KEY, LEFT_KEY, MOMENT_KEY, RIGHT_KEY, SAVED_MARK

_ROLE = "second_moment"
_SIDES = {LEFT_KEY: "left", RIGHT_KEY: "right"}


def _is_safetensors(path: Path, head: bytes) -> bool:
    """Eight bytes of length, then JSON."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 100_000_000


def _read(path: Path) -> Contents:
    weights, _ = map_tensors(path)
    # The file is sorted: the order of the model's modules is lost.
    networks = [Network((), weights, ordered=False)] if weights else []
    return Contents(networks, {}, f"{len(weights)} tensors in a safetensors file", beside=states_beside(path))


def _rewrite(source: Path, positions: Collection[Keys], weights: Callable[[Keys], Tensor], target: Path) -> None:
    old, metadata = map_tensors(source)
    if ours := [key for key in metadata if key.startswith("bayesadam")]:
        raise FileError(
            f"{source} has what {ours[0]} found of its weights as they are: prune the checkpoint they are from instead"
        )
    write_tensors(target, old, lambda name: weights((name,)) if (name,) in positions else old[name], lambda _: metadata)


def _read_posterior(path: Path) -> Contents:
    """The posterior's second moments as an optimiser's state, its mode as the weights."""
    tensors, header = read_mapped(path)
    kind, has_weights = header.get("structure"), header.get("has_weights", True)
    if kind not in ("diagonal", "kronecker"):
        loader = "Mixture.load" if kind == "mixture" else "Posterior.load"
        raise FileError(f"{path} holds a {kind} posterior, without second moments of weights: read it with {loader}")
    groups: dict[float, list[str]] = {}
    with damage_named(path, "Posterior.save"):
        names, settings, origin = header["parameters"], header["settings"], Origin.of_header(header)
        n_data, prior = settings["n_data"], settings["prior_precision"]
        for name in names:
            if name not in prior:
                raise FileError(f"{path} has a prior precision for each weight of {name!r}: use Posterior.load")
            groups.setdefault(prior[name] / n_data, []).append(name)
        states = {name: _state(path, tensors, name, origin.fewest) for name in names}
        weights = renamed(tensors, {name: f"mode.{name}" for name in names if has_weights})
        last = (header.get("steps") or [None])[-1]
    # An average without memory has β = 0.
    marks = {SAVED_MARK: True, BETA_KEY: origin.beta or 0.0, **({RECORDED_MARK: True} if origin.recorded else {})}
    summary = f"the posterior of {len(names)} parameters"
    if not has_weights:
        summary += " without weights: give the file with the weights, and this one beside it or as optimizer_path="
    origins = [*origin.optimizers, *([f"kept as {header['compress']}"] if header.get("compress") else [])]
    param_groups = [{"params": members, "weight_decay": decay, **marks} for decay, members in groups.items()]
    return Contents(
        networks=[Network((), weights, ordered=False)] if has_weights else [],
        states={(): {"state": states, "param_groups": param_groups}},
        summary=summary,
        recorded=Recorded(step=last, n_data=n_data, batch_size=settings.get("batch_size")),
        notes=("the second moments are a saved posterior's" + (f" ({', '.join(origins)})" if origins else ""),),
    )


def _state(path: Path, tensors: Mapping[str, Tensor], name: str, steps: float | None) -> Lazy:
    """The state of one parameter, decoded when it is accessed, and a few of the weights that it belongs to."""
    there = outline_of(tensors)
    bases = {key: stored for key, side in _SIDES.items() if (stored := f"{side}.{name}") in there}
    shape = moment_shape(there, f"{_ROLE}.{name}")
    outline: dict[str, Any] = {MOMENT_KEY: meta(tuple(shape), torch.float32), PROBE_KEY: meta((), torch.float32)}
    outline |= {key: there[stored] for key, stored in bases.items()} | ({} if steps is None else {"step": steps})

    def read(wanted: str) -> Tensor:
        if wanted == PROBE_KEY:
            return tensors[f"probe.{name}"] if f"probe.{name}" in there else probe(tensors[f"mode.{name}"])
        if wanted == MOMENT_KEY:
            return moment(tensors, f"{_ROLE}.{name}", str(path))
        return widened(bases[wanted], tensors[bases[wanted]])

    return Lazy(outline, read)


SAFETENSORS = Format("safetensors", _is_safetensors, _read, _rewrite)
POSTERIOR = Format("posterior", lambda path, head: _is_safetensors(path, head) and is_of_kind(path), _read_posterior)
