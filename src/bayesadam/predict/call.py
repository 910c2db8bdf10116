"""Batches of any kind, and the user's model called on them as a pure function of named parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from bayesadam._alone import alone_with, in_eval_mode, named_modules
from bayesadam.errors import MatchError

Forward = Callable[[nn.Module, Any], Any]
# Names under which a batch holds its targets: first those that a model's own loss takes.
_OWN_LABELS = ("labels", "label", "label_ids")
_LABELS = (*_OWN_LABELS, "targets", "target", "y")


# --- the model ------------------------------------------------------------------------------------------------------


@contextmanager
def _holding(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other tensors for the parameters they name, wherever those are used, and copies of its buffers.

    They are taken in the types and on the devices of the parameters, and may have a copy for each example. Buffers of
    torch's own layers are only read in evaluation mode, and not copied.
    """
    modules = list(named_modules(model))
    own: dict[int, Tensor] = {}
    found = set()
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            tensor = params.get(prefix + key)
            if tensor is not None and parameter is not None and _may_replace(tensor.shape, parameter.shape):
                own[id(parameter)] = tensor.to(parameter.device, parameter.dtype)
                found.add(prefix + key)
    if len(found) < len(params):
        name, shape = next((name, tuple(tensor.shape)) for name, tensor in params.items() if name not in found)
        raise MatchError(f"the model no longer has a parameter {name!r} of shape {shape}")
    held: list[tuple[dict[str, Any], str, Any]] = []
    for _, module in modules:
        held += [(module._parameters, k, p) for k, p in module._parameters.items() if id(p) in own]
        if module.training or not type(module).__module__.startswith("torch.nn."):
            held += [(module._buffers, k, b) for k, b in module._buffers.items() if b is not None]
    try:
        for where, key, tensor in held:
            where[key] = own[id(tensor)] if id(tensor) in own else tensor.clone()
        yield
    finally:
        for where, key, tensor in held:
            where[key] = tensor


def _may_replace(shape: torch.Size, own: torch.Size) -> bool:
    """Whether a tensor may stand for a parameter: of its shape, or a copy of it for each example."""
    return shape == own or shape[1:] == own or (own[:1] == (1,) and shape[1:] == own[1:])


