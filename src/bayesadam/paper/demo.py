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

from bayesadam import Diagnosis, Posterior, calibrate, doctor, pruning_masks, readers, scores
from bayesadam.data.toy import N_TRAIN, TEST_INTERVAL, TRAIN_INTERVAL, ToyData, toy_grid, toy_points
from bayesadam.errors import SettingError
from bayesadam.inspect import quantiles
from bayesadam.likelihoods import NumericPredictive
from bayesadam.paper import plots
from bayesadam.paper.run import Run, Track, generator, new_table, silent
from bayesadam.pruning import Ranking

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)

# The p-value from which on a point counts as novel.
_FLAGGED = 0.05


@dataclass(frozen=True)
class DemoSettings:
    """Everything but the seed that the demo's results depend on.

    Attributes:
        n_points: toy points, for training and held out together.
        n_held_out: how many of them calibrate the posterior and are not trained on.
        n_test: fresh points in the range of the data, for the scores.
        lr: the learning rate at the start; it falls to 0 along a cosine.
        weight_decay: AdamW's λ; N λ is the prior precision.
    """

    n_points: int = N_TRAIN
    n_held_out: int = 50
    n_test: int = 1000
    width: int = 50
    steps: int = 2000
    batch_size: int = 32
    lr: float = 1e-2
    weight_decay: float = 1e-2
    draws: int = 30

    def __post_init__(self) -> None:
        least = {"n_test": 1, "width": 1, "steps": 1, "batch_size": 1, "draws": 2, "n_held_out": 2}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise SettingError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        if self.n_points <= self.n_held_out:
            raise SettingError(f"n_points ({self.n_points}) must exceed n_held_out ({self.n_held_out})")


@dataclass(frozen=True, eq=False)
class Demo:
    """What the demo found: all that its picture, its table and its metrics show.

    Attributes:
        predictive: of the linearised network on the grid, whose y has no noise; with the novelty of every point.
        noise_std: σ of the observations, as calibrated.
        draws: functions drawn from it, (draws, grid points).
        summaries: by parameter, see `summarise`.
        scores: in-range RMSE, NLL and coverage on the test points, and the shares flagged as novel in range and outside.
        pruning: test RMSE at each of the fractions, by ranking.
    """

    train: ToyData
    grid: ToyData
    predictive: NumericPredictive
    draws: Tensor
    noise_std: float
    posterior: Posterior
    second_moment: Mapping[str, Tensor]
    diagnosis: Diagnosis
    summaries: tuple[dict[str, Any], ...]
    scores: Mapping[str, float]
    pruning: Mapping[str, tuple[float, ...]]


def make_network(width: int, seed: int) -> nn.Sequential:
    """1-width-width-1 with ReLU; torch's global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second = nn.Linear(1, width), nn.Linear(width, width)
        layers = {"hidden1": first, "relu1": nn.ReLU(), "hidden2": second, "relu2": nn.ReLU()}
        return nn.Sequential(OrderedDict(layers, output=nn.Linear(width, 1)))


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


def summarise(posterior: Posterior, second_moment: Mapping[str, Tensor]) -> tuple[dict[str, Any], ...]:
    """Quantiles of the signal-to-noise ratio |μ|/σ of each parameter's weights, and the share of them with v = 0."""
    summaries = []
    for name, snr in posterior.snr().items():
        found = zip(("snr_median", "snr_q05", "snr_q95"), quantiles(snr.flatten(), (0.5, 0.05, 0.95)), strict=True)
        dead = float((second_moment[name] == 0).float().mean())
        shape = {"name": name, "shape": tuple(snr.shape), "weights": snr.numel()}
        summaries.append({**shape, **dict(found), "share_v_zero": dead})
    return tuple(summaries)


@torch.no_grad()
def pruned_rmse(posterior: Posterior, data: ToyData, ranking: Ranking, fractions: Sequence[float]) -> tuple[float, ...]:
    """RMSE of the mean network after the given fractions of its weights, lowest score first, are set to 0."""
    errors = []
    for fraction in fractions:
        masks = pruning_masks(posterior, fraction, ranking=ranking)
        weights = {name: mean * masks[name] for name, mean in posterior.mean.items()}
        prediction = torch.func.functional_call(posterior.model, weights, (data.x,))
        errors.append(float((prediction - data.y).square().mean().sqrt()))
    return tuple(errors)


