"""What calibration does on real MNIST: NLL, ECE, and detecting Fashion-MNIST, before and after.

    BAYESADAM_DATA=... python benchmarks/calibration.py [--quick] [--epochs 5] [--out out/bench]

784-400-400-10 with ReLU, plain Adam, batch 128, trained on 55,000 images; 5,000 held out calibrate, the 10,000 test
images score. Fashion-MNIST's 10,000 test images are out of distribution, detected by predictive entropy.
"""

from __future__ import annotations

import time
import warnings

import torch
from torch import Tensor

import bayesadam as ba
from bayesadam import scores
from bayesadam.data import load_images, load_split
from bayesadam.predict import CollapsedPredictionWarning
from harness import arguments, class_scores, score_table, write_results
from networks import mlp, train_classifier

N_TRAIN = 55_000
PRIOR = 100.0


def scored(probs: Tensor, outside: Tensor, y: Tensor) -> dict[str, float]:
    """Scores of the test images, and how well their entropy tells them from those `outside` the distribution."""
    near, far = (torch.special.entr(p).sum(dim=-1) for p in (probs, outside))
    return {**class_scores(probs, y), "auroc": scores.auroc(near, far), "fpr95": scores.fpr95(near, far)}


def main() -> None:
    parser = arguments(__doc__, quick="one epoch of 1,000 images")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    near, (far, _) = load_images("mnist"), load_split("fashion-mnist", "test")
    n_train, n_held_out, n_test = (1000, 200, 200) if options.quick else (N_TRAIN, None, None)
    x, y = near.train_x[:n_train], near.train_y[:n_train]
    held_out = (near.train_x[N_TRAIN:][:n_held_out], near.train_y[N_TRAIN:][:n_held_out])
    x_test, y_test, x_far = near.test_x[:n_test], near.test_y[:n_test], far[:n_test]
    torch.manual_seed(0)
    model = mlp()
    optimizer = train_classifier(model, x, y, 1 if options.quick else options.epochs)

    results: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        results["MAP network"] = scored(model(x_test).softmax(-1), model(x_far).softmax(-1), y_test)
    raw = ba.Posterior.from_optimizer(model, optimizer, len(x), prior_precision=PRIOR)
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
                probs = [
                    posterior.predict(
                        images, likelihood="classification", method=method, generator=torch.Generator().manual_seed(0)
                    ).probs
                    for images in (x_test, x_far)
                ]
            results[f"{method}, {label}"] = scored(*probs, y_test)
    print(score_table(results, results["MAP network"]))
    write_results(options.out, "calibration", results)
    change = results["linearised, after"]["nll"] / results["MAP network"]["nll"]
    same = results["linearised, after"]["accuracy"] == results["MAP network"]["accuracy"]
    print(f"accuracy unchanged when linearised: {same}")
    print(f"NLL after calibration over the MAP network's: {change:.3f} (target: at most 1)")


if __name__ == "__main__":
    main()