@dataclass(frozen=True)
class Call:
    """f(θ, inputs) → (batch, ...) of one model; tensors are passed alone, tuples as arguments, mappings as keywords.

    Attributes:
        forward: `forward(model, inputs)` for models whose call is unusual; its first tensor or `.logits` is taken.
        at: None for all positions. Else inputs are pairs (inputs, position) and outputs are those of one position of
            each example, (batch, outputs): `""` takes them from the model's output, a name cuts that layer's input.
    """

    model: nn.Module
    forward: Forward | None = None
    at: str | None = None

    def __call__(self, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """The model's output, (batch, ...), with `params` for the parameters they name."""
        return output_tensor(self.returned(params, inputs))

    def returned(self, params: Mapping[str, Tensor], inputs: Any) -> Any:
        """All that the model returns, whatever it is."""
        with _holding(self.model, params):
            return self.run(inputs)

    def flat(self, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """The output as (batch, outputs)."""
        output = self(params, inputs)
        return output.reshape(output.shape[0], -1)

    def run(self, inputs: Any) -> Any:
        """What the model returns with the weights that it has."""
        if self.at is None:
            if self.forward is not None:
                return self.forward(self.model, inputs)
            if isinstance(inputs, dict):
                return self.model(**inputs)
            return self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs)
        (inputs, position), whole = inputs, replace(self, at=None)
        if not self.at:
            return at_positions(output_tensor(whole.run(inputs)), position)

        def cut(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return at_positions(given[0], position), *given[1:]

        handle = self.model.get_submodule(self.at).register_forward_pre_hook(cut)
        try:
            return whole.run(inputs)
        finally:
            handle.remove()


def at_positions(outputs: Tensor, position: Tensor) -> Tensor:
    """(batch, positions…, outputs) at one position each, (batch,), counted over all dimensions of positions."""
    flat = outputs.flatten(1, -2)
    return flat[torch.arange(len(flat), device=flat.device), position.to(flat.device)]


def output_tensor(output: Any) -> Tensor:
    """The tensor in what a model returned: itself, `.logits`, `["logits"]`, or the first of a tuple."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() == 0:
        what = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise MatchError(
            f"the model returned {what}, not a tensor of real outputs with a row for each example: pass "
            "forward=lambda model, batch: ... that returns them, (batch, ...)"
        )
    return output


class _Shared:
    """A setting of the whole process: made as the first thread enters, undone as the last one leaves."""

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self.setting = setting
        self.guard = RLock()
        self.users = 0
        self.undo = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.guard:
            if self.users == 0:
                self.undo.enter_context(self.setting())
            self.users += 1
        try:
            yield
        finally:
            with self.guard:
                self.users -= 1
                if self.users == 0:
                    self.undo.close()


@contextmanager
def _attention_by_layers() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _tensor_cores() -> Iterator[None]:
    settings: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [setting.allow_tf32 for setting in settings]
    try:
        for setting in settings:
            setting.allow_tf32 = True
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.allow_tf32 = value


_by_layers = _Shared(_attention_by_layers)
_in_plain_mathematics = _Shared(lambda: sdpa_kernel(SDPBackend.MATH))
_in_tf32 = _Shared(_tensor_cores)
_uncompiled = _Shared(lambda: torch.compiler.set_stance("force_eager"))


def in_tf32(like: Tensor) -> AbstractContextManager[None]:
    """On CUDA, float32 products with ten bits of mantissa: for variances, whose error stays below a thousandth."""
    return _in_tf32() if like.is_cuda else nullcontext()


@contextmanager
def evaluating(model: nn.Module, *, differentiable: bool = True) -> Iterator[None]:
    """Eval mode, and attention in plain mathematics, which every kind of differentiation supports; restored after.

    Within, gradients can be taken even where the caller is in inference mode, compiled models run eagerly, since they
    would be compiled anew for every hook, and other threads that use the same model wait.
    """
    with in_eval_mode(model) as modules:
        compiled = any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in modules)
        eager = _uncompiled() if compiled else nullcontext()
        plainly = _in_plain_mathematics() if differentiable else nullcontext()
        with _by_layers(), plainly, eager, torch.inference_mode(False):
            yield


# --- batches --------------------------------------------------------------------------------------------------------


def plain(inputs: Any, *, graph: bool = False) -> Any:
    """A batch that can be cut and joined: mappings as dicts, no inference tensors, no graph unless asked for."""
    graph = graph and torch.is_grad_enabled()

    def differentiable(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with torch.inference_mode(False):
            return leaf.clone() if leaf.is_inference() else leaf if graph else leaf.detach()

    return pytree.tree_map(differentiable, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def has_graph(inputs: Any) -> bool:
    """Whether gradients with respect to the inputs are wanted: they require them, and gradients are recorded."""
    leaves = pytree.tree_leaves(inputs) if torch.is_grad_enabled() else ()
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def batch_size(inputs: Any) -> int:
    """The number of examples: the length of the first tensor."""
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            if leaf.shape[0] == 0:
                raise MatchError("the batch is empty: it has no examples")
            return leaf.shape[0]
    raise MatchError(
        f"no tensor with a batch dimension in the inputs ({type(inputs).__name__}): pass a tensor or an array"
    )


def is_batched(leaf: Any, size: int) -> bool:
    """Whether a leaf of the inputs has one entry per example."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size


def _map_examples(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    size = batch_size(inputs)
    return pytree.tree_map(lambda leaf: change(leaf) if is_batched(leaf, size) else leaf, inputs)


def examples(inputs: Any, start: int, stop: int) -> Any:
    """Examples `start` to `stop` of a batch of tensors, tuples or dicts."""
    return _map_examples(inputs, lambda leaf: leaf[start:stop])


def chosen_examples(inputs: Any, rows: Tensor) -> Any:
    """Some examples of a batch, by index."""
    return _map_examples(inputs, lambda leaf: leaf[rows.to(leaf.device)])


def repeated(inputs: Any, times: int) -> Any:
    """The batch, `times` over."""
    return _map_examples(inputs, lambda leaf: torch.cat([leaf] * times))


def to_device(inputs: Any, device: torch.device) -> Any:
    """The batch on another device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)


class Batch(NamedTuple):
    """Inputs, their targets, and whether these are a model's own labels, out of a mapping with its inputs."""

    inputs: Any
    targets: Tensor
    own: bool


def is_loader(inputs: Any) -> TypeGuard[Iterable[Any]]:
    """Whether it gives batches and is not one: an iterable, but no tensor, array, tuple, mapping or list of tensors.

    >>> is_loader([(torch.zeros(2, 3), torch.zeros(2))]), is_loader([torch.zeros(2, 3), torch.zeros(2)])
    (True, False)
    """
    if isinstance(inputs, list):
        return bool(inputs) and all(
            isinstance(entry, tuple | list | Mapping) and any(map(_is_data, pytree.tree_leaves(entry)))
            for entry in inputs
        )
    return isinstance(inputs, Iterable) and not isinstance(inputs, tuple | Mapping | str) and not _is_data(inputs)


def batches_of(batches: Any, model: nn.Module) -> Iterator[Batch]:
    """What a loader of tuples or mappings gives, or a single one of these; arrays become tensors, as in `for_model`."""
    pair = isinstance(batches, tuple | list) and len(batches) == 2 and _is_data(batches[1])
    if pair or isinstance(batches, Mapping):
        batches = [batches]
    if not isinstance(batches, Iterable):
        raise MatchError(f"batches must be a loader of (inputs, targets), got {type(batches).__name__}")
    for batch in batches:
        inputs, y, own = _split(batch)
        if y is None:
            keys = f" with keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else ""
            what = f"{type(batch).__name__}{keys}"
            raise MatchError(f"a batch must be (inputs, targets), or a mapping with one of {_LABELS}, got {what}")
        y = _tensor(y) if _is_array(y) else y
        if not isinstance(y, Tensor) or y.dim() == 0:
            raise MatchError(
                f"the targets of a batch must be a tensor with a row for each example, got {type(y).__name__}: "
                "collate the examples first; a single one is (x[None], y[None])"
            )
        yield Batch(for_model(inputs, model), y, own)


def inputs_of(batch: Any, model: nn.Module) -> Any:
    """The inputs of a loader's batch, without the targets that `batches_of` would find in it, on the model's device."""
    return to_device(for_model(_split(batch)[0], model), _like(model).device)


def for_model(inputs: Any, model: nn.Module, *, graph: bool = False) -> Any:
    """A batch with arrays, numpy's and others', as tensors on the model's device, real numbers in its floating type."""
    inputs = plain(inputs, graph=graph)
    if not any(map(_is_array, pytree.tree_leaves(inputs))):
        return inputs
    like = _like(model)
    return pytree.tree_map(lambda leaf: _tensor(leaf, like) if _is_array(leaf) else leaf, inputs)


def _split(batch: Any) -> tuple[Any, Any, bool]:
    """Inputs, targets, those under a label's name or else the last, and whether they are the model's own labels."""
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Mapping):
        key = next((key for key in _LABELS if key in batch), None)
        return {k: v for k, v in batch.items() if k != key}, None if key is None else batch[key], key in _OWN_LABELS
    if not isinstance(batch, tuple | list):
        return batch, None, False
    if len(batch) < 2:
        return batch[0] if batch else batch, None, False
    names = getattr(batch, "_fields", ())
    last = next((names.index(key) for key in _LABELS if key in names), len(batch) - 1)
    others = (*batch[:last], *batch[last + 1 :])
    return others[0] if len(others) == 1 else others, batch[last], False


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or _is_array(leaf)


def _is_array(leaf: Any) -> bool:
    """Arrays, and what says it can be one, such as a table of pandas; not the numbers in them."""
    return hasattr(leaf, "__array__") and not isinstance(leaf, Tensor | np.generic | type)


def _tensor(array: Any, like: Tensor | None = None) -> Tensor:
    # A copy: torch takes neither read-only memory nor strides that run backwards.
    values = np.array(array, order="C")
    if values.dtype.kind not in "biuf":
        raise MatchError(f"an array of {values.dtype} holds no numbers: pass one of floats or integers")
    if (values.dtype.kind == "u" and values.dtype.itemsize > 1) or values.dtype.kind == "i":
        values = values.astype(np.int64)
    found = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    if like is None:
        return found
    return found.to(like.device, like.dtype if found.is_floating_point() else None)


def _like(model: nn.Module) -> Tensor:
    """An empty tensor of the model's floating type, on its device."""
    with alone_with(model):
        own = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
        return torch.empty(0, dtype=own.dtype, device=own.device)