def compute(settings: DemoSettings, seed: int, track: Track = silent) -> Demo:
    """The whole demo but for its output; the same settings and seed give the same numbers."""
    points = generator(seed, "data")
    held_out, train = toy_points(settings.n_points, generator=points).split(settings.n_held_out)
    test = toy_points(settings.n_test, generator=points)
    grid = toy_grid()

    model = make_network(settings.width, generator(seed, "network").initial_seed())
    optimizer = train_network(model, train, settings, generator(seed, "batches"), track)
    posterior = Posterior.from_optimizer(model, optimizer, n_data=len(train))
    posterior = calibrate(posterior, (held_out.x, held_out.y), likelihood="regression")
    source = generator(seed, "draws")
    drawn = posterior.predict(grid.x, predictive="linearised-sampled", n_samples=settings.draws, generator=source)
    assert drawn.draws is not None  # by predictive=
    predictive, tested = posterior.predict(grid.x), posterior.predict(test.x)
    second_moment = readers.read_optimizer(model, optimizer).second_moment
    rmse, nll, coverage = scores.rmse(tested.mean, test.y), scores.nll(tested, test.y), scores.coverage(tested, test.y)
    function_std = float(tested.variance.sqrt().mean())
    outside = (grid.x < TRAIN_INTERVAL[0]) | (grid.x > TRAIN_INTERVAL[1])
    flagged = [
        float((p <= _FLAGGED).double().mean())
        for p in (tested.novelty_pvalue, predictive.novelty_pvalue[outside[:, 0]])
    ]
    return Demo(
        train=train,
        grid=grid,
        predictive=predictive,
        draws=drawn.draws.squeeze(-1),
        noise_std=math.sqrt(float(predictive.noise_variance)),
        posterior=posterior,
        second_moment=second_moment,
        diagnosis=doctor(model, optimizer, n_data=len(train)),
        summaries=summarise(posterior, second_moment),
        scores={"rmse": rmse, "nll": nll, "coverage95": coverage, "function_std": function_std}
        | dict(zip(("flagged_in_range", "flagged_outside"), flagged, strict=True)),
        pruning={ranking: pruned_rmse(posterior, test, ranking, _FRACTIONS) for ranking in ("snr", "magnitude")},
    )


def results(demo: Demo) -> dict[str, Any]:
    """The numbers for `metrics.json`."""
    return {
        "in_range": dict(demo.scores),
        "noise_std": demo.noise_std,
        "n_data": demo.posterior.n_data,
        "scale": demo.posterior.settings.scale,
        "prior_precision": demo.posterior.prior_precision,
        "parameters": demo.summaries,
        "pruning": {"fractions": _FRACTIONS, "rmse": dict(demo.pruning)},
        "doctor": demo.diagnosis.codes(),
    }


def table(demo: Demo) -> Table:
    """One row per parameter."""
    headings = ("parameter", "shape", "weights", "median", "5 %", "95 %", "v = 0")
    view = new_table("Signal-to-noise ratio |μ|/σ of the weights", headings)
    for row in demo.summaries:
        numbers = (f"{row[name]:.3g}" for name in ("snr_median", "snr_q05", "snr_q95"))
        cells = row["name"], " × ".join(map(str, row["shape"])), f"{row['weights']:,}"
        view.add_row(*cells, *numbers, f"{row['share_v_zero']:.0%}")
    return view


def score_line(demo: Demo) -> str:
    """The scores in the range of the data, in words."""
    found, delta = demo.scores, next(iter(demo.posterior.prior_precision.values()))
    return (
        f"On fresh points in the range of the data: RMSE {found['rmse']:.3f}, NLL {found['nll']:.2f} nats, "
        f"{found['coverage95']:.1%} of them in the 95 % interval. As novel as one held-out point in twenty, or more: "
        f"{found['flagged_in_range']:.0%} of them, {found['flagged_outside']:.0%} of points outside. Calibrated: noise {demo.noise_std:.3f}, "
        f"scale {demo.posterior.settings.scale:.3g}, prior precision {float(delta):.3g}"
    )


