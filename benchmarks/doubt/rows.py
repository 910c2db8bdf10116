"""The rows of the scoreboard: every way of saying what a classifier does not know."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import bayesadam as ba
from benchmarks.common.harness import import_peer
from benchmarks.common.inputs import Pixels, Suite
from benchmarks.common.training import Recipe, Trained, batches_of, logits_of, train

DROPOUT, FEATURE_IMAGES, KEEP = 0.1, 10_000, 50
# The share of the last layer's weights that DICE leaves out, which has no default: OpenOOD's.
DICE_SHARE = 0.9
TEMPERATURES = torch.logspace(-1.3, 1.3, 400).tolist()


class Answer(NamedTuple):
    """Of a batch: probabilities, doubt, larger for what is less familiar, and its p-value, where a row has them."""

    probs: Tensor | None
    doubt: Tensor
    pvalue: Tensor | None = None


Scorer = Callable[[Tensor], Answer]


@dataclass(frozen=True, eq=False)
class Case:
    """What a row is given: trained networks, of which most rows take the first, their data, and their recipe."""

    networks: Sequence[Trained]
    suite: Suite
    network: str
    recipe: Recipe
    seed: int
    draws: int

    @property
    def model(self) -> nn.Sequential:
        """The network, in evaluation mode."""
        return self.networks[0].model  # type: ignore[no-any-return]

    def features(self, *, held_out: bool = False) -> tuple[nn.Sequential, nn.Linear, Pixels]:
        """What makes the inputs of the last layer, that layer, and 10,000 inputs at most to fit on, with classes."""
        x, y = self.suite.held_out if held_out else self.suite.train
        return self.model[:-1], self.model[-1], (x[:FEATURE_IMAGES], y[:FEATURE_IMAGES])  # type: ignore[return-value]


def by_entropy(probs_of: Callable[[Tensor], Tensor]) -> Scorer:
    """Probabilities, and their entropy in nats as doubt."""

    @torch.no_grad()
    def score(x: Tensor) -> Answer:
        probs = probs_of(x)
        return Answer(probs, torch.special.entr(probs.double()).sum(dim=1))

    return score


def alone(case: Case) -> Scorer:
    return by_entropy(lambda x: case.model(x).softmax(dim=1))


def best_temperature(model: nn.Module, suite: Suite) -> float:
    """The temperature of the greatest held-out likelihood, out of 400 from 0.05 to 20."""
    x, y = suite.held_out
    logits = logits_of(model, x)
    return TEMPERATURES[int(torch.stack([F.cross_entropy(logits / t, y) for t in TEMPERATURES]).argmin())]


def ensemble(case: Case) -> Scorer:
    """The mean probabilities of networks, each at its own temperature; of one network temperature scaling."""
    models = [(one.model, best_temperature(one.model, case.suite)) for one in case.networks]
    return by_entropy(lambda x: torch.stack([(model(x) / t).softmax(dim=1) for model, t in models]).mean(dim=0))


def mc_dropout(case: Case) -> Scorer:
    """A network of its own, in which units are dropped in prediction too."""
    model = train(case.network, case.suite, case.recipe, seed=case.seed, dropout=DROPOUT).model
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout))
    return by_entropy(lambda x: torch.stack([model(x).softmax(dim=1) for _ in range(case.draws)]).mean(dim=0))


def diagonal(case: Case, one: Trained | None = None) -> ba.Posterior:
    one, n, batch = one or case.networks[0], len(case.suite.train[0]), case.recipe.batch
    return ba.Posterior.from_optimizer(one.model, one.optimizer, n, batch_size=batch, likelihood="classification")


def recorded(case: Case) -> ba.Posterior:
    """By the gradients of training batches, after the training."""
    batches = batches_of(case.suite.train, case.recipe.batch)[:KEEP]
    recorder = ba.Recorder.from_batches(case.model, batches, F.cross_entropy, keep=KEEP)
    return ba.Posterior.from_recorder(case.model, recorder, len(case.suite.train[0]), likelihood="classification")


def calibrated(case: Case) -> Scorer:
    """Of one network its calibrated module, of several the mean over theirs."""
    held_out = batches_of(case.suite.held_out, 500)
    nets = [ba.calibrate(diagonal(case, one), held_out) for one in case.networks]

    @torch.no_grad()
    def score(x: Tensor) -> Answer:
        answers = [net(x) for net in nets]
        probs, novelty = (torch.stack([getattr(p, key) for p in answers]).mean(dim=0) for key in ("probs", "novelty"))
        return Answer(probs, novelty, answers[0].p_value if len(nets) == 1 else None)

    return score


def by_state(posterior_of: Callable[[Case], ba.Posterior]) -> Callable[[Case], Scorer]:
    """Novelty by the optimiser's state alone, ten held-out inputs without labels as reference."""

    def row(case: Case) -> Scorer:
        posterior, reference = posterior_of(case), case.suite.held_out[0][:10]
        return lambda x: Answer(None, posterior.novelty(x, reference=reference))

    return row


