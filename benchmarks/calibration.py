"""What calibration does on real MNIST: NLL, ECE, and telling Fashion-MNIST apart, before and after.

    BAYESADAM_DATA=... python benchmarks/calibration.py [--epochs 5] [--out out/bench]

784-400-400-10 with ReLU, plain Adam, batch 128, trained on 55,000 images; 5,000 held out calibrate, the 10,000 test
images score. Fashion-MNIST's 10,000 test images are the strangers, told by predictive entropy.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import scores
from bayesadam.data.idx import read_idx
from bayesadam.predict import CollapsedPredictionWarning

N_TRAIN, BATCH = 55_000, 128
PRIOR = 100.0


def images(path: Path) -> Tensor:
    return torch.from_numpy(read_idx(path).copy()).float().flatten(1) / 255


def labels(path: Path) -> Tensor:
    return torch.from_numpy(read_idx(path).copy()).long()


def trained(x: Tensor, y: Tensor, epochs: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model, optimizer


def scored(probs: Tensor, strangers: Tensor, y: Tensor) -> dict[str, float]:
    def entropy(p: Tensor) -> Tensor:
        return torch.special.entr(p).sum(dim=-1)

    picked = probs.gather(1, y[:, None]).clamp(min=torch.finfo(probs.dtype).tiny)
    return {
        "accuracy": scores.accuracy(probs, y),
        "nll": -float(picked.log().mean()),
        "ece": scores.ece(probs, y),
        "brier": scores.brier(probs, y),
        "auroc": scores.auroc(entropy(probs), entropy(strangers)),
        "fpr95": scores.fpr95(entropy(probs), entropy(strangers)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    if "BAYESADAM_DATA" not in os.environ:
        parser.error("set BAYESADAM_DATA to the folder that holds mnist/ and fashion-mnist/")
    root = Path(os.environ["BAYESADAM_DATA"])
    x = images(root / "mnist/train-images-idx3-ubyte.gz")
    y = labels(root / "mnist/train-labels-idx1-ubyte.gz")
    x_test = images(root / "mnist/t10k-images-idx3-ubyte.gz")
    y_test = labels(root / "mnist/t10k-labels-idx1-ubyte.gz")
    x_far = images(root / "fashion-mnist/t10k-images-idx3-ubyte.gz")
    held_out = (x[N_TRAIN:], y[N_TRAIN:])
    model, optimizer = trained(x[:N_TRAIN], y[:N_TRAIN], options.epochs)

    results: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        results["MAP network"] = scored(model(x_test).softmax(-1), model(x_far).softmax(-1), y_test)
    raw = ba.Posterior.from_optimizer(model, optimizer, N_TRAIN, prior_precision=PRIOR)
    for method in ("linearised", "sampled"):
        began = time.perf_counter()
        tuned = ba.calibrate(raw, held_out, likelihood="classification", predictive=method)
        seconds = time.perf_counter() - began
        print(
            f"calibrate(predictive={method!r}): {seconds:.1f} s, scale {tuned.settings.scale:.3g}, "
            f"prior precision {tuned.prior_precision['0.weight']:.3g}"
        )
        for label, posterior in (("before", raw), ("after", tuned)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CollapsedPredictionWarning)
                near, far = (
                    posterior.predict(
                        images_, likelihood="classification", method=method, generator=torch.Generator().manual_seed(0)
                    ).probs
                    for images_ in (x_test, x_far)
                )
            results[f"{method}, {label}"] = scored(near, far, y_test)
    columns = ("accuracy", "nll", "ece", "brier", "auroc", "fpr95")
    print(f"{'':22s}" + "".join(f"{column:>10s}" for column in columns))
    for name, row in results.items():
        print(f"{name:22s}" + "".join(f"{row[column]:10.4f}" for column in columns))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "calibration.json").write_text(json.dumps(results, indent=2) + "\n")
    change = results["linearised, after"]["nll"] / results["MAP network"]["nll"]
    same = results["linearised, after"]["accuracy"] == results["MAP network"]["accuracy"]
    print(f"accuracy unchanged when linearised: {same}")
    print(f"NLL after calibration over the MAP network's: {change:.3f} (target: at most 1)")


if __name__ == "__main__":
    main()