def picture(demo: Demo) -> Figure:
    """Predictions, novelty, signal-to-noise ratios and pruning, in four panels."""
    title = f"A posterior over {demo.posterior.n_weights:,} weights, read off the state of AdamW"
    dead = {name: v == 0 for name, v in demo.second_moment.items()}
    with plots.house_style():
        figure = plots.new_figure(12, 7.2, title, 13)
        rows: Any = [["functions", "snr"], ["functions", "snr"], ["functions", "pruning"], ["novelty", "pruning"]]
        panels = figure.subplot_mosaic(rows, width_ratios=[1.4, 1])
        _draw_functions(panels["functions"], demo)
        _draw_novelty(panels["novelty"], demo)
        axes = panels["snr"]
        plots.strip_panel(axes, demo.posterior.snr(), marked=dead, labels=("a weight", "v = 0: the prior alone"))
        axes.set(title="(c) Signal-to-noise ratio of each weight", xlabel="|μ| / σ")
        axes = panels["pruning"]
        for ranking, label in (("snr", "signal-to-noise ratio"), ("magnitude", "magnitude")):
            style: Any = {"color": plots.colour(ranking), "markersize": 3, "linewidth": 1.5, "label": label}
            axes.plot([100 * fraction for fraction in _FRACTIONS], demo.pruning[ranking], "o-", **style)
        axes.set(title="(d) Removing weights", xlabel="weights set to 0 (%)", ylabel="test RMSE", ylim=(0, None))
        axes.legend(loc="upper left", title="lowest first by", alignment="left")
    return figure


def _draw_functions(axes: Axes, demo: Demo) -> None:
    axes.axvspan(*TRAIN_INTERVAL, color=plots.FAINT, alpha=0.35, linewidth=0)
    curves = (part.squeeze(1) for part in (demo.grid.x, demo.predictive.mean, demo.predictive.stddev))
    points = (demo.train.x.squeeze(1), demo.train.y.squeeze(1))
    plots.predictive_panel(axes, *curves, draws=list(demo.draws), truth=demo.grid.y.squeeze(1), points=points)
    axes.set(title="(a) Functions drawn from the posterior", xlabel="x", ylabel="y", xlim=TEST_INTERVAL)
    axes.legend(loc="upper left")
    note = (
        "Grey: where the data are. Beyond them a diagonal\nposterior widens too little, and the truth leaves its band."
    )
    place: Any = {"transform": axes.transAxes, "ha": "right", "va": "bottom"}
    axes.text(0.985, 0.02, note, color=plots.MUTED, fontsize=8, **place)


def _draw_novelty(axes: Axes, demo: Demo) -> None:
    axes.axvspan(*TRAIN_INTERVAL, color=plots.FAINT, alpha=0.35, linewidth=0)
    axes.plot(demo.grid.x.squeeze(1), demo.predictive.novelty, color=plots.colour("badam"), linewidth=1.5)
    assert demo.predictive.guarantee is not None  # it is calibrated
    assert demo.predictive.guarantee.novelty is not None
    usual = float(demo.predictive.guarantee.novelty.double().quantile(1 - _FLAGGED))
    axes.axhline(usual, color=plots.MUTED, linewidth=1, linestyle="--", label="exceeded by 5 % of held-out points")
    axes.set(title="(b) Novelty", xlabel="x", ylabel="nats", xlim=TEST_INTERVAL, ylim=(0, None))
    axes.legend(loc="lower right")


def run_demo(*, seed: int, out: Path, quiet: bool, settings: DemoSettings | None = None) -> tuple[Path, ...]:
    """The `demo` command."""
    settings = settings or DemoSettings()
    run = Run("demo", seed, out, asdict(settings), quiet=quiet)
    with run.prepared():
        with run.progress() as track:
            demo = compute(settings, seed, track)
            figure = picture(demo)
        run.show(str(demo.diagnosis), table(demo), score_line(demo))
        return run.finish({"demo.png": plots.png(figure)}, results(demo))