def laplace(case: Case) -> Scorer:
    """The last layer's Kronecker factors, a diagonal where those fail; the prior by its own marginal likelihood; probit
    probabilities.
    """
    from laplace import Laplace

    data, errors = TensorDataset(*case.suite.train), []
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), case.recipe.batch, False))
    for structure in ("kron", "diag"):
        try:
            # It sets attributes on the model.
            peer = Laplace(copy.deepcopy(case.model), "classification", "last_layer", structure)
            peer.fit(loader)
            peer.optimize_prior_precision(method="marglik")
            if bool(peer(case.suite.test[0][:2], link_approx="probit").isfinite().all()):
                return by_entropy(lambda x, peer=peer: peer(x, link_approx="probit").detach())
            errors.append(f"{structure}: probabilities are not finite")
        except Exception as error:
            errors.append(f"{structure}: {type(error).__name__}: {error}")
    raise RuntimeError("; ".join(errors))


def import_detectors(*, alone: bool = False) -> ModuleType | None:
    """Its detectors, without the package's own `__init__`, whose data sets would need torchvision."""
    if not alone and "pytorch_ood" not in sys.modules:
        spec = importlib.util.find_spec("pytorch_ood")
        if spec is not None:
            sys.modules["pytorch_ood"] = importlib.util.module_from_spec(spec)
    return import_peer("pytorch_ood.detector", "pytorch-ood", alone=alone)


