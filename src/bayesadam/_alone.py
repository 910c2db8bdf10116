"""One thread at a time with a model whose weights, buffers, hooks or modes are not its own for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from bayesadam.errors import MatchError

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_adding = Lock()


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile, DataParallel and DistributedDataParallel, with its own names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def listed_optimizers(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """One optimiser or several as a list, each without a trainer's wrapper."""
    listed: list[Optimizer] = []
    several: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in several:
        if not hasattr(optimizer, "param_groups"):
            kind = type(optimizer).__name__
            raise MatchError(f"expected a torch optimiser, got {kind}; for a saved state use Posterior.from_state_dict")
        # Accelerate and Lightning keep it in `.optimizer`.
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        listed.append(optimizer)
    if not listed:
        raise MatchError("no optimiser was given: the list is empty")
    return listed


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`, with a dot after each name, in a fifth of the time."""
    waiting, seen = [("", model)], set()
    while waiting:
        prefix, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield prefix, module
            waiting += [(f"{prefix}{key}.", m) for key, m in reversed(module._modules.items()) if m is not None]


@contextmanager
def alone_with(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread is with the model, and keep them waiting; the same thread may come in again."""
    lock = _locks.get(model) or _lock_of(unwrap(model))
    with lock:
        yield


def _lock_of(model: nn.Module) -> Any:
    lock = _locks.get(model)
    if lock is None:
        with _adding:
            lock = _locks.setdefault(model, RLock())
    return lock


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Alone with the model, which is in evaluation mode, and its modules; each is in its own mode again afterwards."""
    with alone_with(model):
        modules = [module for _, module in named_modules(model)]
        training = [module for module in modules if module.training]
        try:
            if training:
                model.eval()
            yield modules
        finally:
            for module in training:
                module.training = True
