"""Which layers read the units of which: a model's graph, as far as it is understood.

A layer's units can be taken out where every way on from them leads, through operations that keep units apart, to layers
whose weights say which of them they read. At anything else, an addition, a softmax, an operation not known here, the way
ends and the layer is left as it is.
"""

import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from bayesadam.errors import SettingError

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
# Exact types: a subclass may do anything.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NAMES = (
    *("relu", "relu_", "relu6", "leaky_relu", "leaky_relu_", "elu", "elu_", "selu", "celu", "gelu", "silu", "mish"),
    *("tanh", "tanh_", "hardtanh", "tanhshrink", "hardshrink", "softshrink", "softsign", "softplus", "hardswish"),
    *("sigmoid", "sigmoid_", "hardsigmoid", "logsigmoid", "threshold"),
    *("abs", "neg", "exp", "sin", "cos", "square", "clamp", "contiguous", "clone"),
)
# Methods, functions and modules from one number to one number, the same in every place; dropout is nothing in evaluation.
_ELEMENTWISE: set[Any] = {
    *_NAMES,
    *(getattr(home, name) for home in (torch, F) for name in _NAMES if hasattr(home, name)),
    *(operator.mul, operator.add, operator.sub, operator.truediv, operator.pow, operator.neg),
    *(torch.mul, torch.add, torch.sub, torch.div, torch.pow),
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Threshold),
    *(nn.Tanh, nn.Hardtanh, nn.Tanhshrink, nn.Hardshrink, nn.Softshrink, nn.Softsign, nn.Softplus),
    *(nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Hardswish),
}
_POOLS: dict[Any, tuple[str, int]] = {
    getattr(home, f"{name}{n}d"): (kind, n)
    for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg")
    for snake in (f"{kind}_pool".replace("Adaptive", "adaptive_").lower(),)
    for home, name in ((nn, f"{kind}Pool"), (F, snake), (torch, snake))
    for n in (1, 2, 3)
    if hasattr(home, f"{name}{n}d")
}


@dataclass(frozen=True)
class Layout:
    """Where units lie in a tensor: along `dim`, at index (outer, unit, inner)."""

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def plain(self) -> bool:
        """Whether a unit is one index along the dimension."""
        return self.outer == self.inner == 1

    def positions(self, units: Tensor, width: int) -> Tensor:
        """The indices along the dimension of some of `width` units, in order."""
        outer = torch.arange(self.outer, device=units.device).view(-1, 1, 1) * width
        return ((outer + units.view(1, -1, 1)) * self.inner + torch.arange(self.inner, device=units.device)).reshape(-1)


# A batch norm, and where units lie in its input.
Norm = tuple[nn.Module, Layout]


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer that reads units: its name, where they lie in its input, whether zeros were averaged in on the way."""

    name: str
    layer: Layer
    layout: Layout
    padded: bool

    def by_unit(self, tensor: Tensor, width: int) -> Tensor:
        """A tensor of its weight's shape as (outputs, outer, units, the rest)."""
        return tensor.reshape(len(tensor), self.layout.outer, width, -1)

    def scaled(self, tensor: Tensor, factors: Tensor) -> Tensor:
        """A tensor of its weight's shape times the factor of the unit that each entry reads."""
        return (self.by_unit(tensor, len(factors)) * factors[:, None]).reshape(tensor.shape)


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a layer, the layers that read them, and the norms between."""

    name: str
    layer: Layer
    readers: tuple[Reader, ...]
    norms: tuple[Norm, ...]

    @property
    def width(self) -> int:
        """How many there are."""
        return len(self.layer.weight)


@dataclass(frozen=True, eq=False)
class Seen:
    """What a layer was given, by feature: the value at the first place, and whether it was 0 at all of them."""

    first: Tensor
    zero: Tensor


@dataclass(frozen=True, eq=False)
class Network:
    """A traced model: it shares the model's modules, so that a change to them shows."""

    traced: fx.GraphModule
    units: tuple[Units, ...]

    def seen(self, example: Any) -> dict[str, Seen]:
        """What each layer is given on an example, by layer."""
        return _Run(self.traced, example).seen


