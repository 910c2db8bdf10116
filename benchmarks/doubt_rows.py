"""The rows of `doubt.py`: networks trained, and every way of saying what they do not know."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesadam as ba
from bayesadam.predict.prediction import PredictiveKind
from doubt_data import Pixels, Suite
from harness import import_peer
from networks import ResNet18, lenet, mlp, small_resnet, vit

Needs = Literal["none", "ten inputs", "held-out", "training"]
# Probabilities, where a row has its own, and doubt, larger for what is less familiar.
Answer = tuple[Tensor | None, Tensor]
Scorer = Callable[[Tensor], Answer]

RATE, KEEP = 1e-3, 50
IVON_RATE, IVON_DECAY = 0.1, 0.9999
DROPOUT = 0.1
FEATURE_IMAGES = 10_000
# laplace-torch holds the Jacobians of a batch, (images, classes, weights): bytes at a time, and weights at most.
JACOBIAN_BYTES = {"cpu": 5e7, "cuda": 2.5e8}
MOST_WEIGHTS = {"cpu": 100_000, "cuda": 1_000_000}


# --- networks -------------------------------------------------------------------------------------------------------

NETWORKS: Mapping[str, Callable[[int], nn.Sequential]] = {
    "mlp": lambda classes: nn.Sequential(nn.Flatten(), *mlp((784, 400, 400, classes))),
    "lenet": lenet,
    "resnet": lambda classes: small_resnet(classes=classes),
    "resnet18": ResNet18,
    "vit": vit,
}
EPOCHS = {"mlp": 8, "lenet": 8, "resnet": 5, "resnet18": 10, "vit": 20}


@dataclass(frozen=True, eq=False)
class Trained:
    """A network and what trained it."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    recorder: ba.Recorder | None


@dataclass(frozen=True, eq=False)
class Case:
    """What a row is given: trained networks, of which most rows take the first, their data, and how they were
    trained.
    """

    networks: Sequence[Trained]
    suite: Suite
    network: str
    seed: int
    epochs: int
    batch: int
    draws: int

    @property
    def model(self) -> nn.Sequential:
        """The network, in evaluation mode."""
        return self.networks[0].model

    @property
    def n_data(self) -> int:
        """N."""
        return len(self.suite.train[0])


def network_of(name: str, classes: int, *, dropout: float = 0.0) -> nn.Sequential:
    """A network; with dropout before its last two linear layers, or before its last where there is one."""
    layers = list(NETWORKS[name](classes))
    if dropout:
        for place in [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)][:-3:-1]:
            layers.insert(place, nn.Dropout(dropout))
    return nn.Sequential(*layers)


def augmented(x: Tensor) -> Tensor:
    """Each image flipped or not, and moved by up to four pixels."""
    n, _, height, width = x.shape
    flipped = torch.where((torch.rand(n, device=x.device) < 0.5)[:, None, None, None], x.flip(3), x)
    down, right = torch.randint(9, (2, n, 1), device=x.device)
    rows = (down + torch.arange(height, device=x.device))[:, :, None]
    columns = (right + torch.arange(width, device=x.device))[:, None, :]
    padded = F.pad(flipped, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    return padded[torch.arange(n, device=x.device)[:, None, None], rows, columns].permute(0, 3, 1, 2).contiguous()


def train(
    network: str,
    suite: Suite,
    *,
    seed: int,
    epochs: int,
    batch: int,
    dropout: float = 0.0,
    optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Trained:
    """A network trained by Adam, or by the optimiser given; a cosine takes the rate to 0. Smaller last batches are left
    out.

    Natural images are augmented; ResNet-18 runs in bfloat16 on CUDA, where the transformer's training ended in NaN.
    """
    torch.manual_seed(seed)
    x, y = suite.train
    model = network_of(network, suite.classes, dropout=dropout).to(x.device).train()
    optimizer = (optimizer_of or (lambda parameters: torch.optim.Adam(parameters, lr=RATE)))(model.parameters())
    natural = suite.name == "cifar10"
    half = torch.autocast(x.device.type, torch.bfloat16, enabled=network == "resnet18" and x.device.type == "cuda")
    steps = len(x) // batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    perturbed = optimizer.sampled_parameters if isinstance(optimizer, ba.optim.IVON) else nullcontext
    with ba.Recorder(optimizer, keep=KEEP) as recorder:
        for _ in range(epochs):
            for rows in torch.randperm(len(x), device=x.device)[: steps * batch].split(batch):
                inputs = augmented(x[rows]) if natural else x[rows]
                optimizer.zero_grad()
                with perturbed():
                    with half:
                        loss = F.cross_entropy(model(inputs), y[rows])
                    loss.backward()
                optimizer.step()
                schedule.step()
    optimizer.zero_grad()
    model.eval()
    return Trained(model, optimizer, recorder)


# --- scores ---------------------------------------------------------------------------------------------------------


def entropy(probs: Tensor) -> Tensor:
    """In nats, of each row."""
    return torch.special.entr(probs.double()).sum(dim=1)


def by_entropy(probs_of: Callable[[Tensor], Tensor]) -> Scorer:
    """Probabilities, and their entropy as doubt."""

    def score(x: Tensor) -> Answer:
        with torch.no_grad():
            probs = probs_of(x)
        return probs, entropy(probs)

    return score


def logits_of(model: nn.Module, x: Tensor, *, chunk: int = 1000) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(chunk)])


