"""Which layers read the units of which: a model's graph, as far as it is understood.

A layer's units can be taken out where every path from them leads, through operations that keep units apart, to layers
whose weights say which of them they read. At anything else, an addition of two tensors, a softmax, attention, the path
ends and the layer is left as it is.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from bayesadam.errors import SettingError

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
# Exact types: a subclass may do anything.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Layout(NamedTuple):
    """Where units lie in a tensor: along `dim`, at index (outer, unit, inner)."""

    dim: int
    outer: int = 1
    inner: int = 1

    def positions(self, units: Tensor, width: int) -> Tensor:
        """The indices along the dimension of some of `width` units, in order."""
        every = torch.arange(self.outer * width * self.inner, device=units.device)
        return every.view(self.outer, width, self.inner)[:, units].reshape(-1)


class Reader(NamedTuple):
    """A layer that reads units, and where they lie in its input."""

    name: str
    layer: Layer
    layout: Layout

    def by_unit(self, tensor: Tensor, width: int) -> Tensor:
        """A tensor of its weight's shape as (outputs, outer, units, the rest)."""
        return tensor.reshape(len(tensor), self.layout.outer, width, -1)


class Units(NamedTuple):
    """The units of a layer, the layers that read them, and the batch norms between, each with its input's layout."""

    name: str
    layer: Layer
    readers: list[Reader]
    norms: list[tuple[nn.Module, Layout]]

    @property
    def width(self) -> int:
        """How many there are."""
        return len(self.layer.weight)


def understand(model: nn.Module, example: tuple[Any, ...]) -> list[Units]:
    """Trace a model, in evaluation mode, and find the layers whose units can be taken out."""
    if not all(leaf.numel() for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)):
        raise SettingError("example_input holds an empty tensor: pass a batch of at least one example")
    try:
        # Absent arguments have their defaults, which the model may test: they must not be traced as tensors.
        absent = list(inspect.signature(model.forward).parameters.values())[len(example) :]
        defaults = {each.name: each.default for each in absent if each.default is not inspect.Parameter.empty}
        traced = fx.GraphModule(model, fx.Tracer().trace(model, concrete_args=defaults or None))
        run = _Run(traced)
        run.run(*example, *defaults.values())
    except Exception as error:
        message = f"torch.fx cannot trace {type(model).__name__}: {error}. Pass a part without control flow"
        raise SettingError(message) from error
    return list(_Paths(model, traced.graph, run.results).units())


class _Run(fx.Interpreter):
    """Runs a graph on an example, and notes the results of its nodes: of tensors the shapes and types."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.results: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.results[n] = torch.empty_like(result, device="meta") if isinstance(result, Tensor) else result
        return result


def _unit_dim(layer: Layer, dims: int) -> int:
    """The dimension of a layer's input and output along which its features lie: the last, or before the positions."""
    return dims + 1 - layer.weight.dim()


class _Paths:
    """Follows units through a graph."""

    def __init__(self, model: nn.Module, graph: fx.Graph, results: Mapping[fx.Node, Any]) -> None:
        self.graph, self.results = graph, results
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._uses = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._read = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        held = (module._parameters.values() for module in set(self.modules.values()))
        self._holders = Counter(id(tensor) for tensors in held for tensor in tensors if tensor is not None)

    def units(self) -> Iterator[Units]:
        for node in self.graph.nodes:
            layer = self._module_at(node, LAYERS)
            if layer is not None and len(layer.weight) > 1 and getattr(layer, "groups", 1) == 1:
                found = Units(str(node.target), layer, [], [])
                layout = Layout(_unit_dim(layer, self.results[node].dim()))
                if self._follow(node, layout, found) and found.readers:
                    yield found

    def _module_at(self, node: fx.Node, kinds: tuple[type, ...]) -> Any:
        """The module of these kinds that a node calls, where its use and its parameters are its own, without hooks."""
        module: Any = self.modules.get(str(node.target)) if node.op == "call_module" else None
        own = (
            type(module) in kinds
            and not (module._forward_hooks or module._forward_pre_hooks)
            and self._uses[node.target] == 1
            and not any(name.startswith(f"{node.target}.") for name in self._read)
            and all(self._holders[id(p)] == 1 for p in module._parameters.values() if p is not None)
            and "weight" in module._parameters
        )
        return module if own else None

    def _follow(self, node: fx.Node, layout: Layout, found: Units) -> bool:
        """Collect all that reads the units of a tensor; False where some of it is not understood."""
        for user in node.users:
            if _asks_size(user, layout.dim):
                continue
            tensors = [each for each in user.all_input_nodes if isinstance(self.results[each], Tensor)]
            if user.op == "output" or node not in user.args or len(tensors) > 1:
                return False
            layer, norm = self._module_at(user, LAYERS), self._module_at(user, _NORMS)
            if layer is not None:
                plain = layout.outer == layout.inner == 1 and getattr(layer, "groups", 1) == 1
                if layout.dim != _unit_dim(layer, self.results[node].dim()) or not (plain or type(layer) is nn.Linear):
                    return False
                found.readers.append(Reader(str(user.target), layer, layout))
                continue
            after: Layout | None = layout
            if norm is not None and layout.dim == 1:
                found.norms.append((norm, layout))
            else:
                after = self._through(node, user, layout, found.width)
            if after is None or not self._follow(user, after, found):
                return False
        return True

    def _through(self, node: fx.Node, user: fx.Node, layout: Layout, width: int) -> Layout | None:
        """Where units lie after an operation: without some of them, on random numbers, its output is without these."""
        module = self.modules.get(str(user.target)) if user.op == "call_module" else None
        if module is not None and (module.state_dict() or module._forward_hooks or module._forward_pre_hooks):
            return None

        def run(x: Tensor) -> Any:
            values = {each: x.clone() if each is node else self.results[each] for each in user.all_input_nodes}
            args, kwargs = fx.node.map_arg((user.args, user.kwargs), values.__getitem__)
            if user.op == "call_method":
                return getattr(args[0], str(user.target))(*args[1:], **kwargs)
            return (user.target if module is None else module)(*args, **kwargs)  # type: ignore[operator]

        x = torch.randn(self.results[node].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        some = torch.arange(1, width, 2)
        try:
            every, part = run(x), run(x.index_select(layout.dim, layout.positions(some, width)))
            (dim,) = (dim for dim in range(every.dim()) if every.shape[dim] != part.shape[dim])
        except Exception:
            return None
        for inner in range(1, every.shape[dim] // width + 1):
            if every.shape[dim] % (inner * width):
                continue
            after = Layout(dim, every.shape[dim] // (inner * width), inner)
            expected = every.index_select(dim, after.positions(some, width))
            if expected.shape == part.shape and torch.allclose(part, expected, rtol=1e-4, atol=1e-6, equal_nan=True):
                return after
        return None


def _asks_size(user: fx.Node, dim: int) -> bool:
    """Whether a node only asks for sizes other than the number of units."""

    def is_other(index: object) -> bool:
        return isinstance(index, int) and 0 <= index != dim

    if user.op == "call_method" and user.target == "size":
        return is_other(user.args[1] if len(user.args) > 1 else user.kwargs.get("dim"))
    if user.op == "call_function" and user.target is getattr and user.args[1] == "shape":
        return all(i.target is operator.getitem and (not i.users or is_other(i.args[1])) for i in user.users)
    return False
