"""Damage to the library's own files, through whatever loads them.

A file that was damaged after it was written is refused with an error of the library, or loads with every value as it
was saved. A file of an earlier release has no sums to tell damage by: what loads of it must do all that is asked of it.
"""

from __future__ import annotations

import copy
import json
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.bandits import Agent, make_agent
from bayesadam.errors import BayesAdamError
from bayesadam.inspecting import diagnose_checkpoint, inspect
from formats import fuzz
from formats.fuzz import Outcome, alarm
from formats.same import same

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 10**12, 10**400, 1e308, -1e308, 0.5, float("nan"), float("inf")),
    *("", "x", "0.weight", [], {}, [[]], [None], ["x"], [1, 2], {"a": 1}, {"0.weight": None}, [[1.0, 2.0]] * 3),
)
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "C64", "F8_E4M3", "F4")


class Kind(NamedTuple):
    """A kind of file: its bytes, and all that a loaded one says, as plain values and tensors."""

    content: bytes
    said: Callable[[Path], Any]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def trained() -> tuple[nn.Module, ba.Posterior]:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        x = torch.randn(16, 3)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x.argmax(dim=1)).backward()
        optimizer.step()
    return model, ba.Posterior.from_optimizer(model, optimizer, 480, batch_size=16, likelihood="classification")


def kinds(folder: Path) -> dict[str, Kind]:
    """A small file of every kind."""
    model, q = trained()
    x = torch.randn(200, 3)
    files: dict[str, Callable[[Path], Any]] = {}

    def add(name: str, save: Callable[[Path], object], said: Callable[[Path], Any]) -> None:
        save(folder / f"{name}.safetensors")
        files[name] = said

    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stepwise = {"0.weight": torch.rand(4, 3), "0.bias": 0.5, "2.weight": 3.0, "2.bias": 1.0}
    add("diagonal", q.replace(prior_precision=stepwise).save, _posterior)
    add("inputs", q.with_inputs(x).save, _posterior)
    add("factored", lambda path: q.save(path, compress="factored"), _posterior)
    add("published", lambda path: q.save(path, weights=False), lambda path: _posterior(path, weights))
    regression = q.replace(likelihood="regression", noise_variance=[0.1, 0.2, 0.3])
    add("regression", regression.save, _posterior)
    add("mixture", ba.Mixture([q, regression.replace(likelihood="classification")], [0.3, 0.7]).save, _mixture)
    net = ba.calibrate(q, (x, x.argmax(dim=1)), risk=0.3)
    add("calibrated", net.save, _calibrated)
    numbers = ba.calibrate(regression, (x, x + 0.1 * torch.randn(200, 3)))
    add("numbers", numbers.save, _calibrated)
    pruned = ba.prune(q, 0.5, inputs=x, rounds=1)
    add("packed", ba.compress.quantise(pruned, 3, inputs=x).save, _packed)
    monitor = ba.Monitor(reference=np.arange(40.0), alarm=0.05)
    monitor.update(np.arange(20.0))
    add("monitor", monitor.save, _monitor)
    for name, settings in (("hybrid", {"hidden": (4,), "train_steps": 3}), ("linear", {})):
        agent = make_agent(name, n_features=2, n_arms=3, **settings)
        for step in range(14):
            agent.reward(agent.decide([0.1 * step, 1.0]).id, float(step % 3))
        agent.decide([0.5, 0.5])
        add(name, agent.save, _agent)
    return {name: Kind((folder / f"{name}.safetensors").read_bytes(), said) for name, said in files.items()}


def _gaussian(q: ba.GaussianWeights) -> list[Any]:
    draw = q.sample(generator=torch.Generator().manual_seed(1)) if q.has_weights else {}
    mode = {name: theta.clone() for name, theta in q.mode.items()}
    return [mode, q.variance, draw, repr(q.settings), repr(q.origin), dict(q.omitted), repr(q)]


