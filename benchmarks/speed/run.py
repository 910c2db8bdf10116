"""What doubt costs: predictions, novelty and exported networks over the bare model, at batches of 1 and 64.

    python -m benchmarks.speed.run [--quick] [--networks MLP LeNet …] [--ways net compiled onnx …]
        [--device cuda] [--seconds 240] [--out out/bench]

A network of random weights and two steps is calibrated on 1,000 random inputs, so that its leverage has all the
directions that real inputs may have. Each way and the bare network, logits and a softmax, run in turns; a row is the
median of the ratios, with their 5 and 95 % quantiles:

- net: `ba.calibrate(posterior, held_out)(x)`: probabilities, novelty and p-values, in one forward pass;
- compiled, graphs: the same after `net.compile()`, and with mode="reduce-overhead", by graphs of CUDA, over the bare
  network by torch.compile, which is spared its looks at modules and globals, too;
- onnx: the same as `net.save` wrote it, by onnxruntime, over the bare network exported alike (CPU alone);
- novelty: `posterior.novelty(x, reference=ten inputs)`, by the optimiser's state;
- linearised, sampled: `posterior.predict(x)`, and with 32 draws; networks of few outputs alone;
- ViM, KNN, ODIN: detectors of 10,000 training features; Laplace: laplace-torch's last layer, where it is installed.

"apart" is the largest difference of a probability from those of `net`, eager; the target of a batch is for the best of
the first four ways. Calibration is timed over a forward pass of the same inputs in the same batches, "bytes" are of the
exported file over those of the bare network's. The first rows are the time beyond the forward pass of 20,000 outputs
over that of 50, and `posterior.predict` of 4,000 windows by a recurrent regression over its forward passes. What would
start after `--seconds` is left out.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesadam as ba
from bayesadam.calibrated.module import compile_options
from benchmarks.common.harness import (
    Target,
    arguments,
    at_most,
    interleaved,
    ratio,
    ratio_range,
    setting,
    write_results,
)
from benchmarks.common.networks import ResNet18, lenet, mlp, vit

RIVALS = ("ViM", "KNN", "ODIN", "Laplace")
WAYS = ("net", "graphs", "onnx", "compiled", "novelty", "linearised", "sampled", *RIVALS)
MODES = {"compiled": "default", "graphs": "reduce-overhead"}
LIMITS, LIMIT_EAGER = {1: 1.5, 64: 1.2}, 2.0
CLASSES, LENGTH, DRAWS, BANK = 10, 64, 32, 10_000
HELD_OUT, AT_ONCE = 1000, 100
MANY, FEW, WINDOWS = 20_000, 50, 4_000
LIMIT_MANY, LIMIT_RECURRENT, LIMIT_CALIBRATE = 2.0, 5.0, 3.0


def bert() -> nn.Module:
    """Of random weights, 4 layers of width 256."""
    from transformers import BertConfig, BertForSequenceClassification

    size: Any = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return BertForSequenceClassification(BertConfig(vocab_size=5_000, num_labels=CLASSES, **size))


def gpt2() -> nn.Module:
    """GPT-2 small, of random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def images(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def tokens(most: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(most, (batch, LENGTH))


NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "MLP": (mlp, images(784)),
    "LeNet": (lenet, images(1, 28, 28)),
    "ResNet-18": (ResNet18, images(3, 32, 32)),
    "ViT": (vit, images(3, 32, 32)),
    "BERT": (bert, tokens(5_000)),
    "GPT-2": (gpt2, tokens(50_257)),
}
OF_TEXT = ("BERT", "GPT-2")
ON = {"cpu": ("MLP", "LeNet", "ResNet-18", "BERT"), "cuda": ("LeNet", "ResNet-18", "ViT", "BERT", "GPT-2")}


def logits(model: nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    return found if isinstance(found, Tensor) else found.logits  # type: ignore[no-any-return]


class Bare(nn.Module):
    """A model and a softmax."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Its probabilities."""
        return logits(self.model, x).softmax(dim=-1)


def prepared(
    name: str, device: str, classes: int | None = None
) -> tuple[ba.Posterior, nn.Module, dict[str, Callable[[], Any]]]:
    """A posterior of random steps, its calibrated network, and calls: a calibration, and a forward pass of its data."""
    torch.manual_seed(0)
    build, inputs = NETWORKS[name]
    model = (build() if classes is None else mlp((784, 400, 400, classes))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batches = [inputs(AT_ONCE).to(device) for _ in range(HELD_OUT // AT_ONCE)]
    shape = logits(model, batches[0][:2]).shape
    pairs = [(x, torch.randint(shape[-1], (len(x), *shape[1:-1]), device=device)) for x in batches]
    for x, y in pairs[:2]:
        optimizer.zero_grad()
        F.cross_entropy(logits(model, x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    posterior = ba.Posterior.from_optimizer(model.eval(), optimizer, 60_000, likelihood="classification")
    forward = logits if name in OF_TEXT else None
    ways = {
        "calibrate": timed(lambda _: ba.calibrate(posterior, pairs, forward=forward), batches[0]),
        "bare": timed(lambda _: [logits(model, x).argmax() for x in batches], batches[0]),
    }
    return posterior, ways["calibrate"](), ways


def onnx_call(file: Path, x: Tensor) -> Callable[[], Any]:
    """A session of onnxruntime on one batch: its probabilities."""
    import onnxruntime

    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, how)
    feeds, names = {session.get_inputs()[0].name: x.numpy()}, [output.name for output in session.get_outputs()]
    place = names.index("probs") if "probs" in names else 0
    return lambda: torch.as_tensor(session.run(None, feeds)[place])


def export(net: nn.Module, model: nn.Module, x: Tensor, folder: Path) -> dict[str, Path]:
    """The calibrated network and the bare one as ONNX."""
    files = {name: folder / f"{name}.onnx" for name in ("net", "bare")}
    net.save(files["net"], example=x)  # type: ignore[operator]
    torch.onnx.export(
        Bare(model), (x,), files["bare"], dynamo=True, verbose=False, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    return files


def rival(
    name: str, model: nn.Module, inputs: Callable[[int], Tensor], device: torch.device
) -> Callable[[Tensor], Any]:
    """The score of a detector, or the probabilities of laplace-torch, whose training data are random."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    features: list[Tensor] = []
    last.register_forward_pre_hook(lambda _, args: features.append(args[0]))

    def seen(x: Tensor) -> tuple[Tensor, Tensor]:
        features.clear()
        return model(x), features[0]

    if name == "Laplace":
        peer = import_module("laplace").Laplace(
            model, "classification", subset_of_weights="last_layer", hessian_structure="kron"
        )
        data = TensorDataset(inputs(64).to(device), torch.randint(CLASSES, (64,), device=device))
        peer.fit(DataLoader(data, batch_size=64))
        return lambda x: peer(x)
    width = last.in_features
    bank = F.normalize(torch.randn(BANK, width, device=device), dim=1)
    rest = torch.linalg.qr(torch.randn(width, width, device=device)).Q[:, width // 2 :]

    def vim(x: Tensor) -> Tensor:
        f, a = seen(x)
        return (a @ rest).norm(dim=1) - f.logsumexp(dim=1)

    def knn(x: Tensor) -> Tensor:
        return torch.cdist(F.normalize(seen(x)[1], dim=1), bank).topk(50, dim=1, largest=False).values[:, -1]

    def odin(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            loss = (model(x) / 1000).log_softmax(dim=1).amax(dim=1).sum()
            (slope,) = torch.autograd.grad(loss, x)
        return (model(x.detach() + 0.0014 * slope.sign()) / 1000).softmax(dim=1).amax(dim=1)

    return {"ViM": vim, "KNN": knn, "ODIN": odin}[name]


def calls(
    way: str, posterior: ba.Posterior, net: nn.Module, x: Tensor, reference: Tensor, files: Mapping[str, Path]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Doubt, and the bare network, in a way."""
    if way == "onnx":
        return onnx_call(files["net"], x), onnx_call(files["bare"], x)
    modules: list[Callable[[Tensor], Any]] = [net, Bare(posterior.model)]
    if way in MODES:
        torch.compiler.reset()
        modules[0] = fast = copy.deepcopy(net)
        fast.compile(fullgraph=True, mode=MODES[way])
        modules[1] = torch.compile(modules[1], fullgraph=True, options=compile_options(MODES[way]))
    elif way == "novelty":
        modules[0] = partial(posterior.novelty, reference=reference)
    elif way in RIVALS:
        modules[0] = rival(way, copy.deepcopy(posterior.model), lambda n: x[torch.arange(n) % len(x)], x.device)
    elif way in ("linearised", "sampled"):
        modules[0] = lambda x: posterior.predict(x, draws=DRAWS if way == "sampled" else None).probs

    return timed(modules[0], x), timed(modules[1], x)


def many_outputs(device: str, *, quick: bool) -> tuple[dict[str, Any], list[Target]]:
    """The time beyond the forward pass of 20,000 outputs over that of 50."""
    result: dict[str, Any] = {}
    networks = {classes: prepared("MLP", device, classes)[:2] for classes in (FEW, MANY)}
    targets: list[Target] = []
    for batch in LIMITS:
        x, candidates = torch.randn(batch, 784, device=device), {}
        for classes, (posterior, net) in networks.items():
            pair = calls("net", posterior, net, x, x, {})
            candidates |= dict(zip((f"net, {classes}", f"bare, {classes}"), pair, strict=True))
        seconds = interleaved(candidates, rounds=3 if quick else 60, warmup=2)
        beyond = [statistics.median(seconds[f"net, {n}"]) - statistics.median(seconds[f"bare, {n}"]) for n in networks]
        result[f"batch {batch}"] = over = beyond[1] / beyond[0]
        print(f"{MANY:,} outputs, batch {batch}: {over:.2f} × the time of {FEW} beyond the forward pass")
        targets += at_most(f"{MANY:,} outputs, batch {batch}: time beyond the forward pass", LIMIT_MANY, over)
    return result, targets


class Windows(nn.Module):
    """A recurrent regression of windows of 24 steps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.steps, self.head = getattr(nn, kind)(4, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1)."""
        return self.head(self.steps(x)[0][:, -1])  # type: ignore[no-any-return]


def timed(call: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Any]:
    """A call that ends when its numbers are there."""

    def run() -> Any:
        with torch.no_grad():
            found = call(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        return found

    return run


def recurrent_calls(kind: str, n: int, device: str) -> dict[str, Callable[[], Any]]:
    """Of a recurrent regression of n windows: the network, its predictions, calibrated ones, a calibration of 1,000."""
    torch.manual_seed(0)
    model, x = Windows(kind).to(device), torch.randn(n, 24, 4, device=device)
    optimizer, y = torch.optim.Adam(model.parameters()), x.sum(dim=(1, 2))[:, None]
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    posterior = ba.Posterior.from_optimizer(model.eval(), optimizer, n, likelihood="regression")
    posterior, some = posterior.replace(noise_variance=1.0), (x[:1000], y[:1000])
    return {
        "bare": timed(model, x),
        "linearised": timed(posterior.predict, x),
        "net": timed(ba.calibrate(posterior, some), x),
        "bare, calibrate": timed(model, some[0]),
        "calibrate": timed(lambda part: ba.calibrate(posterior, (part, some[1])), some[0]),
    }


def recurrent(device: str, *, quick: bool) -> tuple[dict[str, Any], list[Target]]:
    """`posterior.predict` of windows over a forward pass of them, and that of `calibrate`."""
    result: dict[str, Any] = {}
    targets: list[Target] = []
    for kind in ("GRU", "LSTM"):
        ways = recurrent_calls(kind, 400 if quick else WINDOWS, device)
        seconds = interleaved(ways, rounds=2 if quick else 5, warmup=1)
        for way, of in (("linearised", "bare"), ("net", "bare"), ("calibrate", "bare, calibrate")):
            result[f"{kind}, {way}"] = over = ratio(seconds, way, of)
            print(f"{kind}, {way}: {over:.1f} forward passes")
            limit = LIMIT_CALIBRATE if way == "calibrate" else LIMIT_RECURRENT
            targets += at_most(f"{kind}, {way}: forward passes", limit, over)
    return result, targets


def bench(
    name: str, ways: list[str], device: str, folder: Path, until: float, *, quick: bool
) -> tuple[dict[str, Any], list[Target]]:
    """One network: the ratio in every way at both batches, files, differences."""
    posterior, net, ways_to_calibrate = prepared(name, device)
    inputs, result, targets = NETWORKS[name][1], {}, []
    seconds = interleaved(ways_to_calibrate, rounds=1 if quick else 3, warmup=0)
    result["calibrate"] = ratio(seconds, "calibrate", "bare")
    print(f"{name:10s}calibrate takes {result['calibrate']:.1f} forward passes over its {HELD_OUT:,} inputs")
    targets += at_most(f"{name}, calibrate: forward passes", LIMIT_CALIBRATE, result["calibrate"])
    of_images = ("novelty", "linearised", "sampled", *RIVALS)
    ways = [way for way in ways if name not in OF_TEXT or way not in of_images]
    files = export(net, posterior.model, inputs(2), folder) if "onnx" in ways else {}
    if files:
        # Weights may lie beside the graph.
        sizes = {key: sum(part.stat().st_size for part in folder.glob(f"{key}.onnx*")) for key in files}
        result["bytes"] = sizes["net"] / sizes["bare"]
        print(f"{name}, exported: {result['bytes']:.3f} of the bare network's bytes")
    reference = inputs(10).to(device)
    for batch, limit in LIMITS.items():
        x = inputs(batch).to(device)
        with torch.no_grad():
            truth = net(x).probs
        for way in ways:
            if time.perf_counter() > until:
                print(f"{name:10s}{way:12s}batch {batch:3d}: left out, for time")
                continue
            try:
                doubt, bare = calls(way, posterior, net, x, reference, files)
            except Exception as error:
                if way != "Laplace":
                    raise
                # Its backends do not take every network.
                print(f"{name:10s}{way:12s}batch {batch:3d}: {type(error).__name__}")
                continue
            # Compiling begins at the third call, and recording graphs takes three more.
            for _ in range(6 if way in MODES else 1):
                doubt(), bare()
            began = time.perf_counter()
            bare()
            once = time.perf_counter() - began
            rounds = 3 if quick or way in ("linearised", "sampled") else max(10, min(200, int(2 / once)))
            seconds = interleaved({"doubt": doubt, "bare": bare}, rounds=rounds, warmup=1)
            over, (low, high) = ratio(seconds, "doubt", "bare"), ratio_range(seconds, "doubt", "bare")
            ms = {key: 1e3 * statistics.median(values) for key, values in seconds.items()}
            row = {"ratio": over, "range": [low, high], "ms": ms}
            print(f"{name:10s}{way:12s}batch {batch:3d}: {over:7.2f} ({low:.2f} to {high:.2f}) × {ms['bare']:.3f} ms")
            if way in ("net", *MODES, "onnx"):
                probs = doubt() if way == "onnx" else doubt().probs
                row["apart"] = float((probs.cpu() - truth.cpu()).abs().max())
                targets += at_most(f"{name}, {way}, batch {batch}: apart from eager", 1e-5, row["apart"])
            result[f"{way}, batch {batch}"] = row
        public = {way: row["ratio"] for way in ("net", *MODES, "onnx") if (row := result.get(f"{way}, batch {batch}"))}
        if "net" in public:
            targets += at_most(f"{name}, eager, batch {batch}: time over the bare model", LIMIT_EAGER, public["net"])
            best = min(public, key=lambda way: public[way])
            targets += at_most(f"{name}, best ({best}), batch {batch}: time over the bare model", limit, public[best])
    return result, targets


def main() -> None:
    parser = arguments(__doc__, quick="three rounds of the small networks", device=True)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=None)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after so many")
    options = parser.parse_args()
    on_cpu, until = options.device == "cpu", time.perf_counter() + options.seconds
    has = {"onnx": on_cpu and find_spec("onnxruntime") is not None, "graphs": not on_cpu}
    has["Laplace"] = find_spec("laplace") is not None
    ways = [way for way in options.ways if has.get(way, True)]
    if options.quick:
        ways = [way for way in ways if way not in MODES]
    warnings.simplefilter("ignore")
    print(f"{options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results: dict[str, Any] = {**setting(), "device": options.device}
    targets: list[Target] = []
    for title, measure in (("outputs", many_outputs), ("recurrent", recurrent)):
        results[title], found = measure(options.device, quick=options.quick)
        targets += found
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks or (["MLP", "LeNet"] if options.quick else ON["cpu" if on_cpu else "cuda"]):
            results[name], found = bench(name, ways, options.device, Path(folder), until, quick=options.quick)
            targets += found
    results["targets"] = [asdict(target) for target in targets]
    write_results(options.out, "speed", results)
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
