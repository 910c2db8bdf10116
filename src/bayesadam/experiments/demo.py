"""The demo: a small network trained by AdamW on the toy regression, and what its optimiser's state knows."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor, nn

from bayesadam import Diagnosis, Posterior, curvature, doctor
from bayesadam.data.toy import N_TRAIN, TEST_INTERVAL, TRAIN_INTERVAL, ToyData, toy_grid, toy_points
from bayesadam.errors import SettingError
from bayesadam.experiments import plots
from bayesadam.experiments.run import Run, Track, generator, silent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# How many of the draws the picture shows as lines.
_LINES = 30
_FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


@dataclass(frozen=True)
class DemoSettings:
    """Everything but the seed that the demo's results depend on.

    Attributes:
        n_points: toy points, for training and held out together.
        n_held_out: how many of them choose the scale and are not trained on.
        n_test: fresh points in the range of the data, for the scores.
        width: units in each of the two hidden layers.
        steps: mini-batches.
        batch_size: points in each, drawn with replacement.
        lr: the learning rate at the start; it falls to 0 along a cosine.
        weight_decay: AdamW's λ; N λ is the prior precision.
        draws: weight draws behind every prediction.
        log10_scales: the first and the last of the scales tried, as powers of ten.
        n_scales: how many are tried, evenly spaced between them.
    """

    n_points: int = N_TRAIN
    n_held_out: int = 50
    n_test: int = 1000
    width: int = 50
    steps: int = 2000
    batch_size: int = 32
    lr: float = 1e-2
    weight_decay: float = 1e-2
    draws: int = 200
    log10_scales: tuple[float, float] = (0.0, 6.0)
    n_scales: int = 25

    def __post_init__(self) -> None:
        # A variance needs two draws, a standard error two points.
        least = {"n_test": 1, "width": 1, "steps": 1, "batch_size": 1, "n_scales": 1, "draws": 2, "n_held_out": 2}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise SettingError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        if self.n_points <= self.n_held_out:
            raise SettingError(f"n_points ({self.n_points}) must exceed n_held_out ({self.n_held_out})")


@dataclass(frozen=True)
class ParameterSummary:
    """The signal to noise |μ|/σ of one parameter's weights, and the share of them with v = 0."""

    name: str
    shape: tuple[int, ...]
    weights: int
    snr_median: float
    snr_q05: float
    snr_q95: float
    share_v_zero: float


@dataclass(frozen=True, eq=False)
class Demo:
    """What the demo found: all that its picture, its table and its metrics show.

    Attributes:
        train: the points trained on.
        held_out: the points that chose the scale.
        grid: the test grid, y the function without noise.
        grid_draws: the functions drawn, (draws, grid points).
        noise_variance: σ², from the residuals of the training points.
        posterior: the scaled posterior.
        second_moment: v̂ by parameter name.
        diagnosis: the doctor's.
        scales: the scales tried.
        nlls: the held-out score of each.
        summaries: one per parameter.
        scores: in-range RMSE, NLL and coverage on the test points.
        pruning: test RMSE at each of the fractions, by ranking.
    """

    train: ToyData
    held_out: ToyData
    grid: ToyData
    grid_draws: Tensor
    noise_variance: float
    posterior: Posterior
    second_moment: Mapping[str, Tensor]
    diagnosis: Diagnosis
    scales: tuple[float, ...]
    nlls: tuple[float, ...]
    summaries: tuple[ParameterSummary, ...]
    scores: Mapping[str, float]
    pruning: Mapping[str, tuple[float, ...]]


# --- the work -------------------------------------------------------------------------------------------------------


def make_network(width: int, seed: int) -> nn.Sequential:
    """1-width-width-1 with ReLU; torch's global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            OrderedDict(
                hidden1=nn.Linear(1, width),
                relu1=nn.ReLU(),
                hidden2=nn.Linear(width, width),
                relu2=nn.ReLU(),
                output=nn.Linear(width, 1),
            )
        )


def train_network(
    model: nn.Module, data: ToyData, settings: DemoSettings, batches: torch.Generator, track: Track = silent
) -> torch.optim.AdamW:
    """The training loop as anyone would write it; returns the optimiser, whose state is the point of it all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    for _ in track(range(settings.steps), "training with AdamW"):
        batch = torch.randint(len(data), (settings.batch_size,), generator=batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data.x[batch]), data.y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return optimizer