def _posterior(path: Path, weights: dict[str, Tensor] | None = None) -> Any:
    model = network()
    if weights is not None:
        model.load_state_dict(weights)
    q = ba.Posterior.load(path, model)

    said = [*_gaussian(q), str(q), q.likelihood, q.noise_variance, q.temperature, dict(model.state_dict())]
    said += [q.predict(torch.ones(2, 3)).f_variance if q.likelihood else None]
    opened = ba.GaussianWeights.open(path)
    said += [_gaussian(opened), str(inspect(path)), str(diagnose_checkpoint(path))]
    return said


def _mixture(path: Path) -> Any:
    mixture = ba.Mixture.load(path, network())
    return [mixture.weights, repr(mixture), *(_gaussian(member) for member in mixture)]


def _calibrated(path: Path) -> Any:
    net = ba.load(path, network())
    answer = net(torch.tensor([[0.1, 0.2, 0.3], [9.0, 9.0, 9.0]]))
    return [list(answer), repr(net), str(net.report), repr(net.fit), dict(net.model.state_dict())]


def _packed(path: Path) -> Any:
    net = ba.load(path, network())
    return [dict(net.state_dict()), net(torch.ones(2, 3))]


def _monitor(path: Path) -> Any:
    monitor = ba.Monitor.load(path)
    said = [str(monitor), monitor.alarmed_at, monitor.direction]
    return [*said, monitor.update(np.arange(100.0)), monitor.p_values, str(monitor)]


def _agent(path: Path) -> Any:
    agent = Agent.load(path)
    said = [repr(agent.settings), agent.seed, agent.training, agent.n_arms, list(agent.pending)]
    said += [[agent.act([0.2, 0.1 * step]) for step in range(3)], agent.decide([0.5, 0.1]).probability]
    for number in list(agent.pending)[:2]:
        agent.reward(number, 0.5)
    agent.update(np.ones((30, 2)), np.zeros(30, int), np.ones(30))
    agent.wait()
    return [*said, agent.probabilities([[0.3, 0.3]])]


# --- damage ---------------------------------------------------------------------------------------------------------


def parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its data."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def joined(header: dict[str, Any] | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def unsealed(content: bytes) -> bytes:
    """The file as an earlier release would have written it, without sums."""
    header, data = parts(content)
    metadata = header["__metadata__"]
    metadata.pop("crc32", None)
    for key in metadata:
        about = json.loads(metadata[key])
        about.pop("sums", None)
        metadata[key] = json.dumps(about)
    return joined(header, data)


def _changed(tree: Any, dice: random.Random) -> Any:
    """JSON with a value replaced, removed or swapped with another."""
    tree = copy.deepcopy(tree)
    # Shallow ones as often as deep ones.
    depths: dict[int, list[tuple[Any, ...]]] = {}
    for place in fuzz.places(tree):
        depths.setdefault(len(place), []).append(place)
    (*way, last), (*other, end) = (dice.choice(depths[dice.choice(list(depths))]) for _ in range(2))
    at, there = tree, tree
    for key in way:
        at = at[key]
    for key in other:
        there = there[key]
    how = dice.choice(("replace", "replace", "replace", "remove", "swap", "scale"))
    if how == "remove":
        del at[last]
    elif how == "swap":
        at[last], there[end] = copy.deepcopy(there[end]), copy.deepcopy(at[last])
    elif how == "scale" and isinstance(at[last], int | float):
        at[last] *= dice.choice((2, 10, 0.5, -1))
    else:
        at[last] = copy.deepcopy(dice.choice(HOSTILE))
    return tree


