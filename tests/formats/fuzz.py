"""Damaged and hostile files through `inspect`: none may crash, hang, import or call anything.

The corpus is a small file of every format, written here; each mutation flips bits, cuts, repeats or swaps pieces, puts
random opcodes into a pickle, or exchanges members of an archive. What fails is kept in the folder, with its number.
"""

from __future__ import annotations

import argparse
import io
import pickle
import random
import signal
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import nn

from bayesadam.errors import BayesAdamError
from bayesadam.inspecting import inspect
from bayesadam.weights.posterior import Posterior

SECONDS = 5.0
_WATCHED = ("import", "compile", "exec", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "webbrowser.")
# Looking at files is what reading them takes.
_ALLOWED = ("os.listdir", "os.scandir")


def corpus() -> dict[str, bytes]:
    """A small checkpoint in every format of one file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(a=1),
    }
    found = {f"zip-{protocol}.pt": saved(tree, protocol, True) for protocol in (2, 5)}
    found |= {f"legacy-{protocol}.pt": saved(tree, protocol, False) for protocol in (2, 4)}
    found |= {f"plain-{protocol}.pkl": pickle.dumps(tree, protocol) for protocol in range(6)}
    found["module.pt"] = saved({"model": model, "optimizer": optimizer.state_dict()})
    found["weights.safetensors"] = save(model.state_dict())
    members = {
        "policy.pth": saved(model.state_dict()),
        "policy.optimizer.pth": saved(optimizer.state_dict()),
    }
    found["sb3.zip"] = archive_of(members)
    found["packed.zip"] = archive_of(members, zipfile.ZIP_DEFLATED)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        Posterior.from_optimizer(model, optimizer, 10).save(path, compress="factored")
        found["posterior.safetensors"] = path.read_bytes()
    return found


def saved(value: Any, protocol: int = 2, zipped: bool = True) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def archive_of(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in nested dictionaries and lists something can be replaced."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def mutated(content: bytes, dice: random.Random) -> bytes:
    """The same file with some damage."""
    how = dice.choice(("bits", "bytes", "cut", "repeat", "swap", "opcodes", "pickle", "members", "lengths"))
    data = bytearray(content)
    if how in ("pickle", "members") and data.startswith(b"PK"):
        return _mutated_archive(content, how, dice)
    place = dice.randrange(len(data))
    if how == "cut":
        return bytes(data[:place])
    if how == "repeat":
        end = min(len(data), place + dice.randrange(1, 200))
        return bytes(data[:end] + data[place:end] * dice.randrange(1, 20) + data[end:])
    if how == "swap":
        one, other = sorted((place, dice.randrange(len(data))))
        return bytes(data[other:] + data[one:other] + data[:one])
    if how == "lengths":
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(max(1, len(data) - 8))
            data[at : at + 8] = dice.choice((b"\xff" * 8, b"\xff" * 4 + bytes(4), b"\x00\x00\x00\x00\x01\x00\x00\x00"))
        return bytes(data)
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        at = dice.randrange(len(data))
        bits = data[at] ^ (1 << dice.randrange(8))
        data[at] = {"bits": bits, "opcodes": _opcode(dice)}.get(how, dice.randrange(256))
    return bytes(data)


def _opcode(dice: random.Random) -> int:
    return dice.choice(
        pickle.REDUCE + pickle.BUILD + pickle.NEWOBJ + pickle.OBJ + b"icQP\x93\x92\x81\x94(}]tbRs.uae\x86\x87\x88h\x82"
    )


def _mutated_archive(content: bytes, how: str, dice: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    names = list(members)
    if how == "members":
        one, other = dice.choice(names), dice.choice(names)
        members[one], members[other] = members[other], members[one]
        if dice.random() < 0.3:
            del members[dice.choice(names)]
    else:
        name = next((n for n in names if n.endswith(("data.pkl", ".h5"))), names[0])
        held = members[name]
        members[name] = mutated(held, dice) if not held.startswith(b"PK") else held[: dice.randrange(len(held))]
        if name.endswith("data.pkl") and dice.random() < 0.3:
            hostile = (b"cposix\nsystem\nX\x04\x00\x00\x00true\x85R0", b"cbuiltins\neval\nX\x01\x00\x00\x001\x85R0")
            members[name] = held[:2] + dice.choice(hostile) + held[2:]
    return archive_of(members)


class Outcome(NamedTuple):
    """What became of one file."""

    number: int
    name: str
    what: str
    detail: str = ""


@contextmanager
def alarm() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


_listening: list[list[str]] = []


def _noted(event: str, arguments: tuple[Any, ...]) -> None:
    if _listening and event.startswith(_WATCHED) and event not in _ALLOWED:
        _listening[-1].append(f"{event} {arguments[:1]}")


@contextmanager
def audited() -> Iterator[list[str]]:
    """What is imported, compiled, started or changed on the machine meanwhile."""
    _listening.append([])
    try:
        yield _listening[-1]
    finally:
        _listening.pop()


# It cannot be removed.
sys.addaudithook(_noted)


def inspected(folder: Path, seed: int, numbers: range) -> Iterator[Outcome]:
    """The mutations of these numbers, each through `inspect`."""
    seeds = corpus()
    names = list(seeds)
    for name in names:
        # What torch brings in when it is first used is not the files' doing.
        (folder / name).write_bytes(seeds[name])
        _outcome(0, name, folder / name)
        (folder / name).unlink()
    for number in numbers:
        dice = random.Random(f"{seed}/{number}")
        name = dice.choice(names)
        path = folder / f"{number}-{name}"
        path.write_bytes(mutated(seeds[name], dice))
        yield (found := _outcome(number, name, path))
        if found.what in ("read", "refused"):
            path.unlink()


def _outcome(number: int, name: str, path: Path) -> Outcome:
    what, detail = "read", ""
    with audited() as events:
        try:
            with alarm():
                inspect(path)
        except BayesAdamError:
            what = "refused"
        except BaseException as error:
            what = "HANG" if isinstance(error, TimeoutError) else "CRASH"
            detail = "".join(traceback.format_exception(error))
    if events:
        what, detail = "CALLED", "; ".join(events[:3])
    return Outcome(number, name, what, detail)
