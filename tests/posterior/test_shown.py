"""What `print(posterior)` says: the settings where people look for them, before and after calibration."""

from __future__ import annotations

import torch

import bayesadam as ba
from cases import mlp


def trained(seed: int = 0) -> tuple[ba.Posterior, torch.Tensor]:
    torch.manual_seed(seed)
    model, x = mlp(2, 4, 1), torch.randn(60, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
    return ba.Posterior.from_optimizer(model, optimizer, n_data=60_000, batch_size=60, likelihood="regression"), x


def lines(of: object) -> dict[str, str]:
    title, *rest = str(of).splitlines()
    assert title.startswith(("Posterior over ", "Mixture over "))
    # Aligned: every value begins in the same column.
    starts = {len(line) - len(line[2:].split("  ", 1)[1].lstrip()) for line in rest}
    assert len(starts) == 1
    return {name.strip(): value.strip() for name, value in (line.strip().split("  ", 1) for line in rest)}


def test_settings_are_properties_and_printed():
    q, _ = trained()
    assert (q.n_data, q.scale, q.power, q.batch_size, q.form, q.temperature) == (60_000, 1.0, 0.5, 60, "map", 1.0)
    assert set(q.prior_precision.values()) == {6_000.0}
    assert q.noise_variance is None
    assert lines(q) == {
        "structure": f"diagonal, {q.n_weights} weights in 4 parameters",
        "data": "N = 60,000, B = 60",
        "curvature": "v̂^0.5, map form",
        "likelihood": "regression",
        "scale": "s = 1",
        "prior precision": "δ = 6e+03",
        "leverage": "column sums of the second moment, relative to each batch itself",
        "calibrated": "no: calibrate(posterior, held_out, likelihood=...)",
    }
    prior = {name: float(number) for number, name in enumerate(q.mode)}
    assert lines(q.replace(prior_precision=prior, temperature=2.0))["prior precision"] == "δ = 0 to 3"
    assert lines(q.replace(temperature=2.0))["temperature"] == "T = 2"
    # One line where a value is shown among others.
    assert "\n" not in repr(q)


def test_calibration_is_shown_before_and_after(tmp_path):
    q, x = trained()
    y = x[:, :1] + 0.1 * torch.randn(60, 1, generator=torch.Generator().manual_seed(1))
    tuned = ba.calibrate(q, (x, y), likelihood="regression")
    shown = lines(tuned)
    assert shown["scale"] == f"s = 1 → {tuned.scale:.3g}"
    delta = next(iter(tuned.prior_precision.values()))
    assert shown["prior precision"] == f"δ = 6e+03 → {delta:.3g}"
    assert shown["noise variance"] == f"σ² = not known → {float(tuned.noise_variance):.3g}"
    assert shown["calibrated"].startswith("regression: fitted by evidence to 60 held-out examples")
    report = tuned.calibration
    assert report is not None
    parts = (f"{name} {value:.4f} ± {report.errors[name]:.4f}" for name, value in report.nll.items())
    assert shown["held-out NLL"] == ", ".join(parts)
    assert set(report.nll) == {"calibrated"}
    path = tmp_path / "posterior.safetensors"
    tuned.save(path)
    assert str(ba.Posterior.load(path, q.model)) == str(tuned)
    # Once more: what was known is now the noise before.
    again = ba.calibrate(tuned, (x, y), likelihood="regression")
    assert lines(again)["noise variance"].startswith(f"σ² = {float(tuned.noise_variance):.3g}")


def test_a_mixture_shows_the_range_over_its_members():
    (first, x), (second, _) = trained(0), trained(1)
    mixture = ba.Mixture([first, second.replace(scale=4.0)])
    assert lines(mixture)["scale"] == "s = 1 to 4"
    assert lines(mixture)["members"] == "2, weights 0.5, 0.5"
    tuned = ba.calibrate(mixture, (x, x[:, :1]), likelihood="regression")
    scales = sorted(member.scale for member in tuned)
    assert lines(tuned)["scale"] == f"s = 1 to 4 → {scales[0]:.3g} to {scales[1]:.3g}"


def test_where_leverage_is_from_is_shown():
    q, x = trained()
    found = ba.calibrate(q, (x, x[:, :1]))
    assert lines(found)["leverage"] == "held-out inputs, relative to 60 inputs"
    assert lines(q.relative_to([x[:10]]))["leverage"] == "column sums of the second moment, relative to 10 inputs"
    recorder = ba.Recorder.from_batches(q.model, [(x, x[:, :1])] * 100, torch.nn.functional.mse_loss, keep=20)
    recorded = ba.Posterior.from_recorder(q.model, recorder, n_data=60)
    assert lines(recorded)["leverage"] == "the right factors of gradients, relative to each batch itself"


def test_poor_leverage_is_told_with_its_remedy():
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 2)).square().mean().backward()
    optimizer.step()
    shown = lines(ba.Posterior.from_optimizer(model, optimizer, n_data=8))["leverage"]
    assert shown.endswith("poor after LayerNorm: calibrate on held-out inputs, or record gradients")