def batches_of(pixels: Pixels, batch: int) -> list[Pixels]:
    return list(zip(*(part.split(batch) for part in pixels), strict=True))


# --- the network itself, and several --------------------------------------------------------------------------------


def alone(case: Case) -> Scorer:
    return by_entropy(lambda x: case.model(x).softmax(dim=1))


def temperature(case: Case) -> Scorer:
    """The temperature of the greatest held-out likelihood, out of 400 from 0.05 to 20."""
    (x, y), tried = case.suite.held_out, torch.logspace(-1.3, 1.3, 400)
    logits = logits_of(case.model, x)
    best = float(min(tried, key=lambda t: float(F.cross_entropy(logits / t, y))))
    return by_entropy(lambda x: (case.model(x) / best).softmax(dim=1))


def ensemble(case: Case) -> Scorer:
    return by_entropy(lambda x: torch.stack([one.model(x).softmax(dim=1) for one in case.networks]).mean(dim=0))


@contextmanager
def dropping(model: nn.Module) -> Any:
    """With dropout as in training, the rest in evaluation mode."""
    layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    try:
        for layer in layers:
            layer.train()
        yield
    finally:
        model.eval()


def mc_dropout(case: Case) -> Scorer:
    settings: Any = {"seed": case.seed, "epochs": case.epochs, "batch": case.batch}
    model = train(case.network, case.suite, dropout=DROPOUT, **settings).model

    def probs_of(x: Tensor) -> Tensor:
        with dropping(model):
            return torch.stack([model(x).softmax(dim=1) for _ in range(case.draws)]).mean(dim=0)

    return by_entropy(probs_of)


def ivon(case: Case) -> Scorer:
    def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        betas = (0.9, IVON_DECAY)
        return ba.optim.IVON(parameters, lr=IVON_RATE, n_data=case.n_data, betas=betas, generator=case.seed)

    settings: Any = {"seed": case.seed, "epochs": case.epochs, "batch": case.batch}
    found = train(case.network, case.suite, optimizer_of=optimizer_of, **settings)
    posterior = found.optimizer.posterior(found.model)  # type: ignore[attr-defined]
    sampled: PredictiveKind = "sampled"
    options: Any = {"likelihood": "classification", "predictive": sampled, "n_samples": case.draws}
    return by_entropy(lambda x: posterior.predict(x, **options).probs)


# --- ours -----------------------------------------------------------------------------------------------------------


def diagonal_of(case: Case, one: Trained) -> ba.Posterior:
    return ba.Posterior.from_optimizer(one.model, one.optimizer, case.n_data, batch_size=case.batch)


def ours(posterior_of: Callable[[Case], ba.Posterior | ba.Mixture]) -> Callable[[Case], Scorer]:
    """Probabilities and novelty of the calibrated posterior: leverage by the held-out inputs, in one forward pass."""

    def row(case: Case) -> Scorer:
        held_out = batches_of(case.suite.held_out, 500)
        posterior: Any = ba.calibrate(posterior_of(case), held_out, likelihood="classification")

        def score(x: Tensor) -> Answer:
            found = posterior.predict(x)
            return found.probs, found.novelty

        return score

    return row


def by_state(posterior_of: Callable[[Case], ba.Posterior]) -> Callable[[Case], Scorer]:
    """Novelty by the optimiser's state alone, ten held-out inputs without labels as reference."""

    def row(case: Case) -> Scorer:
        posterior = posterior_of(case).relative_to([case.suite.held_out[0][:10]])
        return lambda x: (None, posterior.novelty(x, likelihood="classification"))

    return row


def diagonal(case: Case) -> ba.Posterior:
    return diagonal_of(case, case.networks[0])


def kronecker(case: Case) -> ba.Posterior:
    recorder = case.networks[0].recorder
    if recorder is None:
        raise ValueError("a network that was loaded has no recorder")
    return ba.Posterior.from_recorder(case.model, recorder, case.n_data, batch_size=case.batch)


def kronecker_from_batches(case: Case) -> ba.Posterior:
    batches = batches_of(case.suite.train, case.batch)[:KEEP]
    recorder = ba.Recorder.from_batches(case.model, batches, F.cross_entropy, keep=KEEP)
    return ba.Posterior.from_recorder(case.model, recorder, case.n_data)


def mixture(case: Case) -> ba.Mixture:
    return ba.Mixture([diagonal_of(case, one) for one in case.networks])


# --- laplace-torch --------------------------------------------------------------------------------------------------