def understand(model: nn.Module, example: Any) -> Network:
    """Trace a model, in evaluation mode, and find the layers whose units can be taken out."""
    if not all(leaf.numel() for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)):
        raise SettingError("example_input holds an empty tensor: pass a batch of at least one example")
    try:
        positional, named = arguments(example)
        given = inspect.signature(model.forward).bind(*positional, **named)
        # What is not given has its default, which the model may test: it must not be traced as a tensor.
        defaults = {
            name: parameter.default
            for name, parameter in given.signature.parameters.items()
            if name not in given.arguments and parameter.default is not parameter.empty
        }
        traced = fx.GraphModule(model, fx.Tracer().trace(model, concrete_args=defaults or None))
        shapes = _Run(traced, example).shapes
    except Exception as error:
        raise SettingError(
            f"torch.fx cannot trace {type(model).__name__} ({type(error).__name__}: {error}), so which layer reads which is "
            "not known: pass the part of it that has no control flow on its inputs"
        ) from error
    return Network(traced, tuple(_find(model, traced.graph, shapes)))


def arguments(example: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """An example as arguments: a tensor alone, a tuple unpacked, a mapping as keywords."""
    if isinstance(example, Mapping):
        return (), example
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


class _Run(fx.Interpreter):
    """Runs a graph on an example, and notes the shapes of its tensors and what its layers are given."""

    def __init__(self, traced: fx.GraphModule, example: Any) -> None:
        super().__init__(traced)
        self.shapes: dict[fx.Node, torch.Size] = {}
        self.seen: dict[str, Seen] = {}
        positional, named = arguments(example)
        places = [node for node in traced.graph.nodes if node.op == "placeholder"]
        rest = [named[p.target] if p.target in named else p.args[0] for p in places[len(positional) :]]
        with torch.no_grad():
            self.run(*positional, *rest)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = result.shape
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.submodules[target]
        if type(layer) in LAYERS and args:
            features = args[0].detach().movedim(_unit_dim(layer, args[0].dim()), 0).flatten(1)
            self.seen[target] = Seen(features[:, 0].clone(), (features == 0).all(1))
        return super().call_module(target, args, kwargs)


def _unit_dim(layer: Layer, dims: int) -> int:
    """The dimension of a layer's input and output along which its features lie: the last, or before the places."""
    return dims + 1 - layer.weight.dim()


def _find(model: nn.Module, graph: fx.Graph, shapes: Mapping[fx.Node, torch.Size]) -> Iterator[Units]:
    way = _Way(model, graph, shapes)
    for node in graph.nodes:
        layer = way.layer_at(node)
        if layer is None or len(layer.weight) < 2 or _grouped(layer):
            continue
        readers: list[Reader] = []
        norms: list[Norm] = []
        layout = Layout(_unit_dim(layer, len(shapes[node])))
        if way.follow(node, layout, len(layer.weight), readers, norms) and readers:
            yield Units(str(node.target), layer, tuple(readers), tuple(norms))


def _grouped(layer: Layer) -> bool:
    return not isinstance(layer, nn.Linear) and layer.groups > 1


class _Way:
    """Follows units through a graph."""

    def __init__(self, model: nn.Module, graph: fx.Graph, shapes: Mapping[fx.Node, torch.Size]) -> None:
        self.shapes = shapes
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._uses = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._read = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        held = (module._parameters.values() for module in set(self.modules.values()))
        self._holders = Counter(id(tensor) for tensors in held for tensor in tensors if tensor is not None)

    def layer_at(self, node: fx.Node) -> Layer | None:
        """The layer that a node calls, where it is used once and its parameters are its own."""
        module = self.module_at(node)
        if isinstance(module, LAYERS) and type(module) in LAYERS and self._own(str(node.target), module):
            return module
        return None

    def module_at(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls; none where hooks may change what it does."""
        module = self.modules.get(str(node.target)) if node.op == "call_module" else None
        hooked = module is not None and (module._forward_hooks or module._forward_pre_hooks)
        return None if hooked else module

    def _own(self, target: str, module: nn.Module) -> bool:
        return (
            self._uses[target] == 1
            and not any(name.startswith(f"{target}.") for name in self._read)
            and all(self._holders[id(p)] == 1 for p in module._parameters.values() if p is not None)
            and "weight" in module._parameters
        )

    def follow(
        self, node: fx.Node, layout: Layout, width: int, readers: list[Reader], norms: list[Norm], padded: bool = False
    ) -> bool:
        """Collect all that reads the units of a tensor; False where some of it is not understood."""
        for user in node.users:
            if self._asks_size(user, layout.dim):
                continue
            if user.op == "output" or node not in user.args:
                return False
            layer = self.layer_at(user)
            if layer is not None:
                if not self._reads(layer, self.shapes[node], layout) or len(user.all_input_nodes) > 1:
                    return False
                readers.append(Reader(str(user.target), layer, layout, padded))
                continue
            after = self._through(node, user, layout, width, norms)
            if after is None or not self.follow(user, after[0], width, readers, norms, padded or after[1]):
                return False
        return True

    @staticmethod
    def _asks_size(user: fx.Node, dim: int) -> bool:
        """Whether a node only asks for sizes other than the number of units."""
        if user.op == "call_method" and user.target == "size":
            asked = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
            return isinstance(asked, int) and 0 <= asked != dim
        if user.op == "call_function" and user.target is getattr and user.args[1] == "shape":
            return all(
                index.target is operator.getitem
                and (not index.users or (isinstance(index.args[1], int) and 0 <= index.args[1] != dim))
                for index in user.users
            )
        return False

    @staticmethod
    def _reads(layer: Layer, shape: torch.Size, layout: Layout) -> bool:
        if layout.dim != _unit_dim(layer, len(shape)):
            return False
        return isinstance(layer, nn.Linear) or (layout.plain and not _grouped(layer))

    def _through(
        self, node: fx.Node, user: fx.Node, layout: Layout, width: int, norms: list[Norm]
    ) -> tuple[Layout, bool] | None:
        """Where the units lie after an operation that keeps them apart, and whether it averages zeros in."""
        shape = self.shapes[node]
        module = self.module_at(user)
        if user.op == "call_module" and module is None:
            return None
        what: Any = type(module) if module is not None else user.target
        reshaped = _reshaped(user, module)
        if reshaped is not None:
            moved = _after_reshape(shape, self.shapes.get(user), layout, width)
            return (moved, False) if moved is not None and reshaped(moved.dim) else None
        if len(user.all_input_nodes) > 1:
            return None
        if module is not None and what in _NORMS:
            if layout.dim != 1 or not self._own(str(user.target), module):
                return None
            norms.append((module, layout))
            return layout, False
        if what in _ELEMENTWISE:
            return layout, False
        if what is F.dropout:
            training = user.kwargs.get("training", user.args[2] if len(user.args) > 2 else True)
            return (layout, False) if training is False else None
        if what in ("mean", torch.mean):
            return _after_mean(user, shape, layout)
        if what in _POOLS:
            kind, dims = _POOLS[what]
            settings = user.kwargs if module is None else vars(module)
            if not layout.plain or layout.dim != len(shape) - dims - 1 or settings.get("return_indices"):
                return None
            return layout, kind == "Avg" and not _whole_windows(module, user)
        return None


def _whole_windows(module: nn.Module | None, user: fx.Node) -> bool:
    """Whether an average pooling has neither padding nor a divisor of its own, and so keeps a constant."""
    if module is None:
        return len(user.args) <= 3 and not user.kwargs.keys() - {"kernel_size", "stride"}
    padding = vars(module)["padding"]
    return not any(padding if isinstance(padding, tuple) else (padding,)) and not vars(module).get("divisor_override")


def _reshaped(user: fx.Node, module: nn.Module | None) -> Callable[[int], bool] | None:
    """For a reshaping, whether it may change the size of a dimension; None for anything else."""
    if type(module) is nn.Flatten or (module is None and user.target in (torch.flatten, "flatten")):
        return lambda dim: True
    if module is None and user.target in (torch.reshape, "view", "reshape"):
        sizes: Any = user.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            sizes = tuple(sizes[0])
        return lambda dim: dim < len(sizes) and isinstance(sizes[dim], int) and bool(sizes[dim] == -1)
    return None


def _after_reshape(before: torch.Size, after: torch.Size | None, layout: Layout, width: int) -> Layout | None:
    """Where the units lie after a reshaping that keeps the order of the numbers."""
    step = layout.inner * math.prod(before[layout.dim + 1 :])
    for dim in range(len(after or ())):
        size, rest = after[dim], math.prod(after[dim + 1 :])  # type: ignore[index]
        if step % rest == 0 and size * rest >= step * width and size * rest % (step * width) == 0:
            return Layout(dim, size * rest // (step * width), step // rest)
    return None


def _after_mean(user: fx.Node, shape: torch.Size, layout: Layout) -> tuple[Layout, bool] | None:
    dims: Any = user.kwargs.get("dim", user.args[1] if len(user.args) > 1 else None)
    keep = user.kwargs.get("keepdim", user.args[2] if len(user.args) > 2 else False)
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or not all(isinstance(dim, int) for dim in dims):
        return None
    gone = {dim % len(shape) for dim in dims}
    if layout.dim in gone:
        return None
    shift = 0 if keep else sum(dim < layout.dim for dim in gone)
    return Layout(layout.dim - shift, layout.outer, layout.inner), False