@torch.no_grad()
def draw_functions(posterior: Posterior, x: Tensor, n: int, draws: torch.Generator) -> Tensor:
    """f(x; θ) for n draws θ ~ q, shape (n, points)."""

    def forward(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(posterior.model, weights, (x,))  # type: ignore[no-any-return]

    return torch.vmap(forward)(posterior.sample(n, generator=draws)).squeeze(-1)


def gaussian_nll(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """−log N(y; mean, variance) for each point, in nats."""
    return 0.5 * (torch.log(2 * math.pi * variance) + (y - mean).square() / variance)


def scaled(posterior: Posterior, scale: float) -> Posterior:
    """s (N v̂^(1/2) + δ) for the precision N v̂^(1/2) + δ of an unscaled posterior.

    The loss is a squared error, which is a log-likelihood but for an unknown factor. That factor is missing from the
    data's part and from the prior's part of the precision alike.
    """
    prior = {name: scale * delta for name, delta in posterior.prior_precision.items()}
    return posterior.replace(scale=scale, prior_precision=prior)


def choose_scale(
    posterior: Posterior,
    data: ToyData,
    noise_variance: float,
    scales: Sequence[float],
    draws: int,
    seed: int,
    track: Track = silent,
) -> tuple[float, tuple[float, ...]]:
    """The widest posterior that held-out points cannot tell from the best, and every scale's score.

    The score is the mean of −log N(y; f̄(x), var f(x) + σ²), f̄ and var over weight draws. Points in the range of the
    data hardly resist a posterior that is too narrow, and the minimum often lies where no uncertainty is left. Hence
    the smallest scale whose score is within one standard error of the minimum (Breiman and others, 1984).

    Args:
        posterior: the unscaled posterior.
        data: the held-out points.
        noise_variance: σ².
        scales: the scales to try.
        draws: weight draws for each.
        seed: the same draws of noise serve every scale, so that only the scale differs.
        track: shows progress.
    """
    rows = []
    for scale in track(scales, "choosing the scale"):
        functions = draw_functions(scaled(posterior, scale), data.x, draws, torch.Generator().manual_seed(seed))
        rows.append(gaussian_nll(data.y.squeeze(1), functions.mean(0), functions.var(0) + noise_variance))
    table = torch.stack(rows)
    # A draw that overflows is the worst score there is, not an undefined one.
    means = table.mean(1).nan_to_num(nan=math.inf)
    best = int(means.argmin())
    limit = means[best] + table[best].std() / math.sqrt(len(data))
    chosen = min(scale for scale, mean in zip(scales, means, strict=True) if mean <= limit)
    return chosen, tuple(means.tolist())


def summarise(posterior: Posterior, second_moment: Mapping[str, Tensor]) -> tuple[ParameterSummary, ...]:
    """Quantiles of the signal to noise, by parameter."""
    summaries = []
    for name, snr in posterior.snr().items():
        low, median, high = torch.quantile(snr, torch.tensor([0.05, 0.5, 0.95])).tolist()
        dead = float((second_moment[name] == 0).float().mean())
        summaries.append(ParameterSummary(name, tuple(snr.shape), snr.numel(), median, low, high, dead))
    return tuple(summaries)


def in_range_scores(y: Tensor, functions: Tensor, noise_variance: float) -> dict[str, float]:
    """RMSE of the mean, NLL, and the share of points within 1.96 standard deviations, noise included."""
    mean, variance = functions.mean(0), functions.var(0) + noise_variance
    error = y - mean
    return {
        "rmse": float(error.square().mean().sqrt()),
        "nll": float(gaussian_nll(y, mean, variance).mean()),
        "coverage95": float((error.abs() <= 1.96 * variance.sqrt()).float().mean()),
        "function_std": float(functions.std(0).mean()),
    }


@torch.no_grad()
def pruned_rmse(
    posterior: Posterior, data: ToyData, scores: Mapping[str, Tensor], fractions: Sequence[float]
) -> tuple[float, ...]:
    """RMSE of the mean network after the given fractions of its weights, lowest score first, are set to 0."""
    flat = torch.cat([score.flatten() for score in scores.values()])
    # Places in the order of removal; many scores are equal, 0 for every dead weight, so a threshold would not do.
    places = flat.argsort(stable=True).argsort()
    place = {
        name: part.view_as(scores[name])
        for name, part in zip(scores, torch.split(places, [score.numel() for score in scores.values()]), strict=True)
    }
    errors = []
    for fraction in fractions:
        weights = {name: mean * (place[name] >= fraction * len(flat)) for name, mean in posterior.mean.items()}
        prediction = torch.func.functional_call(posterior.model, weights, (data.x,))
        errors.append(float((prediction - data.y).square().mean().sqrt()))
    return tuple(errors)


def rankings(posterior: Posterior) -> dict[str, dict[str, Tensor]]:
    """Scores to prune by.

    With the prior in σ a dead weight has |μ|/σ = |μ| δ^(1/2), as if it had a signal; the paper's ranking has δ = 0,
    where it has none.
    """
    return {
        "snr": posterior.replace(prior_precision=0.0).snr(),
        "snr-with-prior": posterior.snr(),
        "magnitude": {name: mean.abs() for name, mean in posterior.mean.items()},
    }


def compute(settings: DemoSettings, seed: int, track: Track = silent) -> Demo:
    """The whole demo but for its output; the same settings and seed give the same numbers."""
    points = generator(seed, "data")
    held_out, train = toy_points(settings.n_points, generator=points).split(settings.n_held_out)
    test = toy_points(settings.n_test, generator=points)
    grid = toy_grid()

    model = make_network(settings.width, generator(seed, "network").initial_seed())
    optimizer = train_network(model, train, settings, generator(seed, "batches"), track)
    with torch.no_grad():
        noise_variance = float((model(train.x) - train.y).square().mean())

    posterior = Posterior.from_optimizer(model, optimizer, n_data=len(train))
    scales = tuple(torch.logspace(*settings.log10_scales, settings.n_scales, dtype=torch.float64).tolist())
    scale, nlls = choose_scale(
        posterior, held_out, noise_variance, scales, settings.draws, generator(seed, "scale").initial_seed(), track
    )
    posterior = scaled(posterior, scale)
    second_moment = curvature.read_optimizer(model, optimizer).second_moment
    return Demo(
        train=train,
        held_out=held_out,
        grid=grid,
        grid_draws=draw_functions(posterior, grid.x, settings.draws, generator(seed, "draws")),
        noise_variance=noise_variance,
        posterior=posterior,
        second_moment=second_moment,
        diagnosis=doctor(model, optimizer, n_data=len(train)),
        scales=scales,
        nlls=nlls,
        summaries=summarise(posterior, second_moment),
        scores=in_range_scores(
            test.y.squeeze(1),
            draw_functions(posterior, test.x, settings.draws, generator(seed, "draws")),
            noise_variance,
        ),
        pruning={
            name: pruned_rmse(posterior, test, ranking, _FRACTIONS) for name, ranking in rankings(posterior).items()
        },
    )


# --- what is shown of it --------------------------------------------------------------------------------------------


def results(demo: Demo) -> dict[str, Any]:
    """The numbers for `metrics.json`."""
    return {
        "in_range": dict(demo.scores),
        "noise_std": math.sqrt(demo.noise_variance),
        "n_data": demo.posterior.n_data,
        "scale": demo.posterior.settings.scale,
        "scales": {"scale": demo.scales, "held_out_nll": demo.nlls},
        "parameters": [asdict(summary) for summary in demo.summaries],
        "pruning": {"fractions": _FRACTIONS, "rmse": dict(demo.pruning)},
        "doctor": demo.diagnosis.codes(),
    }


def table(demo: Demo) -> Table:
    """One row per parameter."""
    view = Table(title="Signal to noise |μ|/σ of the weights", title_justify="left")
    view.add_column("parameter")
    for heading in ("shape", "weights", "median", "5 %", "95 %", "v = 0"):
        view.add_column(heading, justify="right")
    for row in demo.summaries:
        shape = " × ".join(map(str, row.shape))
        numbers = (f"{value:.3g}" for value in (row.snr_median, row.snr_q05, row.snr_q95))
        view.add_row(row.name, shape, f"{row.weights:,}", *numbers, f"{row.share_v_zero:.0%}")
    return view


def score_line(demo: Demo) -> str:
    """The scores in the range of the data, in words."""
    scores = demo.scores
    return (
        f"On fresh points in the range of the data: RMSE {scores['rmse']:.3f}, NLL {scores['nll']:.2f} nats, "
        f"{scores['coverage95']:.1%} of them in the 95 % interval "
        f"(noise {math.sqrt(demo.noise_variance):.3f}, scale {demo.posterior.settings.scale:.3g})"
    )


def picture(demo: Demo) -> Figure:
    """Predictions, signal to noise and pruning, in three panels."""
    with plots.house_style():
        figure = plots.new_figure(12, 6.4)
        panels = figure.subplot_mosaic([["functions", "snr"], ["functions", "pruning"]], width_ratios=[1.4, 1])
        figure.suptitle(
            f"A posterior over {demo.posterior.n_weights:,} weights, read off the state of AdamW",
            fontsize=13,
            fontweight="bold",
            x=0.01,
            ha="left",
        )
        _draw_functions(panels["functions"], demo)
        _draw_snr(panels["snr"], demo)
        _draw_pruning(panels["pruning"], demo)
    return figure


def _draw_functions(axes: Axes, demo: Demo) -> None:
    functions = demo.grid_draws
    low, high = TRAIN_INTERVAL
    axes.axvspan(low, high, color=plots.FAINT, alpha=0.35, linewidth=0)
    plots.predictive_panel(
        axes,
        demo.grid.x.squeeze(1),
        functions.mean(0),
        (functions.var(0) + demo.noise_variance).sqrt(),
        draws=list(functions[:_LINES]),
        truth=demo.grid.y.squeeze(1),
        points=(demo.train.x.squeeze(1), demo.train.y.squeeze(1)),
    )
    axes.set(title="(a) Functions drawn from the posterior", xlabel="x", ylabel="y", xlim=TEST_INTERVAL)
    axes.legend(loc="upper left")
    axes.text(
        0.985,
        0.02,
        "Grey: where the data are. Beyond them a diagonal\nposterior is too sure, and the truth leaves its band.",
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        color=plots.MUTED,
        fontsize=8,
    )


def _draw_snr(axes: Axes, demo: Demo) -> None:
    dead = {name: v == 0 for name, v in demo.second_moment.items()}
    plots.strip_panel(axes, demo.posterior.snr(), marked=dead, labels=("a weight", "v = 0: the prior alone"))
    axes.set(title="(b) Signal to noise of each weight", xlabel="|μ| / σ")


def _draw_pruning(axes: Axes, demo: Demo) -> None:
    labels = {
        "snr": "signal to noise without the prior (δ = 0, the paper's)",
        "snr-with-prior": "signal to noise as in (b)",
        "magnitude": "magnitude",
    }
    plots.pruning_panel(axes, _FRACTIONS, demo.pruning, labels)
    axes.set(title="(c) Removing weights", xlabel="weights set to 0 (%)", ylabel="test RMSE", ylim=(0, None))
    axes.legend(loc="upper left", title="lowest first by", alignment="left")


def run_demo(*, seed: int, out: Path, quiet: bool, settings: DemoSettings | None = None) -> tuple[Path, ...]:
    """The `demo` command."""
    settings = settings or DemoSettings()
    run = Run("demo", seed, out, asdict(settings), quiet=quiet)
    run.prepare()
    with run.progress() as track:
        demo = compute(settings, seed, track)
        figure = picture(demo)
    run.show(str(demo.diagnosis), table(demo), score_line(demo))
    return run.finish({"demo.png": plots.png(figure)}, results(demo))
