"""Calling the user's model as a pure function of named parameters, on any kind of batch, without a trace left in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from bayesadam._alone import in_eval_mode
from bayesadam.errors import BayesAdamError, MatchError

Forward = Callable[[nn.Module, Any], Any]


class _Caller(nn.Module):
    """Holds the model so that `functional_call` reaches it through whatever the user's `forward` does."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.model = call.model
        self.call = call

    def forward(self, inputs: Any) -> Any:
        return self.call.run(inputs)


class At(Protocol):
    """How the outputs of one place of each example are come by."""

    def output(self, call: Call, inputs: Any, place: Tensor) -> Tensor:
        """(batch, outputs) at the places, (batch,)."""


@dataclass(frozen=True)
class Call:
    """f(θ, inputs) → (batch, ...) for one model; tensors are passed alone, tuples as arguments, mappings as keywords.

    `forward(model, inputs)` is for models whose call is unusual; its first tensor or `.logits` is taken. With `at`, inputs
    are pairs (inputs, place), and the output is that of one place of each example, (batch, outputs).
    """

    model: nn.Module
    forward: Forward | None = None
    at: At | None = None

    def __call__(self, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """The model's output, (batch, ...), with `params` for the parameters they name."""
        return output_tensor(self.returned(params, inputs))

    def returned(self, params: Mapping[str, Tensor], inputs: Any) -> Any:
        """All that the model returns, whatever it is."""
        tensors = {f"model.{name}": tensor for name, tensor in params.items()}
        tensors |= {f"model.{name}": buffer.clone() for name, buffer in self.model.named_buffers()}
        return functional_call(_Caller(self), tensors, (inputs,))

    def run(self, inputs: Any) -> Any:
        """What the model returns with the weights that it has: through the user's `forward`, or as the inputs' kind has it."""
        if self.at is not None:
            return self.at.output(replace(self, at=None), *inputs)
        if self.forward is not None:
            return self.forward(self.model, inputs)
        if isinstance(inputs, dict):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs)

    def flat(self, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """The output as (batch, outputs)."""
        output = self(params, inputs)
        return output.reshape(output.shape[0], -1)


@contextmanager
def explaining(call: Call, params: Mapping[str, Tensor], inputs: Any) -> Iterator[None]:
    """A note on what the model raises within: which inputs it was given, and what may be wrong with them."""
    try:
        yield
    except BayesAdamError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        # Python 3.10 has no notes.
        if sys.version_info >= (3, 11):
            given = ", ".join(_outline(leaf) for leaf in pytree.tree_leaves(inputs))
            error.add_note(
                f"bayesadam: {type(call.model).__name__} does not run on inputs of {given}. {_advice(params, inputs, error)}."
            )
        raise


def _outline(leaf: Any) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


def _advice(params: Mapping[str, Tensor], inputs: Any, error: Exception) -> str:
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if len(leaves) == 1 and leaves[0].dim() == 1 and not leaves[0].is_floating_point():
        return "They look like class indices: data are (inputs, targets), in this order"
    own = next((tensor.dtype for tensor in params.values()), torch.float32)
    if "type" in str(error) and any(leaf.dtype != own for leaf in leaves):
        return f"The weights are {own}: convert the inputs, x.to({own}), and scale them as in training"
    if isinstance(inputs, tuple | list) and len(inputs) > 1:
        return "A tuple holds the arguments of the model: pass the inputs alone, without their targets"
    return "Inputs are those of training, with the batch as their first dimension: a single example is x[None]"


def output_tensor(output: Any) -> Tensor:
    """The tensor in what a model returned: itself, `.logits`, `["logits"]`, or the first of a tuple."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise MatchError(
            f"the model returned {type(output).__name__}, not a tensor: pass forward=lambda model, batch: ... that "
            "returns the outputs, (batch, ...)"
        )
    if not output.is_floating_point():
        raise MatchError(f"the model returned {output.dtype}: it must return real outputs, such as logits, not classes")
    if output.dim() == 0:
        raise MatchError("the model returned a single number: it must return one row of outputs for each example")
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
def _plain_attention() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
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


_in_plain_mathematics = _Shared(_plain_attention)
# Products of float32 with ten bits of mantissa, summed in float32: for variances, whose errors that leaves below a thousandth.
in_tf32 = _Shared(_tensor_cores)
_uncompiled = _Shared(lambda: torch.compiler.set_stance("force_eager"))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, and attention in plain mathematics, which every kind of differentiation supports; restored after.

    Within, gradients can be taken even where the caller is in inference mode, what was compiled runs as it was written,
    since it would be compiled anew for every hook, and other threads that ask for the same model wait.
    """
    eager = _uncompiled() if _is_compiled(model) else nullcontext()
    with in_eval_mode(model), _in_plain_mathematics(), eager, torch.inference_mode(False):
        yield


def _is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it went through torch.compile, in place or not."""
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in model.modules())


def plain(inputs: Any) -> Any:
    """Mappings of any kind as dicts, so that batches can be cut and joined; without a graph, and never inference tensors."""
    return pytree.tree_map(_differentiable, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def _differentiable(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    with torch.inference_mode(False):
        return leaf.clone() if leaf.is_inference() else leaf.detach()


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


def examples(inputs: Any, start: int, stop: int) -> Any:
    """Examples `start` to `stop` of a batch of tensors, tuples or dicts."""
    size = batch_size(inputs)
    return pytree.tree_map(lambda leaf: leaf[start:stop] if is_batched(leaf, size) else leaf, inputs)


def chosen_examples(inputs: Any, rows: Tensor) -> Any:
    """Some examples of a batch, by number."""
    size = batch_size(inputs)
    return pytree.tree_map(lambda leaf: leaf[rows.to(leaf.device)] if is_batched(leaf, size) else leaf, inputs)


def repeated(inputs: Any, times: int) -> Any:
    """The batch, `times` over."""
    size = batch_size(inputs)
    return pytree.tree_map(lambda leaf: torch.cat([leaf] * times) if is_batched(leaf, size) else leaf, inputs)


def to_device(inputs: Any, device: torch.device) -> Any:
    """The batch on another device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)
