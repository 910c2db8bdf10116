"""A Gaussian over named weights, without a model: live, or on disk and read one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesadam import _storage as storage
from bayesadam import readers
from bayesadam._checks import count
from bayesadam._files import damage_named
from bayesadam._shards import box, is_first_rank, is_sharded, on_first_rank, own_part, whole
from bayesadam._version import __version__
from bayesadam._warnings import warn
from bayesadam.errors import FileError, ImproperError, MatchError, SettingError
from bayesadam.readers import UNKNOWN, Checkpoint, CheckpointKeywords, Curvature, Origin
from bayesadam.readers.formats.lazy import Lazy, meta, outline_of
from bayesadam.readers.match import Match
from bayesadam.weights.bases import built
from bayesadam.weights.diagonal import Diagonal
from bayesadam.weights.draws import fresh_seed
from bayesadam.weights.named import AnyPath, Named
from bayesadam.weights.settings import CovariantPrior, Plain, Precision, Prior, SettingKeywords, Settings, prior_by_name
from bayesadam.weights.store import SETTING_NAMES, Stored, tensors_of
from bayesadam.weights.sums import check_growth, summed

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


# Fewer batches than this in an epoch may divide the steps by chance.
_FEWEST_BATCHES = 100


@dataclass(frozen=True, eq=False)
class Source:
    """The file behind a `GaussianWeights`, in the format `"posterior"`, without a `match`, where it was saved by us.

    `weights` are every tensor of the network, read when accessed; `why` says how the file was read, `apart`, if they
    do, how weights and state differ in age.
    """

    path: Path
    format: str
    why: tuple[str, ...]
    weights: Named
    match: Match | None = None
    apart: str | None = None


@dataclass(frozen=True, eq=False)
class GaussianWeights:
    """q(θ) = N(μ, Σ) over named weights.

    With c = v̂ᵖ the optimiser's curvature, w = s N B^(2p−1) and δ the prior precision (paper, equation 10):

        map form         μ = θ_t                      Σ = (w c + δ)⁻¹
        likelihood form  μ = w c/(w c + δ) θ_t        Σ = (w c + δ)⁻¹

    `GaussianWeights.open(path)` reads it from a checkpoint or a saved posterior, without a model. Tensors then stay on
    disk: each access reads one. Frozen: `replace` returns a new one that shares its tensors.

    >>> from bayesadam.weights.diagonal import Diagonal
    >>> moments = {"w": torch.tensor([4.0, 9.0])}
    >>> q = GaussianWeights({"w": torch.ones(2)}, Diagonal(moments), Settings(10, {"w": 0.0}))
    >>> q.variance["w"]
    tensor([0.0500, 0.0333])

    Attributes:
        mode: θ_t, the trained weights, by name.
        curvature: v̂, and the bases in which it is the diagonal of V.
        omitted: parameters of the network that are not in it, with the reason.
        origin: whose state the second moments come from, of how many gradients.
        padding: the rows of embeddings that stand for padding, held at θ in every draw.
        dtypes: the types of draws; None for those of `mode`.
        has_weights: False for a published file without weights, of which only the variances are known.
    """

    mode: Named
    curvature: Diagonal
    settings: Settings
    omitted: Mapping[str, str] = field(default_factory=dict)
    _: KW_ONLY
    origin: Origin = UNKNOWN
    padding: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] | None = None
    has_weights: bool = True
    source: Source | None = None

    @staticmethod
    def open(
        path: AnyPath | Checkpoint,
        n_data: float | None = None,
        *,
        prior_precision: Plain | None = None,
        power: float = 0.5,
        batch_size: int | None = None,
        structure: str = "diagonal",
        **how: Unpack[CheckpointKeywords],
    ) -> GaussianWeights:
        """The Gaussian of a file, without a model: what a trainer saved, or what `save` or `export` wrote.

        Tensors stay on disk until they are used; second moments that are negative or not finite are refused then. A
        saved posterior keeps its own settings, but for `n_data` and `prior_precision` where they are given.

        Args:
            path: the file, see `read_checkpoint`, or what that returned.
            n_data: N, the number of training examples; None takes what the file says, as of batch_size.
            structure: `"diagonal"`, or `"kronecker"` with the eigenbases of a SOAP.
            **how: how the file is read, see `CheckpointKeywords`.
        """
        file = path.path if isinstance(path, Checkpoint) else Path(path)
        if is_saved(path, how.get("optimizer_path")):
            if (power, batch_size, structure) != (0.5, None, "diagonal") or any(how.values()):
                raise SettingError(
                    f"{file} is a saved posterior with a power, batch_size and structure of its own: open it with "
                    "n_data and prior_precision alone, and change settings with .replace(...)"
                )
            tensors, header = storage.read_mapped(file)
            changes = {"n_data": n_data, "prior_precision": prior_precision}
            q = unpacked(file, tensors, header, None)
            q = q.replace(**{key: value for key, value in changes.items() if value is not None})
            weights = "with" if q.has_weights else "without"
            kept = f", moments kept as {header['compress']}" if header.get("compress") else ""
            why = f"{file}: a {q.structure} posterior {weights} weights by bayesadam {header.get('version')}{kept}."
            return replace(q, source=Source(file, "posterior", (why,), q.mode))
        checkpoint = path if isinstance(path, Checkpoint) else readers.read_checkpoint(file, **how)
        n_data, batch_size = checkpoint.n_data_or(n_data), checkpoint.batch_size_or(batch_size)
        match = readers.match_checkpoint(checkpoint, **how)
        settings = SettingKeywords(
            prior_precision=prior_precision, power=power, batch_size=batch_size, structure=structure
        )
        q = of_match(match, n_data, **settings)
        apart = readers.moments_apart(checkpoint, match)
        if apart is not None and checkpoint is not path:
            warn(apart)
        source = Source(file, checkpoint.format, readers.explain(checkpoint, match), checkpoint.weights, match, apart)
        return replace(q, source=source)

    @property
    def mean(self) -> dict[str, Tensor]:
        """μ by parameter name; the rows that embeddings keep for padding are θ in either form."""
        self.require_weights()
        mean = self.curvature.mean(self.mode, self.settings)
        return mean if self.settings.form == "map" else self._with_padding(mean)

    @property
    def variance(self) -> dict[str, Tensor]:
        """diag Σ by parameter name; infinite where a weight has neither curvature nor prior."""
        return self.curvature.variance(self.settings)

    @property
    def stddev(self) -> dict[str, Tensor]:
        """The square root of `variance`."""
        return {name: variance.sqrt_() for name, variance in self.variance.items()}

    def snr(self) -> dict[str, Tensor]:
        """Signal-to-noise ratio |μ|/σ, the paper's ranking for pruning; 0 where the variance is infinite."""
        stddev = self.stddev
        return {name: mu.abs() / stddev[name] for name, mu in self.mean.items()}

    @cached_property
    def coordinate_variance(self) -> Named:
        """The variances in the coordinates in which Σ is diagonal; cached, so do not write to it."""
        return self.curvature.coordinate_variance(self.settings)

    @property
    def structure(self) -> str:
        """`"diagonal"`, `"inputs"` (the input sides of layers are known) or `"kronecker"` (both sides)."""
        return "inputs" if self.curvature.inputs else "kronecker" if self.curvature.bases else "diagonal"

    @property
    def effective_dimension(self) -> float:
        """γ = tr(w c Σ): how many directions in weight space the data determine, and not the prior."""
        return self.curvature.effective_dimension(self.settings)

    @property
    def n_data(self) -> float:
        """N, the number of training examples."""
        return self.settings.n_data

    @property
    def prior_precision(self) -> Mapping[str, Precision]:
        """δ by parameter name: what the prior adds to every weight's precision."""
        return self.settings.prior_precision

    @property
    def scale(self) -> float:
        """s, the factor on N that `tune` finds; 1 before."""
        return self.settings.scale

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter, without reading it."""
        return {name: theta.shape for name, theta in outline_of(self.mode).items()}

    @property
    def n_weights(self) -> int:
        """How many weights there are."""
        return sum(shape.numel() for shape in self.shapes.values())

    @cached_property
    def is_sharded(self) -> bool:
        """Whether its parameters are sharded over processes (FSDP2), each of which then holds its part of them."""
        return any(is_sharded(theta) for theta in outline_of(self.mode).values())

    def part(self, name: str) -> GaussianWeights:
        """The same over one parameter alone, in memory."""
        settings = replace(self.settings, prior_precision={name: self.prior_precision[name]})
        padding, types = {n: row for n, row in self.padding.items() if n == name}, {name: self.draw_types()[name]}
        how: Any = {"origin": self.origin, "padding": padding, "dtypes": types, "has_weights": self.has_weights}
        return GaussianWeights({name: self.mode[name]}, self.curvature.part(name), settings, **how)

    def draw_types(self) -> Mapping[str, torch.dtype]:
        """The types of draws by parameter name."""
        return self.dtypes or {name: theta.dtype for name, theta in outline_of(self.mode).items()}

    def sample(self, n: int | None = None, *, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draws from q, in the types of the network's parameters; rows that embeddings keep for padding are not drawn.

        Args:
            n: the number of draws, a leading dimension; None for one draw without it.
            generator: makes the draws reproducible; a parameter's depend on it and on the parameter's name alone.
        """
        count("n", 1 if n is None else n, "draws, or None for one")
        return self._drawn(fresh_seed(generator, outline_of(self.mode)), n)

    @torch.no_grad()
    def _drawn(self, seed: int, n: int | None) -> dict[str, Tensor]:
        self.require_weights()
        self.require_proper()
        drawn = self.curvature.sample(self.mode, self.settings, seed=seed, n=n, dtypes=self.draw_types())
        return self._with_padding(drawn)

    def log_prob(self, params: Named) -> Tensor:
        """log q(θ) of weights by name, summed in float64; leading dimensions, as `sample(n)` makes, stay."""
        self.require_weights()
        self.require_proper()
        shapes = self.shapes
        if params.keys() != shapes.keys():
            missing, unknown = sorted(shapes.keys() - params.keys()), sorted(params.keys() - shapes.keys())
            raise MatchError(f"log_prob needs every parameter once: missing {missing[:4]}, unknown {unknown[:4]}")
        first = params[next(iter(shapes))]
        leading = first.shape[: first.dim() - len(next(iter(shapes.values())))]
        wrong = [name for name, shape in shapes.items() if params[name].shape != (*leading, *shape)]
        if wrong:
            raise MatchError(f"{wrong[:4]}: expected the parameters' shapes, behind the same leading dimensions")
        squared = self.curvature.squared_distance(params, self.mode, self.settings)
        return -0.5 * (squared + self.n_weights * math.log(2 * math.pi) - self.curvature.log_det(self.settings))

    def replace(self, **changes: Any) -> Self:
        """A new one with another n_data, prior_precision, power, batch_size, form or scale."""
        if unknown := sorted(changes.keys() - {*SETTING_NAMES}):
            raise SettingError(f"cannot replace {unknown}; the settings are {', '.join(SETTING_NAMES)}")
        if "prior_precision" in changes:
            if isinstance(changes["prior_precision"], CovariantPrior):
                raise SettingError(f"{type(changes['prior_precision']).__name__} needs a model: give it to a Posterior")
            prior = prior_by_name(changes["prior_precision"], outline_of(self.mode))
            changes = {"covariant": False, "default_prior": False, **changes, "prior_precision": prior}
        return replace(self, settings=replace(self.settings, **changes))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same on another device or in another floating type; a model stays where it is."""
        if dtype is not None and dtype not in (torch.float32, torch.float64):
            raise SettingError(f"a posterior is in float32 or float64, not {dtype}; draws follow the parameters")
        return self.each(lambda tensor: tensor.to(device=device, dtype=dtype))

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor changed."""
        prior = {name: change(d) if isinstance(d, Tensor) else d for name, d in self.prior_precision.items()}
        return replace(
            self,
            mode={name: change(theta) for name, theta in self.mode.items()},
            curvature=self.curvature.each(change),
            settings=replace(self.settings, prior_precision=prior),
        )

    def __add__(self, later: GaussianWeights) -> GaussianWeights:
        """The precisions of both around the mean of `later`, and the prior once; see `weights.sums.summed`.

        `later` must have been read after training that was anchored to this one: its mean is then that of both data
        sets.
        """
        if not isinstance(later, GaussianWeights):
            return NotImplemented
        self.require_whole("a sum of posteriors")
        later.require_whole("a sum of posteriors")
        if not self.mode.keys() & later.mode.keys():
            raise MatchError("the posteriors have no parameter in common: add those of one model, the later one last")
        network = later.network_tensors()
        gone = [name for name in self.mode if network is not None and name not in network]
        mode = {**later.mean, **{n: mu for n, mu in self.mean.items() if n not in later.mode and n not in gone}}
        for name in (name for name in self.mode if name in later.mode):
            check_growth(name, self.mode[name].shape, mode[name].shape, "the first posterior", "the second")
        curvature, settings = summed([(q.curvature, q.settings) for q in (self, later)], mode)
        omitted = {name: reason for name, reason in later.omitted.items() if name not in mode}
        omitted |= dict.fromkeys(gone, "the model has no such parameter any more")
        padding = {name: row for name, row in {**self.padding, **later.padding}.items() if name in mode}
        types = {**(self.dtypes or {}), **(later.dtypes or {})}
        types = {name: types.get(name, mu.dtype) for name, mu in mode.items()}
        gaussian: Any = {"mode": mode, "curvature": curvature, "settings": settings, "omitted": omitted}
        return replace(later, **gaussian, origin=UNKNOWN, padding=padding, dtypes=types, source=None)

    def save(self, path: AnyPath, *, weights: bool = True, compress: str | None = None) -> None:
        """Write one safetensors file, tensor by tensor, in place of an older one once complete.

        Of a sharded posterior every process must call it; the first one gathers the tensors, and writes.

        Args:
            weights: False leaves out θ_t, for a file beside the weights, which stands for their optimiser state.
            compress: `"factored"`, rows and columns of v̂ alone: next to no bytes, and coarser.
        """
        if self.is_sharded:
            first = is_first_rank()

            def gathered(tensor: Tensor) -> Tensor:
                full = whole(tensor)
                # The others keep one number of each.
                return full.cpu() if first else torch.zeros((), dtype=full.dtype).expand(full.shape)

            q = self.each(gathered)
            on_first_rank(lambda: q.save(path, weights=weights, compress=compress))
            return
        tensors, header = self.packed(weights=weights, compress=compress)
        storage.write(path, outline_of(tensors), header, load=tensors.__getitem__)

    def export(self, out: AnyPath, *, compress: str | None = None) -> None:
        """`save` without the weights, to publish beside them; warns where the curvature is too young to be of use."""
        require_safetensors(out)
        self.save(out, weights=False, compress=compress)
        readers.warn_of_memory(self.origin, "the network" if self.source is None else self.source.path.name)

    def packed(self, *, weights: bool = True, compress: str | None = None) -> tuple[Named, dict[str, Any]]:
        """What a file holds: tensors under `role.parameter` names, and a header of plain data."""
        self.require_weights()
        settings, plain = self.settings, weights and compress is None
        numbers = {name: delta for name, delta in settings.prior_precision.items() if not isinstance(delta, Tensor)}
        header = {
            # Releases that know the first format alone refuse what is not plain.
            "format": storage.FORMAT_VERSION if plain else storage.COMPACT_VERSION,
            "version": __version__,
            "structure": self.structure,
            "inputs": {n: [side.bias, side.inputs_first] for n, side in self.curvature.inputs.items()} or None,
            "parameters": list(self.mode),
            "settings": {key: value for key, value in vars(settings).items() if value not in (None, False)}
            | {"prior_precision": numbers},
            **self.origin.header(),
            "omitted": dict(self.omitted),
            "has_weights": weights,
            "compress": compress,
        }
        return tensors_of(
            self.mode, self.curvature, settings.prior_precision, weights=weights, compress=compress
        ), header

    def network_tensors(self) -> Named | None:
        """Every tensor of the network by name; None where only those of the Gaussian are known."""
        return None if self.source is None else self.source.weights

    def __repr__(self) -> str:
        over = f"{type(self.model).__name__}, " if hasattr(self, "model") else ""
        return (
            f"{type(self).__name__}({over}{self.structure}, {self.n_weights:,} weights in {len(self.mode)} "
            f"parameters, N={self.n_data:g}, power={self.settings.power:g}, form={self.settings.form!r})"
        )

    def _with_padding(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights by name, which are written to, with θ in the rows that stand for padding."""
        for name, row in self.padding.items():
            theta = self.mode[name]
            # A process may have a part of the rows, or none of them.
            target, source = own_part(named[name]), own_part(theta)
            at = row - (box(theta)[0][0] if is_sharded(theta) else 0)
            if 0 <= at < len(source):
                target.select(target.dim() - source.dim(), at).copy_(source[at].detach())
        return named

    def require_proper(self) -> None:
        """Raise unless every weight has a finite variance."""
        if flat := self.curvature.flat_weights(self.settings):
            name, count = next(iter(flat.items()))
            raise ImproperError(
                f"{sum(flat.values())} weights have v = 0 and prior precision 0, so their variance is infinite (first "
                f"{name!r}: {count} of {self.shapes[name].numel()}): posterior.replace(prior_precision=1.0)"
            )

    def require_weights(self) -> None:
        """Raise where it was read from a file without weights."""
        if not self.has_weights:
            raise FileError("the file has no weights: open the one that has them, with this one as optimizer_path=")

    def require_whole(self, what: str) -> None:
        """Raise where the posterior is sharded, for `what` needs whole tensors."""
        if self.is_sharded:
            raise SettingError(
                f"{what} needs whole tensors, and this posterior is sharded over processes: use "
                "posterior.gathered(model) with a plain model of the same architecture, on every process alike"
            )


def of_match(
    match: Match,
    n_data: float,
    *,
    prior_precision: Prior | None = None,
    power: float = 0.5,
    batch_size: int | None = None,
    structure: str = "diagonal",
    curvature: Curvature | None = None,
    gradients: Named | None = None,
) -> GaussianWeights:
    """The Gaussian of parameters matched to optimiser states; a prior that follows the weights is left to them.

    Without `curvature`, which has v̂ of them in memory, tensors are read, and checked, when they are accessed. With
    recorded `gradients` these stand for the optimiser's state.
    """
    batch_size, prior = readers.batch_size_or_tracked(match, batch_size), prior_precision
    settings = Settings(n_data, {}, power, batch_size, covariant=isinstance(prior, CovariantPrior))
    _warn_of_batches(settings, match)
    entries = {entry.name: entry for entry in match.entries}
    types = {name: entry.parameter.dtype for name, entry in entries.items()}
    like = {name: meta(tuple(e.parameter.shape), readers.working_dtype(types[name])) for name, e in entries.items()}

    def moment(name: str) -> Tensor:
        return readers.read_match(replace(match, entries=(entries[name],))).second_moment[name]

    omitted: Mapping[str, str] = match.omitted
    moments: Named = Lazy(like, moment)
    if curvature is not None:
        omitted, moments = curvature.omitted, curvature.second_moment
        like = dict(moments)
    outline = {name: meta(tuple(v.shape), v.dtype) for name, v in like.items()}
    mode = Lazy(outline, lambda name: entries[name].weight.to(outline[name].dtype))
    decays = {name: entries[name].weight_decay for name in like}
    if prior is None or isinstance(prior, CovariantPrior):
        # N × the weight decay, and 1 where there is none.
        implied = {name: settings.n_data * decay or 1.0 for name, decay in decays.items()}
        settings = replace(settings, prior_precision=prior_by_name(implied, like), default_prior=0.0 in decays.values())
    else:
        settings = replace(settings, prior_precision=prior_by_name(prior, like))
    diagonal = built(structure, match, moments, gradients)
    return GaussianWeights(mode, diagonal, settings, omitted, origin=readers.origin_of(match), dtypes=types)


def _warn_of_batches(settings: Settings, match: Match) -> None:
    """Warn where n_data looks like the number of batches, for which 1 and round numbers are not taken."""
    n, size = settings.n_data, settings.batch_size
    steps = max((entry.steps or 0 for entry in match.entries), default=0)
    # Whole epochs of n examples, the last batch of them kept or dropped.
    epochs = size is not None and any(not steps % max(length, 1) for length in (n // size, -(-n // size)))
    if size is not None and 1 < n < size:
        sign = f"{n:g} is less than the batch size, {size}"
    elif n >= _FEWEST_BATCHES and n % 10 and steps and not steps % n and not epochs:
        sign = f"the {steps:,.0f} steps of the optimiser are {steps / n:,.0f} times {n:g}"
    else:
        return
    warn(f"give n_data= the number of training examples, len(loader.dataset), not that of the batches: {sign}")


def unpacked(path: AnyPath, tensors: Named, header: Mapping[str, Any], parameters: Named | None) -> GaussianWeights:
    """The Gaussian in a file's tensors and header, placed as the parameters of a model; without one left on disk."""
    kind = str(header.get("structure"))
    if kind == "mixture":
        raise FileError(f"{path} holds a mixture of posteriors: read it with Mixture.load, or save a member by itself")
    if kind not in ("diagonal", "inputs", "kronecker", "low-rank", "low-rank+diagonal"):
        raise FileError(f"{path} holds a {kind!r} posterior, which this version does not know: upgrade bayesadam")
    with damage_named(path, "Posterior.save"):
        names, numbers = list(header["parameters"]), dict(header["settings"])
        stored, has_weights = Stored(path, tensors, names, parameters), bool(header.get("has_weights", True))
        curvature = stored.curvature(kind, header)
        mode = stored.mode(curvature, has_weights=has_weights)
        if not names or {name: theta.shape for name, theta in outline_of(mode).items()} != curvature.shapes():
            raise stored.damaged("its weights and its second moments are not of the same shapes")
        plain, keys = dict(numbers.pop("prior_precision")), {name: f"prior_precision.{name}" for name in names}
        prior = {name: tensors[key] if key in tensors else plain[name] for name, key in keys.items()}
        settings = Settings(**numbers, prior_precision=prior_by_name(prior, outline_of(mode)))
        omitted, origin = dict(header.get("omitted", {})), Origin.of_header(header)
    has_weights = has_weights or parameters is not None
    return GaussianWeights(mode, curvature, settings, omitted, origin=origin, has_weights=has_weights)


def is_saved(path: AnyPath | Checkpoint, optimizer_path: AnyPath | None = None) -> bool:
    """Whether a file is a saved posterior, and not the state of weights in another file."""
    if isinstance(path, Checkpoint):
        return path.optimizer_path is None and path.format == "posterior"
    return optimizer_path is None and readers.format_of(Path(path)).name == "posterior"


def require_safetensors(out: AnyPath) -> None:
    """Refuse a path of another kind of file."""
    if Path(out).suffix != ".safetensors":
        raise FileError(f"{out}: it is written as safetensors: end the path in .safetensors")