# How a detector is made of its class, of the features' network and of the last layer.
MAKERS: dict[str, Callable[[Any, nn.Sequential, nn.Linear], Any]] = {
    "model": lambda kind, body, head: kind(nn.Sequential(*body, head)),
    "body": lambda kind, body, head: kind(body),
    "parts": lambda kind, body, head: kind(body, head),
    "share": lambda kind, body, head: kind(body, head.weight, head.bias, DICE_SHARE),
    # A space of half as many dimensions as there are features.
    "half": lambda kind, body, head: kind(body, head.in_features // 2, head.weight, head.bias),
    # The network, and the module that makes the features.
    "last": lambda kind, body, head: kind(nn.Sequential(*body, head), [body[-1]]),
    # Features as maps of one pixel.
    "maps": lambda kind, body, head: kind(
        nn.Sequential(*body, nn.Unflatten(1, (-1, 1, 1))), nn.Sequential(nn.Flatten(), head)
    ),
}


def detector(name: str, maker: str, *, gradients: bool = False, held_out: bool = False) -> Callable[[Case], Scorer]:
    """One of the package's, with its defaults, fitted, where that is needed, to the features or logits of 10,000
    training inputs at most, or of the held-out ones.
    """

    def row(case: Case) -> Scorer:
        # Its hooks and devices are not to touch the network.
        *layers, (x, y) = case.features(held_out=held_out)
        body, head = copy.deepcopy(layers)
        peer = MAKERS[maker](getattr(sys.modules["pytorch_ood.detector"], name), body, head)
        if peer.requires_fit:
            features = logits_of(body, x)
            if hasattr(peer, "fit_logits"):
                peer.fit_logits(logits_of(head, features), y)
            elif hasattr(peer, "fit_feature_maps"):
                peer.fit_feature_maps(features, y)
            elif hasattr(peer, "fit_features"):
                # Nearest neighbours are scikit-learn's.
                where = "cpu" if name == "KNN" else x.device
                peer.fit_features(features.to(where), y.to(where))
            else:
                peer.fit(batches_of((x, y), 500))
        return torch.set_grad_enabled(gradients)(lambda x: Answer(None, peer.predict(x).detach()))

    return row


# Training features, their classes and the last layer → doubt of features.
Fitted = Callable[[Tensor, Tensor, nn.Linear], Callable[[Tensor], Tensor]]


def of_features(fit: Fitted) -> Callable[[Case], Scorer]:
    """One that sees nothing but the inputs of the last layer."""

    def row(case: Case) -> Scorer:
        body, head, (x, y) = case.features()
        with torch.no_grad():
            doubt = fit(logits_of(body, x), y, head)
        return torch.no_grad()(lambda x: Answer(None, doubt(body(x))))

    return row


def means_of(z: Tensor, y: Tensor) -> Tensor:
    """Class by class, (classes, width)."""
    return torch.stack([z[y == label].mean(dim=0) for label in y.unique()])


def relative_mahalanobis(z: Tensor, y: Tensor, head: nn.Linear) -> Callable[[Tensor], Tensor]:
    """RMDS++: min_c |z − μ_c|² under the within-class covariance less |z − μ|² under that of all, z of unit length."""
    z = F.normalize(z.double())
    means, mean = means_of(z, y), z.mean(dim=0)
    within, whole = (torch.linalg.pinv(torch.cov(x.T, correction=0), hermitian=True) for x in (z - means[y], z))

    def doubt(z: Tensor) -> Tensor:
        z = F.normalize(z.double())
        away, near = z - mean, z[:, None] - means
        return (near @ within * near).sum(dim=2).amin(dim=1) - (away @ whole * away).sum(dim=1)

    return doubt


def weiper(z: Tensor, y: Tensor, head: nn.Linear) -> Callable[[Tensor], Tensor]:
    """WeiPer's largest probability, its mean over 100 heads w + δ |w| u, u random and of length 1, δ = 2.1."""
    w = head.weight
    noise = F.normalize(torch.randn(100, *w.shape, generator=torch.Generator().manual_seed(0)), dim=2).to(w)
    heads = w + 2.1 * w.norm(dim=1, keepdim=True) * noise
    return lambda z: -(torch.einsum("bd,rcd->brc", z, heads) + head.bias).softmax(dim=2).amax(dim=2).mean(dim=1)


def core(z: Tensor, y: Tensor, head: nn.Linear) -> Callable[[Tensor], Tensor]:
    """CORE: energy, and the cosine of what the head does not see of z with its mean in the predicted class; both
    standardised by training features.
    """
    span = torch.linalg.qr(head.weight.T).Q
    means = means_of(z - z @ span @ span.T, y)

    def parts(z: Tensor) -> Tensor:
        f, left = head(z), z - z @ span @ span.T
        return torch.stack([f.logsumexp(dim=1), F.cosine_similarity(left, means[f.argmax(dim=1)])], dim=1)

    of_train = parts(z)
    return lambda z: -((parts(z) - of_train.mean(dim=0)) / of_train.std(dim=0)).sum(dim=1)


def adascale(case: Case) -> Scorer:
    """AdaSCALE-A with OpenOOD's defaults: energy of features scaled by exp(Σ z/Σ of the largest), the more of which
    count the less the features move when .5 is added to the 5 % of the pixels that matter least.
    """
    body, head, _ = case.features()

    def seen(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            z = body(x)
            (slope,) = torch.autograd.grad(head(z).amax(dim=1).sum(), x)
        least = slope.flatten(1).abs().topk(slope[0].numel() // 20, dim=1, largest=False).indices
        moved = 0.5 * torch.zeros_like(slope.flatten(1)).scatter(1, least, 1.0).view_as(slope) * slope.sign()
        with torch.no_grad():
            other = body(x + moved)
        first, second = (z.topk(max(1, share * z.shape[1] // 100), dim=1).indices for share in (5, 1))
        shift = 10 * (z - other).abs().gather(1, second).sum(dim=1) + other.relu().gather(1, first).sum(dim=1)
        return z.detach().relu(), shift.detach()

    familiar = torch.cat([seen(x)[1] for x in case.suite.held_out[0].split(500)]).sort().values

    def score(x: Tensor) -> Answer:
        z, shift = seen(x)
        percentile = 85 - 10 * torch.searchsorted(familiar, shift, right=True) / len(familiar)
        kept = z.shape[1] - (z.shape[1] * percentile / 100).round()
        ordered = z.sort(dim=1, descending=True).values
        largest = (ordered * (torch.arange(z.shape[1], device=z.device) < kept[:, None])).sum(dim=1)
        with torch.no_grad():
            return Answer(None, -head(z * (z.sum(dim=1) / largest).exp()[:, None]).logsumexp(dim=1))

    return score


@dataclass(frozen=True)
class Row:
    """A way of doubting: from what was trained to a scorer, and what doubt needs beside the network and its optimiser.

    `peer` is the package that it is of, where that is not ours; `joint` rows take the networks of all seeds, `once`
    ones are of seed 0 alone, as they train a network of their own or are slow.
    """

    fit: Callable[[Case], Scorer]
    keeps: str
    peer: str | None = None
    joint: bool = False
    once: bool = False


NOTHING, HELD_OUT, TEN = "nothing", "held-out inputs", "ten inputs"
FITTED, KEPT = "fitted to 10,000 training features", "10,000 training features"
ROWS: dict[str, Row] = {
    "network alone": Row(alone, NOTHING),
    "temperature": Row(ensemble, HELD_OUT),
    "ours, held-out inputs": Row(calibrated, HELD_OUT),
    "ours, Adam's state": Row(by_state(diagonal), TEN),
    "ours, gradients of 50 batches": Row(by_state(recorded), f"{TEN}; 50 training batches"),
    "ours, several": Row(calibrated, "held-out inputs; several networks", joint=True),
    "ensemble": Row(ensemble, "held-out inputs; several networks", joint=True),
    "MC dropout": Row(mc_dropout, "dropout in training", once=True),
    "laplace-torch, last layer": Row(laplace, "training data", peer="laplace-torch"),
    "RMDS++": Row(of_features(relative_mahalanobis), FITTED),
    "WeiPer": Row(of_features(weiper), NOTHING),
    "CORE": Row(of_features(core), FITTED),
    "AdaSCALE": Row(adascale, HELD_OUT),
}
_DETECTORS: tuple[tuple[str, str, str, Mapping[str, bool]], ...] = (
    ("MaxSoftmax MaxLogit EnergyBased GEN", "model", NOTHING, {}),
    ("ODIN GradNorm", "model", NOTHING, {"gradients": True}),
    ("ASH SCALE", "maps", NOTHING, {}),
    ("LTS", "parts", NOTHING, {}),
    ("KLMatching", "model", HELD_OUT, {"held_out": True}),
    ("OpenMax", "model", FITTED, {}),
    ("ReAct VRA SHE fDBD NCI PNML", "parts", FITTED, {}),
    ("DICE", "share", FITTED, {}),
    ("NACUE", "last", FITTED, {"gradients": True}),
    ("GMM Mahalanobis RMD", "body", FITTED, {}),
    ("ViM", "half", FITTED, {}),
    ("KNN", "body", KEPT, {}),
    ("NNGuide", "parts", KEPT, {}),
)
ROWS |= {
    name: Row(detector(name, maker, **how), keeps, peer="pytorch-ood", once=name == "OpenMax")
    for names, maker, keeps, how in _DETECTORS
    for name in names.split()
}
