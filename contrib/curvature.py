"""Reads and checks published curvature, with numpy and safetensors alone.

Written from "The format" in docs/publish.md. As a command it checks a file, and that it belongs to the weights:

    python contrib/curvature.py posterior.safetensors [model.safetensors ...]

It prints what it found, or the first fault with what to do about it, and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

Array = NDArray[Any]
AnyPath = str | os.PathLike[str]
NEWEST = 2
STRUCTURES = ("diagonal", "kronecker")
BLOCK, PROBES = 512, 16
AGAIN = "download it again, or have it exported again"
# bfloat16 is the upper half of a float32.
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}
_FLOATS = ("F64", "F32", "F16", "BF16")
_WIDE, _ROUNDED = ("F64", "F32"), ("F64", "F32", "BF16")
_RANGE, _ROWS, _COLUMNS = "second_moment_range", "second_moment_rows", "second_moment_columns"
_ROLES = ("second_moment", _RANGE, _ROWS, _COLUMNS, "mode", "probe", "left", "right", "prior_precision")


class Fault(ValueError):
    """What is wrong with a file, and what to do."""

    def __init__(self, path: AnyPath, what: str, remedy: str = AGAIN) -> None:
        super().__init__(f"{path}: {what}: {remedy}")


class Tensors:
    """The tensors of a safetensors file by name, read from the disk when they are used."""

    def __init__(self, path: AnyPath) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise Fault(path, "there is no such file", "check the path")
        try:
            # Refuses what is cut short, overlaps or has sizes that do not fit.
            with safe_open(self.path, framework="np") as file:
                self.metadata: dict[str, str] = file.metadata() or {}
            with self.path.open("rb") as raw:
                length = int.from_bytes(raw.read(8), "little")
                self._entries: dict[str, Any] = json.loads(raw.read(length))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise Fault(path, f"truncated, or not a safetensors file ({error})") from None
        self._entries.pop("__metadata__", None)
        self._start = 8 + length

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, without reading it."""
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> str:
        """As safetensors names it."""
        return str(self._entries[name]["dtype"])

    def array(self, name: str) -> Array:
        """The values; 16 bits become float32."""
        shape, held = self.shape(name), _TYPES[self.dtype(name)]
        if not math.prod(shape):
            return np.zeros(shape, "<f4" if held == "<u2" else held)
        offset = self._start + self._entries[name]["data_offsets"][0]
        flat = np.memmap(self.path, held, "r", offset, (math.prod(shape),))
        return _widened(flat, self.dtype(name)).reshape(shape)

    def probe(self, name: str) -> Array | None:
        """At most 16 evenly spaced numbers, in float64; None of a type that is not read here."""
        if self.dtype(name) not in _FLOATS:
            return None
        size = math.prod(self.shape(name))
        if not size:
            return np.zeros(0)
        offset = self._start + self._entries[name]["data_offsets"][0]
        flat = np.memmap(self.path, _TYPES[self.dtype(name)], "r", offset, (size,))
        return _widened(flat[:: max(size // PROBES, 1)][:PROBES], self.dtype(name)).astype(np.float64)


def _widened(flat: Array, dtype: str) -> Array:
    if dtype == "BF16":
        return (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float32) if dtype == "F16" else np.array(flat)


class Curvature:
    """A published file: its header, checked with all names, shapes and types; values are read and checked by name.

    Attributes:
        names: the parameters.
        header: as it is in the file.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path, self.tensors = path, Tensors(path)
        self.header = _header(path, self.tensors.metadata)
        self.names: list[str] = self.header["parameters"]
        self.has_weights = self.header.get("has_weights", True)
        known = set(self.names)
        for key in self.tensors:
            role, _, name = key.partition(".")
            if role in _ROLES and name not in known:
                raise Fault(path, f"{key!r} belongs to none of the header's parameters")
        for name in self.names:
            self._check_names(name)

    def _fault(self, name: str, what: str) -> Fault:
        return Fault(self.path, f"damaged, {name!r}: {what}")

    def _has(self, role: str, name: str) -> bool:
        return f"{role}.{name}" in self.tensors

    def _array(self, role: str, name: str) -> Array:
        return self.tensors.array(f"{role}.{name}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        if self._has("second_moment", name):
            return self.tensors.shape(f"second_moment.{name}")
        rows, columns = (self.tensors.shape(f"{role}.{name}") for role in (_ROWS, _COLUMNS))
        return rows + columns

    def _check_names(self, name: str) -> None:
        """Which tensors a parameter has, their types and shapes."""
        roles = [role for role in _ROLES if self._has(role, name)]
        parts = [role for role in roles if role.startswith("second_moment")]
        compress = self.header.get("compress")
        allowed = {None: [["second_moment"]], "bfloat16": [["second_moment"]], "8bit": [["second_moment", _RANGE]]}
        allowed["factored"] = [["second_moment"], ["second_moment", _RANGE], [_ROWS, _COLUMNS]]
        if parts not in allowed[compress]:
            raise self._fault(name, f"with compress {compress!r} it cannot have {parts or 'no second moment'}")
        # Files up to 0.3 have bases in 16 bits.
        types: dict[str, tuple[str, ...]] = {"left": _ROUNDED, "right": _ROUNDED}
        types["second_moment"] = ("U8",) if _RANGE in parts else _ROUNDED
        for role in roles:
            kind = self.tensors.dtype(f"{role}.{name}")
            if kind not in types.get(role, _WIDE):
                raise self._fault(name, f"{role} is of type {kind}")
        shape = self.shape(name)
        if compress == "factored" and (len(shape) > 1) != (_ROWS in parts):
            raise self._fault(name, "matrices alone are factored, and all of them")
        size = math.prod(shape)
        first, rest = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, size)
        expected: dict[str, tuple[int, ...]] = {
            _RANGE: (-(-size // BLOCK), 2),
            _ROWS: shape[:1],
            _COLUMNS: shape[1:],
            "probe": (min(size, PROBES),),
            "left": (first, first),
            "right": (rest, rest),
        }
        for role in roles:
            found_shape = self.tensors.shape(f"{role}.{name}")
            if found_shape != expected.get(role, shape):
                raise self._fault(name, f"{role} has shape {found_shape} and not {expected.get(role, shape)}")
        wanted = "mode" if self.has_weights else "probe"
        if wanted not in roles:
            raise self._fault(name, f"{wanted} is missing")
        if self.header["structure"] == "diagonal" and ("left" in roles or "right" in roles):
            raise self._fault(name, "a diagonal structure has no bases")
        if name not in self.header["settings"]["prior_precision"] and "prior_precision" not in roles:
            raise self._fault(name, "its prior precision is missing")

    def check(self, name: str) -> float:
        """Check the values of a parameter; a bound on its v̂."""
        if self._has(_RANGE, name):
            low, high = self._array(_RANGE, name).astype(np.float64).T
            if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
                raise self._fault(name, "a range is not finite, or its ends are exchanged")
            with np.errstate(over="ignore"):
                largest = float(np.exp(high.max(initial=-np.inf)))
        elif self._has(_ROWS, name):
            largest = self._positive(_ROWS, name) * self._positive(_COLUMNS, name)
            if largest > float(np.finfo(self._array(_ROWS, name).dtype).max):
                raise self._fault(name, "the product of its rows and columns is not finite")
        else:
            largest = self._positive("second_moment", name)
        for role in ("mode", "probe"):
            if self._has(role, name) and not np.isfinite(self._array(role, name)).all():
                raise self._fault(name, f"{role} has entries that are not finite")
        if self._has("prior_precision", name):
            self._positive("prior_precision", name)
        for side in ("left", "right"):
            if self._has(side, name):
                self._basis(side, name)
        return largest

    def _positive(self, role: str, name: str) -> float:
        """The largest of numbers that must be finite and not negative."""
        values = self._array(role, name)
        if not np.isfinite(values).all():
            raise self._fault(name, f"{role} has entries that are not finite")
        if (values < 0).any():
            raise self._fault(name, f"{role} has negative entries")
        return float(values.max(initial=0.0))

    def _basis(self, side: str, name: str) -> Array:
        """An orthonormal basis, in float64; one that was rounded to 16 bits is made orthonormal again."""
        basis, identity = self._array(side, name).astype(np.float64), np.eye(self.tensors.shape(f"{side}.{name}")[0])
        if self.tensors.dtype(f"{side}.{name}") == "BF16":
            basis = basis @ (1.5 * identity - 0.5 * basis.T @ basis)
        if not (np.abs(basis.T @ basis - identity) < 1e-2).all():
            raise self._fault(name, f"{side} is not orthonormal")
        return basis

    def stored(self, name: str) -> Array:
        """v̂ as the file has it, decoded: of a rotated parameter in the coordinates of its bases."""
        self.check(name)
        if self._has(_RANGE, name):
            codes, ends = self._array("second_moment", name), self._array(_RANGE, name)
            low, high = np.repeat(ends, BLOCK, axis=0)[: codes.size].T.reshape(2, *codes.shape)
            with np.errstate(over="ignore"):
                values = np.exp(low + (codes.astype(ends.dtype) - 1) * ((high - low) / 254))
            return np.where(codes == 0, 0, np.minimum(values, np.finfo(ends.dtype).max)).astype(ends.dtype)
        if self._has(_ROWS, name):
            rows, columns = self._array(_ROWS, name), self._array(_COLUMNS, name)
            return np.multiply.outer(rows, columns)
        return self._array("second_moment", name)

    def moment(self, name: str) -> Array:
        """v̂ of every weight: what is stored, or Q_L² v̂ (Q_R²)ᵀ of a rotated parameter, squared entry by entry."""
        values = self.stored(name)
        if not (self._has("left", name) or self._has("right", name)):
            return values
        sides = (len(values), math.prod(values.shape[1:])) if values.ndim > 1 else (1, values.size)
        matrix = values.reshape(sides).astype(np.float64)
        if self._has("left", name):
            matrix = self._basis("left", name) ** 2 @ matrix
        if self._has("right", name):
            matrix = matrix @ (self._basis("right", name) ** 2).T
        return matrix.reshape(values.shape).astype(values.dtype)

    def probe(self, name: str) -> Array:
        """At most 16 of the weights that it belongs to, in float64."""
        found = self.tensors.probe(f"{'mode' if self.has_weights else 'probe'}.{name}")
        assert found is not None
        return found

    def check_weights(self, weights: Mapping[str, Array], source: str) -> None:
        """Refuse weights, flat samples as `probe` gives them, that are not those the file belongs to."""
        known = {name: self.probe(name) for name in weights}
        if any(known[name].shape != found.shape for name, found in weights.items()):
            raise Fault(self.path, f"{source} has parameters of other shapes", "give the weights published with it")
        change = sum(float(((found - known[name]) ** 2).sum()) for name, found in weights.items())
        size = sum(float((numbers**2).sum()) for numbers in known.values())
        if not math.sqrt(change) <= 0.1 * math.sqrt(size):
            raise Fault(self.path, f"it does not belong to {source}", "give the weights published with it")


def read(path: AnyPath) -> tuple[dict[str, Array], dict[str, Any]]:
    """v̂ of every weight by parameter name, and the header."""
    file = Curvature(path)
    return {name: file.moment(name) for name in file.names}, file.header


def check(path: AnyPath, weights: Sequence[AnyPath] = ()) -> list[str]:
    """Check all of a file, and that it belongs to the weights in other files; what was found, in lines."""
    file = Curvature(path)
    header, settings = file.header, file.header["settings"]
    largest = max((file.check(name) for name in file.names), default=0.0)
    total = sum(math.prod(file.shape(name)) for name in file.names)
    kept = f"kept as {header['compress']}" if header.get("compress") else "uncompressed"
    inside = "with weights" if file.has_weights else "without weights"
    batch = "not known" if settings.get("batch_size") is None else f"{settings['batch_size']:,}"
    lines = [
        f"{path}: format {header['format']}, written by bayesadam {header.get('version', 'of an unknown version')}",
        f"{header['structure']} curvature of {total:,} weights in {len(file.names):,} parameters, {kept}, {inside}",
        f"N = {settings['n_data']:,.10g}, B = {batch}, power {settings.get('power', 0.5):g}, v̂ up to {largest:.3g}",
        _origin(header),
    ]
    if header["structure"] == "kronecker":
        lines.append("v̂ is stored in eigenbases: read gives its diagonal in the coordinates of the weights")
    if header.get("omitted"):
        lines.append(f"{len(header['omitted']):,} parameters of the model are not in it: {_few(header['omitted'])}")
    lines += _warnings(header)
    if weights:
        lines.append(_compared(file, weights))
    return lines


def _compared(file: Curvature, weights: Sequence[AnyPath]) -> str:
    source, remedy = ", ".join(map(str, weights)), "give the weights published with it, all parts of them"
    found: dict[str, Array | None] = {}
    for tensors in map(Tensors, weights):
        for name in file.names:
            if name in tensors:
                if tensors.shape(name) != file.shape(name):
                    what = f"{name!r} has shape {file.shape(name)}, and {tensors.shape(name)} in {tensors.path}"
                    raise Fault(file.path, what, remedy)
                found[name] = tensors.probe(name)
    missing = [name for name in file.names if name not in found]
    if missing:
        raise Fault(file.path, f"{source} lacks {_few(missing)}", remedy)
    compared = {name: numbers for name, numbers in found.items() if numbers is not None}
    if not compared:
        return f"take care: the weights in {source} are of a type that is not compared here"
    file.check_weights(compared, source)
    return f"it belongs to the weights in {source}, by {sum(map(len, compared.values())):,} of them"


def _few(names: Iterable[str]) -> str:
    some = list(names)
    return ", ".join(some[:3]) + (", …" if len(some) > 3 else "")


def _origin(header: Mapping[str, Any]) -> str:
    said = list(header.get("optimizer") or ["an unknown optimiser"])
    if header.get("recorded"):
        said.append("recorded gradients")
    if header.get("tracked"):
        said.append("tracked beside it")
    if header.get("steps"):
        fewest, most = header["steps"][0], header["steps"][-1]
        said.append(f"{fewest:g} gradients" if fewest == most else f"{fewest:g} to {most:g} gradients")
    if header.get("beta2") is not None:
        said.append(f"β₂ = {header['beta2']:g}")
    return "from " + ", ".join(said)


def _warnings(header: Mapping[str, Any]) -> list[str]:
    beta, steps = header.get("beta2"), header.get("steps")
    lines = []
    if beta is not None and beta <= 0.95:
        lines.append(f"take care: v̂ is that of the last {1 / (1 - beta):.0f} gradients")
    if beta is not None and steps and steps[0] * (1 - beta) < 1 - 1e-9:
        lines.append("take care: v̂ has fewer gradients behind it than its memory, 1/(1 − β₂)")
    return lines


def _header(path: AnyPath, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The header, of types and ranges as the format says."""
    if "bayesadam" not in metadata:
        what = "it has no header under 'bayesadam', and is not published curvature"
        raise Fault(path, what, "write one with `bayesadam export`")
    try:
        header = json.loads(metadata["bayesadam"])
    except (ValueError, RecursionError) as error:
        raise Fault(path, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise Fault(path, "its header is not a JSON object")
    version = header.get("format")
    if type(version) is not int or version < 1:
        raise Fault(path, f"its header has no format version ({version!r})")
    if version > NEWEST:
        raise Fault(path, f"it is of format {version}, and this reads up to {NEWEST}", "get a newer curvature.py")
    structure = header.get("structure")
    if structure not in STRUCTURES:
        what = f"structure {structure!r} has no second moment for every weight"
        raise Fault(path, what, "read it with bayesadam, or export a diagonal one")
    for what, is_right in _rules(header):
        if not is_right:
            raise Fault(path, f"its header is damaged: {what}")
    if version == 1 and (header.get("compress") or not header.get("has_weights", True)):
        raise Fault(path, "its header is damaged: format 1 has weights and no compression")
    return header


def _rules(header: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """What must be so, one after another: a later rule may rely on an earlier one."""
    names, settings = header.get("parameters"), header.get("settings")
    yield "parameters must be a list of names", isinstance(names, list) and all(isinstance(n, str) for n in names)
    assert isinstance(names, list)
    yield "parameters must be there, each once", 0 < len(names) == len(set(names))
    yield "settings must be an object", isinstance(settings, dict)
    assert isinstance(settings, dict)
    for key in ("n_data", "power", "scale"):
        yield f"{key} must be a positive number", _number(settings.get(key, None if key == "n_data" else 1.0)) > 0
    batch = settings.get("batch_size")
    yield "batch_size must be a positive number or null", batch is None or _number(batch) > 0
    yield "form must be 'map' or 'likelihood'", settings.get("form", "map") in ("map", "likelihood")
    prior = settings.get("prior_precision")
    yield "prior_precision must be an object of names", isinstance(prior, dict) and set(prior) <= set(names)
    assert isinstance(prior, dict)
    yield "prior_precision must have numbers, none negative", all(_number(delta) >= 0 for delta in prior.values())
    compress, steps, beta = header.get("compress"), header.get("steps"), header.get("beta2")
    forms = (None, "bfloat16", "8bit", "factored")
    yield "compress must be 'bfloat16', '8bit' or 'factored', or absent", compress in forms
    yield "has_weights must be true or false", isinstance(header.get("has_weights", True), bool)
    counts = steps is None or (isinstance(steps, list) and 0 < len(steps) <= 2 and all(_number(s) >= 0 for s in steps))
    yield "steps must be the fewest and the most, or null", counts
    yield "beta2 must be between 0 and 1, or null", beta is None or 0 <= _number(beta) < 1
    yield "recorded must be true or false", isinstance(header.get("recorded", False), bool)
    # An object before 0.4.
    yield "tracked must be a text", isinstance(header.get("tracked") or {}, dict | str)
    optimizers = header.get("optimizer") or []
    yield "optimizer must be a list of names", isinstance(optimizers, list) and all(map(_is_text, optimizers))
    omitted = header.get("omitted", {})
    yield "omitted must be an object of texts", isinstance(omitted, dict) and all(map(_is_text, omitted.values()))


def _number(value: object) -> float:
    """A finite number, or NaN, with which no comparison holds."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    return math.nan


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Check a file of published curvature.")
    parser.add_argument("posterior", help="posterior.safetensors")
    parser.add_argument("weights", nargs="*", help="the weights published with it, all parts")
    given = parser.parse_args(arguments)
    try:
        print("\n".join(check(given.posterior, given.weights)))
    except Fault as fault:
        print(fault, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
