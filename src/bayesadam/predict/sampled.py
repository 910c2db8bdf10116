"""Draws of the network's outputs: from weight draws, from activations, or from the linearised network."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vmap

from bayesadam._warnings import warn
from bayesadam.errors import CollapsedPredictionWarning
from bayesadam.gaussian.noise import stream_seed
from bayesadam.gaussian.structure import Named
from bayesadam.likelihoods import Likelihood
from bayesadam.predict.call import Call, batch_size, examples, in_tf32, repeated
from bayesadam.predict.generic import one_jacobian
from bayesadam.predict.layers import MatrixUse, SumUse
from bayesadam.predict.plan import Plan, dense, recorded

Draw = Callable[[], dict[str, Tensor]]
Noise = Callable[[torch.Size], Tensor]
# Activations that a CPU works on at a time, in bytes: beyond its cache, every operation waits for the memory.
_CACHED = 1 << 27


def warn_of_collapse(record: Likelihood[Any], draws: Tensor, centre: Tensor) -> None:
    """Warn where averaging over draws changed the answer of the network at the mean out of recognition."""
    told = record.collapse(draws, centre)
    if told is not None:
        warn(
            f"{told}: the posterior is too wide to be sampled. Calibrate it with predictive='sampled', raise its "
            "prior_precision, or use predictive='linearised'",
            CollapsedPredictionWarning,
        )


def at_mean(call: Call, params: Named, inputs: Any, *, activations: int, budget: int) -> Tensor:
    """f(x; μ), (batch, ...), as many examples at a time as the budget holds."""
    at_a_time = _examples_at_a_time(inputs, 4 * activations, next(iter(params.values())), budget)
    with torch.no_grad():
        return torch.cat([call(params, part) for part in _parts(inputs, at_a_time)])


def weight_draws(call: Call, draw: Draw, inputs: Any, n: int, *, activations: int, budget: int) -> Tensor:
    """f(x; θ) for n draws of θ, (n, batch, ...): several at a time, as many as the budget holds, where the model allows.

    `activations` are entries of activations per example, to know what fits the `budget`, which is in bytes.
    """
    at_a_time = _examples_at_a_time(inputs, 4 * activations, next(call.model.parameters()), budget)

    def outputs(theta: dict[str, Tensor]) -> Tensor:
        return torch.cat([call(theta, part) for part in _parts(inputs, at_a_time)])

    return _over_draws(outputs, draw, n, 4 * activations * at_a_time, budget)


def linearised_draws(
    call: Call, params: Named, draw: Draw, inputs: Any, n: int, *, activations: int, kept: int, budget: int
) -> Tensor:
    """J (θ − μ) for n draws of θ, by forward-mode products, (n, batch, ...); any architecture.

    A GPU rounds the factors of float32 products to TF32. `kept` are the entries per example of all activations, which backward
    passes keep where an operation has no forward mode.
    """
    means = {name: tensor.detach() for name, tensor in params.items()}
    like = next(iter(means.values()))
    at_a_time = _examples_at_a_time(inputs, 8 * activations, like, budget)

    def one_part(theta: dict[str, Tensor], part: Any) -> Tensor:
        tangent = {name: theta[name] - mean for name, mean in means.items()}
        with in_tf32() if like.is_cuda else nullcontext():
            product: Tensor = jvp(lambda p: call(p, part), (means,), (tangent,))[1]
        return product

    def outputs(theta: dict[str, Tensor]) -> Tensor:
        return torch.cat([one_part(theta, part) for part in _parts(inputs, at_a_time)])

    def by_reverse(theta: dict[str, Tensor]) -> Tensor:
        found = []
        for part in _parts(inputs, _examples_at_a_time(inputs, 8 * kept, like, budget)):
            one = _by_two_reverse_passes(call, means, theta, part)
            found.append(_by_single_gradients(call, means, theta, part) if one is None else one)
        return torch.cat(found)

    try:
        with torch.no_grad():
            one_part(means, examples(inputs, 0, 1))
    except (RuntimeError, NotImplementedError):
        # Some operation has no forward mode.
        with torch.no_grad():
            return torch.stack([by_reverse(draw()) for _ in range(n)])
    return _over_draws(outputs, draw, n, 8 * activations * at_a_time, budget)


def _examples_at_a_time(inputs: Any, entries: int, like: Tensor, budget: int) -> int:
    """How many examples a forward pass may take, with `entries` numbers each."""
    return max(1, min(batch_size(inputs), budget // max(1, 2 * entries * like.element_size())))


def _parts(inputs: Any, at_a_time: int) -> Iterator[Any]:
    size = batch_size(inputs)
    for start in range(0, size, at_a_time):
        yield inputs if at_a_time >= size else examples(inputs, start, start + at_a_time)


def _by_two_reverse_passes(call: Call, means: Named, theta: Named, inputs: Any) -> Tensor | None:
    """J ε where an operation has no forward mode: Jᵀu is linear in u, and its derivative along ε is J ε.

    None where an operation cannot be differentiated twice. torch may drop it in silence instead of raising, so that the
    product is checked: r · J ε = Jᵀr · ε.
    """
    leaves = {name: mean.detach().requires_grad_() for name, mean in means.items()}
    with torch.enable_grad():
        value = call(leaves, inputs)
        if not value.requires_grad:
            return torch.zeros_like(value)
        r = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        u = torch.zeros_like(value, requires_grad=True)

        def along(weights: Tensor, create_graph: bool) -> Tensor:
            pulled = torch.autograd.grad(
                value, list(leaves.values()), weights, create_graph=create_graph, retain_graph=True, allow_unused=True
            )
            used = [(name, dense(g)) for name, g in zip(leaves, pulled, strict=True) if g is not None]
            return torch.stack([(g * (theta[name] - means[name])).sum() for name, g in used]).sum()

        expected = along(r, False).detach()
        try:
            (product,) = torch.autograd.grad(along(u, True), u)
        except RuntimeError:
            return None
    scale = r.norm() * product.norm() + expected.abs()
    if bool(((r * product).sum() - expected).abs() > 1e-3 * scale):
        return None
    return product


def _by_single_gradients(call: Call, means: dict[str, Tensor], theta: Named, inputs: Any) -> Tensor:
    """J ε with the gradients of one example at a time, the last resort."""
    rows = []
    for i in range(batch_size(inputs)):
        example = examples(inputs, i, i + 1)
        value = call(means, example)
        jacobian = one_jacobian(call, means, {}, example)
        away = {name: (theta[name] - mean).flatten() for name, mean in means.items()}
        products = [jacobian[name].unsqueeze(-1).flatten(1) @ step for name, step in away.items()]
        rows.append(torch.stack(products).sum(dim=0).view_as(value))
    return torch.cat(rows)


def _over_draws(
    outputs: Callable[[dict[str, Tensor]], Tensor], draw: Draw, n: int, entries: int, budget: int
) -> Tensor:
    """`outputs` of n draws, vectorised over as many as fit; one at a time where the model cannot be vectorised."""
    first = draw()
    element = next(iter(first.values())).element_size()
    one = element * (entries + 2 * sum(tensor.numel() for tensor in first.values()))
    at_once = max(1, min(n, budget // max(one, 1)))
    results: list[Tensor] = []
    vectorised = at_once > 1
    for done in range(0, n, at_once):
        pending = [first if k == 0 else draw() for k in range(done, min(done + at_once, n))]
        with torch.no_grad():
            if vectorised:
                try:
                    stacked = {name: torch.stack([p[name] for p in pending]) for name in first}
                    results.append(vmap(outputs)(stacked))
                except RuntimeError:
                    vectorised = False
            if not vectorised:
                results.extend(outputs(p).unsqueeze(0) for p in pending)
    return torch.cat(results)


def draws_activations(call: Call, plan: Plan, params: Named, inputs: Any) -> bool:
    """Whether every weight sits in an `nn.Linear` that is used once, on one row per example."""
    owned = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in call.model.named_modules()
        if type(module) is nn.Linear
        for name in ("weight", "bias")
    }
    if plan.generic or plan.silent or not params.keys() <= owned:
        return False
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    with torch.enable_grad():
        uses, _ = recorded(call, leaves, repeated(examples(inputs, 0, 1), 2))
    names = [use.name for use in uses]
    flat = all(
        isinstance(use, MatrixUse | SumUse)
        and use.rows is None
        and len(use.output.shape) == 2
        and use.output.shape[0] == 2
        and not (isinstance(use, SumUse) and (use.channel or use.scale is not None))
        for use in uses
    )
    return flat and len(set(names)) == len(names) == len(leaves)


def activation_draws(
    call: Call, params: Named, variances: Named, inputs: Any, n: int, *, seed: int, activations: int, budget: int
) -> Tensor:
    """Local reparameterisation: z ~ N(a μᵀ + b, a² Sᵀ + s) instead of weights; (n, batch, ...).

    Each example has weights of its own, so the draws have the right distribution example by example, at lower variance
    and far fewer random numbers than weight draws.
    """
    like = next(iter(params.values()))
    layers = count()

    def noise(shape: torch.Size) -> Tensor:
        # Of as many numbers as there are here torch draws twice as many in a second as numpy does.
        generator = torch.Generator(device=like.device).manual_seed(stream_seed(seed, "layer", next(layers)))
        return torch.empty(shape, dtype=like.dtype, device=like.device).normal_(generator=generator)

    # Where the draws part at the first layer, its matrix products are shared by all of them.
    late = _may_part_at_first_layer(call, params, examples(inputs, 0, 2))
    if like.device.type == "cpu":
        budget = min(budget, _CACHED)
    found = []
    for part in _parts(inputs, _examples_at_a_time(inputs, 4 * n * activations, like, budget)):
        size = batch_size(part)
        rows, copies = (size, n) if late else (size * n, 1)
        with torch.no_grad(), _noisy_layers(call.model, params, variances, noise, rows=rows, copies=copies):
            output = call(params, part if late else repeated(part, n))
        found.append(output.reshape(n, size, *output.shape[1:]))
    return torch.cat(found, dim=1)


def _may_part_at_first_layer(call: Call, params: Named, probe: Any) -> bool:
    """Whether the model's batch may grow threefold in the first layer: each copy must come out as if it were alone.

    It may not where the model joins what comes before with what comes after, or has noted the length of its input.
    """
    size = batch_size(probe)
    units = {name: torch.ones_like(tensor) for name, tensor in params.items()}

    def offset(shape: torch.Size, number: float | None = None) -> Tensor:
        # Instead of noise, copy k has k - 1 standard deviations everywhere.
        if number is not None:
            return torch.full(shape, number)
        rows = torch.arange(shape[0] * shape[1]) // size - 1.0
        return rows.view(shape[0], shape[1], *[1] * (len(shape) - 2)).expand(shape)

    with torch.no_grad():
        try:
            with _noisy_layers(call.model, params, units, offset, rows=size, copies=3):
                found = call(params, probe)
        except RuntimeError:
            return False
        alone = []
        for number in (-1.0, 0.0, 1.0):
            with _noisy_layers(call.model, params, units, partial(offset, number=number), rows=size, copies=1):
                alone.append(call(params, probe))
    expected = torch.cat(alone)
    return found.shape == expected.shape and bool((found - expected).norm() <= 1e-2 * expected.norm())


@contextmanager
def _noisy_layers(
    model: nn.Module, params: Named, variances: Named, noise: Noise, *, rows: int, copies: int
) -> Iterator[None]:
    """Linear layers whose outputs are drawn, `copies` of each where there are `rows` of them."""
    names = {id(tensor): name for name, tensor in params.items()}

    def hook(module: nn.Linear, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], z: Tensor) -> Tensor | None:
        weight, bias = (names.get(id(p)) if p is not None else None for p in (module.weight, module.bias))
        if weight is None and bias is None:
            return None
        variance = None if bias is None else variances[bias]
        if weight is not None:
            given = args[0] if args else kwargs["input"]
            variance = F.linear(given.square(), variances[weight], variance)
        assert variance is not None
        drawn = noise(torch.Size((copies if z.shape[0] == rows else 1, *z.shape))).to(z)
        return torch.addcmul(z, drawn, variance.sqrt()).flatten(0, 1)

    handles = []
    try:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