def mutated(content: bytes, dice: random.Random) -> bytes:
    """The same file with some damage."""
    how = dice.choice((*["bytes"] * 5, *["about"] * 3, *["tensors"] * 2, "text"))
    if how == "bytes":
        return fuzz.mutated(content, dice)
    header, rest = parts(content)
    if how == "tensors":
        return _other_tensors(header, rest, dice)
    key = next(key for key in header["__metadata__"] if key != "crc32")
    if how == "text":
        hostile = ("", "null", "[]", "[" * 100_000, '{"format":1}', "1", '"x"', "{", '{"format":1e400}', "NaN")
        header["__metadata__"][key] = dice.choice(hostile)
        return joined(header, rest)
    about = _changed(json.loads(header["__metadata__"][key]), dice)
    header["__metadata__"][key] = json.dumps(about)
    return joined(header, rest)


def _other_tensors(header: dict[str, Any], data: bytes, dice: random.Random) -> bytes:
    """Tensors of other shapes, types and names, or exchanged, repeated, emptied and left out."""
    names = [name for name in header if name != "__metadata__"]
    one, other = dice.choice(names), dice.choice(names)
    how = dice.choice(("dtype", "shape", "swap", "exchange", "rename", "remove", "twice", "huge", "empty", "nan"))
    entry, shape = header[one], header[one]["shape"]
    start, end = entry["data_offsets"]
    if how == "dtype":
        entry["dtype"] = dice.choice(DTYPES)
    elif how == "shape":
        size = int(np.prod(shape))
        entry["shape"] = dice.choice(([size], shape[::-1], [1, *shape], [*shape, 1], [1] * 70 + shape))
    elif how == "swap":
        header[one], header[other] = header[other], header[one]
    elif how == "exchange":
        entry["data_offsets"], header[other]["data_offsets"] = header[other]["data_offsets"], entry["data_offsets"]
    elif how == "rename":
        header[dice.choice((one + "x", other, "", "x" * 10_000))] = header.pop(one)
    elif how == "remove":
        del header[one]
    elif how == "twice":
        text = json.dumps(header)
        return joined(f"{text[:-1]}, {json.dumps(one)}: {json.dumps(header[other])}}}", data)
    elif how == "huge":
        entry["shape"] = dice.choice(([10**12], [10**6, 10**6], [2**63], [2**64 - 1, 2], [-1]))
    elif how == "empty":
        # The tensors after it move up.
        for name in names:
            at = header[name]["data_offsets"]
            header[name]["data_offsets"] = [offset - (end - start) * (offset >= end) for offset in at]
        entry |= {"shape": dice.choice(([0], [0, *shape[1:]], [*shape[:-1], 0])), "data_offsets": [start, start]}
        data = data[:start] + data[end:]
    else:
        data = (
            data[:start]
            + np.full((end - start + 3) // 4, dice.choice((np.nan, np.inf, -1, 1e30)), "f4").tobytes()[: end - start]
            + data[end:]
        )
    return joined(header, data)


# --- outcomes -------------------------------------------------------------------------------------------------------


def outcomes(folder: Path, seed: int, numbers: range) -> Iterator[Outcome]:
    """The damage of these numbers; every other file is one of an earlier release."""
    files = kinds(folder)
    whole = {}
    for name, kind in files.items():
        (folder / "whole.safetensors").write_bytes(kind.content)
        whole[name] = _said(kind, folder / "whole.safetensors")
    names = list(files)
    path = folder / "whole.safetensors"
    for number in numbers:
        dice = random.Random(f"{seed}/{number}")
        name, is_old = names[number // 2 % len(names)], bool(number % 2)
        kind = files[name]
        path.write_bytes(mutated(unsealed(kind.content) if is_old else kind.content, dice))
        what, detail = "loaded", ""
        try:
            with alarm():
                said = _said(kind, path)
            if not is_old and not same(said, whole[name]):
                what = "WRONG"
        except BayesAdamError as error:
            what, detail = "refused", str(error)
        except BaseException as error:
            what, detail = "CRASH", "".join(traceback.format_exception(error))
        yield Outcome(number, f"{name}{' of before' * is_old}", what, detail)


def _said(kind: Kind, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind.said(path)