def laplace(subset: str) -> Callable[[Case], Scorer]:
    """Kronecker factors, a diagonal where those fail; the prior by its own marginal likelihood; probit
    probabilities.
    """

    def row(case: Case) -> Scorer:
        from laplace import Laplace

        weights = sum(p.numel() for p in (case.model if subset == "all" else case.model[-1]).parameters())
        kind = case.suite.train[0].device.type
        if weights > MOST_WEIGHTS[kind]:
            raise ValueError(f"the Jacobians of {weights:,} weights would take too long")
        errors = []
        for structure in ("kron", "diag"):
            try:
                # It sets attributes on the model.
                peer = Laplace(copy.deepcopy(case.model), "classification", subset, structure)
                peer.fit(DataLoader(TensorDataset(*case.suite.train), batch_size=case.batch))
                peer.optimize_prior_precision(method="marglik")
                chunk = max(1, int(JACOBIAN_BYTES[kind] / (4 * case.suite.classes * weights)))

                def probs_of(x: Tensor, peer: Any = peer, chunk: int = chunk) -> Tensor:
                    return torch.cat([peer(part, link_approx="probit").detach() for part in x.split(chunk)])

                if bool(probs_of(case.suite.test[0][:2]).isfinite().all()):
                    return by_entropy(probs_of)
                errors.append(f"{structure}: probabilities are not finite")
            except Exception as error:
                errors.append(f"{structure}: {type(error).__name__}: {error}")
        raise RuntimeError("; ".join(errors))

    return row


# --- pytorch-ood ----------------------------------------------------------------------------------------------------


def import_detectors(*, alone: bool = False) -> ModuleType | None:
    """Its detectors, without the package's own `__init__`, whose data sets would need torchvision."""
    if not alone and "pytorch_ood" not in sys.modules:
        spec = importlib.util.find_spec("pytorch_ood")
        if spec is not None:
            sys.modules["pytorch_ood"] = importlib.util.module_from_spec(spec)
    return import_peer("pytorch_ood.detector", "pytorch-ood", alone=alone)


def of_logits(name: str) -> Callable[[Case], Scorer]:
    def row(case: Case) -> Scorer:
        detector = getattr(sys.modules["pytorch_ood.detector"], name)(case.model)
        return lambda x: (None, detector.predict(x) if name == "ODIN" else _quiet(detector.predict, x))

    return row


def of_features(name: str) -> Callable[[Case], Scorer]:
    """Features are the inputs of the last linear layer, of 10,000 training images at most."""

    def row(case: Case) -> Scorer:
        kind = getattr(sys.modules["pytorch_ood.detector"], name)
        body, head = case.model[:-1], case.model[-1]
        assert isinstance(head, nn.Linear)
        x, y = (part[:FEATURE_IMAGES] for part in case.suite.train)
        features, width = logits_of(body, x), head.in_features
        if name == "ReAct":
            detector = kind(body, head)
            detector.fit_feature_maps(features, y)
        elif name == "KNN":
            detector = kind(body)
            detector.fit_features(features.cpu(), y.cpu())
        elif name == "ViM":
            detector = kind(body, width // 2, head.weight, head.bias)
            detector.fit_features(features, y)
        else:
            detector = kind(body)
            detector.fit_features(features, y)
        return lambda x: (None, _quiet(detector.predict, x))

    return row


def _quiet(predict: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return predict(x)


# --- all of them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A way of doubting.

    Attributes:
        fit: from what was trained to a scorer.
        needs: which data doubt needs, beside the network and its optimiser.
        peer: the package that it is of, where that is not ours.
        joint: whether it takes the networks of all seeds.
    """

    fit: Callable[[Case], Scorer]
    needs: Needs
    peer: str | None = None
    joint: bool = False


ROWS: Mapping[str, Row] = {
    "network alone": Row(alone, "none"),
    "temperature": Row(temperature, "held-out"),
    "ours, held-out inputs": Row(ours(diagonal), "held-out"),
    "ours, Adam's state": Row(by_state(diagonal), "ten inputs"),
    "ours, recorded gradients": Row(by_state(kronecker), "ten inputs"),
    "ours, gradients of 50 batches": Row(by_state(kronecker_from_batches), "training"),
    "ours, mixture": Row(ours(mixture), "held-out", joint=True),
    "laplace-torch, last layer": Row(laplace("last_layer"), "training", peer="laplace-torch"),
    "laplace-torch, all layers": Row(laplace("all"), "training", peer="laplace-torch"),
    "MC dropout": Row(mc_dropout, "none"),
    "IVON": Row(ivon, "none"),
    "ensemble": Row(ensemble, "none", joint=True),
    "MaxSoftmax": Row(of_logits("MaxSoftmax"), "none", peer="pytorch-ood"),
    "MaxLogit": Row(of_logits("MaxLogit"), "none", peer="pytorch-ood"),
    "EnergyBased": Row(of_logits("EnergyBased"), "none", peer="pytorch-ood"),
    "ODIN": Row(of_logits("ODIN"), "none", peer="pytorch-ood"),
    "ReAct": Row(of_features("ReAct"), "training", peer="pytorch-ood"),
    "KNN": Row(of_features("KNN"), "training", peer="pytorch-ood"),
    "Mahalanobis": Row(of_features("Mahalanobis"), "training", peer="pytorch-ood"),
    "ViM": Row(of_features("ViM"), "training", peer="pytorch-ood"),
}
OURS = tuple(name for name in ROWS if name.startswith("ours"))
