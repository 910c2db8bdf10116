"""Every reader against the definition of its second moment: one table of optimisers, one set of template tests."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from bayesadam.errors import BayesAdamError, MatchError
from bayesadam.readers import (
    StateReader,
    identify_reader,
    read_optimizer,
    read_state_dict,
    reader_named,
    reader_of,
    register,
    registered,
)
from bayesadam.readers import registry as registry_module
from floats import assert_close
from formats.same import same
from readers import references
from readers.references import Moments, Reference, Trace, dense, through_a_file, with_decay

# Taken at import, before any test or doctest can add a reader of its own.
BUILT_IN = registered()
STEPS = 12

# bitsandbytes pages nothing on a CPU and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


# --- small problems -------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A model and its mini-batches: (model, generator) → loss."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]


def regression_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    first = next(model.parameters())
    inputs = (2, 5) if first.dim() == 3 else (first.shape[1],)
    x = torch.randn(8, *inputs, generator=generator)
    return (model(x) - x.flatten(1).sum(dim=1, keepdim=True).sin() - 1).square().sum(dim=1).mean()


def look_up_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    rows = torch.randint(0, 9, (4,), generator=generator)
    return (model(rows) - 1).square().sum()


PROBLEMS = {
    # Parameters of one, two and three dimensions.
    "small": Problem(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2)),
        regression_loss,
    ),
    "matrix": Problem(lambda: nn.Linear(3, 2, bias=False), regression_loss),
    # The last three rows are never looked up.
    "sparse": Problem(lambda: nn.Embedding(12, 3, sparse=True), look_up_loss),
    # 4096 and 64 × 67 entries: 8-bit, in whole blocks of 256 and with a short last one. The biases stay 32-bit.
    "large": Problem(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 67)), regression_loss),
}


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One optimiser as a user would set it up, by its class's qualified name, and the record that must read it.

    Attributes:
        reference: its second moment, from the definition.
        told: the name that its saved state is told by, radam's as adam's, or `ASKED_FOR`.
        coupled: whether weight decay joins the gradient before it is squared.
        problem: the key of a problem above.
        atol: the absolute error allowed, where a relative one cannot be asked for.
    """

    id: str
    factory: str
    kwargs: Mapping[str, Any]
    reader: str
    reference: Reference
    told: str
    coupled: bool = False
    problem: str = "small"
    atol: float = 0.0


def cases(
    id: str,
    factory: str,
    reference: Reference,
    *variants: Sequence[Mapping[str, Any]],
    told: str = "",
    coupled: bool = False,
    problem: str = "small",
    atol: float = 0.0,
    lr: float = 0.01,
    **kwargs: Any,
) -> Iterator[Case]:
    """As many cases as the longest list of variants has, the shorter ones over again; the id begins with the reader."""
    reader = id if id == "rmsproptf-like" else id.partition("-")[0]
    for number in range(max(map(len, variants), default=1)):
        combination = [variant[number % len(variant)] for variant in variants]
        words = [f"{key}={value}" for variant in combination for key, value in variant.items()]
        merged = {"lr": lr, **kwargs, **{key: value for variant in combination for key, value in variant.items()}}
        name = "-".join([id, *words])
        yield Case(name, factory, merged, reader, reference, told or reader, coupled, problem, atol)


ASKED_FOR = "nobody: it is asked for"
DECAY = ({"weight_decay": 0.0}, {"weight_decay": 0.1})
EACH = ({"foreach": False}, {"foreach": True})
FUSED = (*EACH, {"fused": True})
CENTRED = ({"centered": False}, {"centered": True})
DECOUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": True}
# A short memory and long steps, so that the average falls again and its maximum is not its last value.
AMSGRAD = {"amsgrad": True, "betas": (0.9, 0.8), "lr": 0.1}
ADAM, ADAMW = "torch.optim.adam.Adam", "torch.optim.adamw.AdamW"
NADAM, RADAM = "torch.optim.nadam.NAdam", "torch.optim.radam.RAdam"
ADAGRAD, RMSPROP = "torch.optim.adagrad.Adagrad", "torch.optim.rmsprop.RMSprop"
ADEMAMIX = "pytorch_optimizer.optimizer.ademamix.AdEMAMix"
SB3_RMSPROP = "stable_baselines3.common.sb2_compat.rmsprop_tf_like.RMSpropTFLike"
RMSPROPTF, ADABELIEF = "timm.optim.rmsprop_tf.RMSpropTF", "timm.optim.adabelief.AdaBelief"

CASES = [
    *cases("adam", ADAM, references.adam, FUSED, DECAY, coupled=True),
    *cases("adam-amsgrad", ADAM, references.adam, FUSED, **AMSGRAD),
    *cases("adam-no-memory", ADAM, references.adam, betas=(0.9, 0.0)),
    *cases("adam-decoupled", ADAM, references.adam, told="adamw", **DECOUPLED),
    *cases("adamw", ADAMW, references.adam, FUSED, DECAY),
    *cases("adamw-amsgrad", ADAMW, references.adam, FUSED, **AMSGRAD),
    *cases("adamw-legacy", "timm.optim.adamw.AdamWLegacy", references.adam, DECAY, told="adam or adamw"),
    *cases("nadam", NADAM, references.adam, EACH, DECAY, coupled=True),
    *cases("nadam-decoupled", NADAM, references.adam, **DECOUPLED),
    *cases("radam", RADAM, references.adam, EACH, DECAY, told="adam", coupled=True),
    *cases("radam-decoupled", RADAM, references.adam, told="adamw", **DECOUPLED),
    *cases(
        *("sparseadam", "torch.optim.sparse_adam.SparseAdam", references.sparse_adam),
        told="adam or adamw",
        problem="sparse",
    ),
    *cases("adagrad", ADAGRAD, references.adagrad, FUSED, DECAY, coupled=True),
    *cases("adagrad-start", ADAGRAD, references.adagrad, EACH, initial_accumulator_value=0.1),
    *cases("rmsprop", RMSPROP, references.rmsprop, EACH, DECAY, coupled=True),
    *cases("rmsprop-centred", RMSPROP, references.rmsprop, EACH, DECAY, coupled=True, alpha=0.9, centered=True),
    *cases("rmsprop-momentum", RMSPROP, references.rmsprop, EACH, DECAY, coupled=True, lr=0.001, momentum=0.9),
    *cases("adadelta", "torch.optim.adadelta.Adadelta", references.adadelta, EACH, DECAY, coupled=True, lr=1.0),
    # An eps and a decay that show after a few steps.
    *cases(
        "adamax", "torch.optim.adamax.Adamax", references.adamax, EACH, DECAY, coupled=True, betas=(0.9, 0.9), eps=1e-3
    ),
    *cases("adafactor", "torch.optim.Adafactor", references.adafactor, EACH, DECAY),
    *cases("adopt", "timm.optim.adopt.Adopt", references.adopt, EACH, DECAY, coupled=True),
    *cases("lamb", "timm.optim.lamb.Lamb", references.lamb, DECAY),
    *cases("ademamix", ADEMAMIX, references.adam, EACH, DECAY, coupled=True),
    *cases("ademamix-decoupled", ADEMAMIX, references.adam, weight_decay=0.1, weight_decouple=True),
    # The average starts at one, so float32 rounds it to 6e-8 at every step, however small the gradients are.
    *cases("rmsproptf", RMSPROPTF, references.rmsprop_from_one, CENTRED, DECAY, coupled=True, atol=2e-7),
    *cases(
        "rmsproptf-decoupled", RMSPROPTF, references.rmsprop_from_one, atol=2e-7, weight_decay=0.1, decoupled_decay=True
    ),
    *cases(
        *("rmsproptf-like", SB3_RMSPROP, references.rmsprop_from_one, CENTRED),
        told=ASKED_FOR,
        alpha=0.9,
        atol=2e-7,
    ),
    *cases("adabelief", ADABELIEF, references.adabelief, DECAY, eps=1e-5),
    *cases("adabelief-coupled", ADABELIEF, references.adabelief, DECAY, coupled=True, eps=1e-8, decoupled_decay=False),
    *cases("adabelief-amsgrad", ADABELIEF, references.adabelief, **AMSGRAD),
    *(
        case
        for name in ("Adam", "AdamW", "AdEMAMix")
        for page, bits in itertools.product(("", "Paged"), ("", "8bit", *(["32bit"] if name != "AdEMAMix" else [])))
        for case in cases(
            f"{name.lower()}8bit-{page}{bits}",
            f"bitsandbytes.optim.{name.lower()}.{page}{name}{bits}",
            references.adam,
            told="ademamix8bit",
            problem="large",
            weight_decay=0.1,
        )
    ),
]


class Refusal(NamedTuple):
    """An optimiser that keeps no second moment per weight, and the words that must say what would work."""

    factory: str
    reader: str
    advice: str = "call ba.track(optimizer) before training"
    kwargs: Mapping[str, Any] = MappingProxyType({})
    problem: str = "small"


REFUSALS = [
    Refusal("torch.optim.sgd.SGD", "sgd", "reader='ogd'", {"lr": 0.01, "momentum": 0.9}),
    Refusal("torch.optim.lbfgs.LBFGS", "lbfgs"),
    Refusal("torch.optim.Muon", "muon", "AdamW trains the other parameters, pass both as a list", {}, "matrix"),
    Refusal("timm.optim.lion.Lion", "lion"),
    Refusal("bitsandbytes.optim.lion.Lion", "lion"),
    Refusal("bitsandbytes.optim.lion.Lion8bit", "lion", problem="large"),
    Refusal("lion_pytorch.lion_pytorch.Lion", "lion"),
    Refusal("pytorch_optimizer.optimizer.lion.Lion", "lion"),
    *(
        Refusal(f"pytorch_optimizer.optimizer.{path}", "galore")
        for path in ("galore.GaLore", "apollo.APOLLO", "fira.Fira")
    ),
]


# --- training -------------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    case: Case
    model: nn.Module
    optimizer: Optimizer
    traces: dict[str, Trace]
    generator: torch.Generator

    def reader(self, corrected: bool) -> StateReader:
        """Without its bias correction: v as the optimiser keeps it."""
        reader = reader_named(self.case.reader)
        return reader if corrected else replace(reader, bias_correction=False)

    def go_on(self, steps: int) -> None:
        """Train, and record what the optimiser is given."""
        parameters = dict(self.model.named_parameters())

        def before(*_: Any) -> None:
            gradients = {name: dense(p.grad) for name, p in parameters.items()}
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
            for name, p in parameters.items():
                self.traces[name].gradients.append(gradients[name])
                self.traces[name].parameters.append(dense(p))
                self.traces[name].norms.append(norm)

        hook = self.optimizer.register_step_pre_hook(before)
        for _ in range(steps):
            self.optimizer.zero_grad()
            PROBLEMS[self.case.problem].loss(self.model, self.generator).backward()
            self.optimizer.step()
        hook.remove()

    def reference(self, name: str) -> Moments:
        settings, trace = self.optimizer.defaults, self.traces[name]
        decay = settings.get("weight_decay", 0.0) if self.case.coupled else 0.0
        return self.case.reference(trace, with_decay(trace, decay), settings)

    def is_quantised(self, name: str) -> bool:
        state = self.optimizer.state[self.model.get_parameter(name)]
        return "state2" in state and state["state2"].dtype == torch.uint8


def build(case: Case, optimizer_class: Callable[[str], type]) -> Trained:
    cls = optimizer_class(case.factory)
    torch.manual_seed(0)
    model = PROBLEMS[case.problem].model()
    optimizer = cls(model.parameters(), **case.kwargs)
    traces = {name: Trace() for name, _ in model.named_parameters()}
    return Trained(case, model, optimizer, traces, torch.Generator().manual_seed(1))


# --- one template test over the whole table -------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reader_against_the_definition(case: Case, optimizer_class: Callable[[str], type]) -> None:
    trained = build(case, optimizer_class)
    trained.go_on(STEPS)
    model, optimizer = trained.model, trained.optimizer
    before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    saved = through_a_file(optimizer.state_dict())

    # It knows its optimiser, and whether weight decay leaks into the moment.
    assert qualified(type(optimizer)) == case.factory
    assert reader_of(optimizer) is reader_named(case.reader)
    (group,) = optimizer.param_groups
    leaks = case.coupled and case.kwargs.get("weight_decay", 0.0) != 0.0
    assert reader_of(optimizer).couples_decay(group) == leaks

    for corrected in (True, False):
        live = read_optimizer(model, optimizer, reader=trained.reader(corrected))
        assert list(live.second_moment) == [name for name, _ in model.named_parameters()]
        assert not live.omitted
        for name, v in live.second_moment.items():
            assert (live.reader[name], live.steps[name]) == (case.reader, STEPS)
            assert live.weight_decay[name] == optimizer.defaults.get("weight_decay", 0.0)
            check_moment(trained, name, v, corrected)
        # A saved state reads as the live one.
        read = read_state_dict(model, saved, optimizer=trained.reader(corrected))
        assert same(dict(read.second_moment), dict(live.second_moment))
        assert (read.steps, read.weight_decay, read.reader) == (live.steps, live.weight_decay, live.reader)
    # Who wrote it is told by its entries, or asked for; never told wrong.
    if case.told == ASKED_FOR:
        with pytest.raises(MatchError, match="are read differently: say which"):
            identify_reader(saved)
    else:
        told = identify_reader(saved)
        found = read_state_dict(model, saved, optimizer=told).second_moment
        assert same(dict(found), dict(read_optimizer(model, optimizer).second_moment))
        assert told.name == case.told

    # Reading changes nothing and shares no memory with the optimiser.
    assert same((optimizer.state_dict(), model.state_dict()), before)
    kept = {t.untyped_storage().data_ptr() for t in tensors_in(optimizer.state_dict())}
    assert kept.isdisjoint(v.untyped_storage().data_ptr() for v in live.second_moment.values())


def check_moment(trained: Trained, name: str, v: Tensor, corrected: bool) -> None:
    moments = trained.reference(name)
    expected = moments.corrected if corrected else moments.kept
    assert v.dtype == torch.float32
    if trained.is_quantised(name):
        # Every step rounds to one of 256 levels a block, so only the bulk of the moments can agree.
        assert float((v - expected).abs().sum() / expected.sum()) < 0.03, name
    else:
        assert_close(v.double(), expected, rtol=1e-5, atol=trained.case.atol, msg=lambda text: f"{name}: {text}")


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# OGD belongs to no class: it is asked for by name.
# SOAP, whose second moment is in other coordinates, has tests of its own: test_soap_packages.py. So have those that are
# made otherwise than of a list of parameters: test_newer_optimisers.py.
NEWER = (
    *("schedule-free", "schedule-free-pytorch-optimizer", "fusedadam", "muon-with-adam", "muon-timm"),
    *("muon-pytorch-optimizer", "torchao-adam", "torchao-adamw", "sgd-schedule-free"),
)
ELSEWHERE = {
    *((name, path) for name in NEWER for path in reader_named(name).class_names()),
    *(("adamw", f"{package}.AdamW") for package in ("galore_torch.adamw", "apollo_torch.apollo")),
    *(("muon", f"muon.{name}") for name in ("Muon", "SingleDeviceMuon")),
    ("tracked", ""),
    ("ogd", ""),
    ("rmsprop-old", ""),
    ("published", ""),
    ("soap", ""),
    ("soap-reference", "soap.SOAP"),
    ("soap-pytorch-optimizer", "pytorch_optimizer.optimizer.soap.SOAP"),
}
TESTED = {(case.reader, case.factory) for case in CASES} | {(r.reader, r.factory) for r in REFUSALS} | ELSEWHERE


@pytest.mark.parametrize(
    ("reader", "path"), [(reader.name, path) for reader in BUILT_IN for path in reader.class_names()]
)
def test_every_class_that_a_built_in_reader_names_is_in_a_table(
    reader: str, path: str, optimizer_class: Callable[[str], type]
) -> None:
    assert {reader.name for reader in BUILT_IN} == {reader for reader, _ in TESTED}
    # A class may be reached by several names, but it says one of itself.
    assert (reader, qualified(optimizer_class(path))) in TESTED


# --- what single readers promise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit"])
def test_eight_bit_states_dequantise_as_bitsandbytes_does(name: str, optimizer_class: Callable[[str], type]) -> None:
    trained = build(next(case for case in CASES if case.factory.endswith(f".{name}")), optimizer_class)
    trained.go_on(5)
    from bitsandbytes.functional import dequantize_blockwise

    kept = read_optimizer(trained.model, trained.optimizer, reader=trained.reader(False)).second_moment
    quantised = [parameter for parameter in kept if trained.is_quantised(parameter)]
    assert quantised == ["0.weight", "2.weight"]
    for parameter in quantised:
        state = trained.optimizer.state[trained.model.get_parameter(parameter)]
        theirs = dequantize_blockwise(
            state["state2"], absmax=state["absmax2"], code=state["qmap2"].float(), blocksize=256
        )
        assert torch.equal(kept[parameter], theirs)


def test_eight_bit_states_with_unknown_blocks_are_refused() -> None:
    model = nn.Linear(100, 10, bias=False)
    state = {
        "step": 3,
        "state2": torch.zeros(10, 100, dtype=torch.uint8),
        "qmap2": torch.zeros(256),
        "absmax2": torch.ones(7),
    }
    saved = {"state": {0: state}, "param_groups": [{"params": [0], "betas": (0.9, 0.999)}]}
    with pytest.raises(MatchError, match=r"1000 entries in 7 blocks"):
        read_state_dict(model, saved, optimizer="adam8bit")


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.factory)
def test_an_optimiser_without_a_second_moment_is_refused(
    refusal: Refusal, optimizer_class: Callable[[str], type]
) -> None:
    cls = optimizer_class(refusal.factory)
    problem = PROBLEMS[refusal.problem]
    torch.manual_seed(0)
    model, generator = problem.model(), torch.Generator().manual_seed(0)
    optimizer = cls(model.parameters(), **refusal.kwargs)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model, generator)
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(BayesAdamError) as caught:
        read_optimizer(model, optimizer)
    assert qualified(cls) == refusal.factory
    assert str(caught.value).startswith(f"{cls.__name__} keeps no second moment per weight")
    assert refusal.advice in str(caught.value)
    with pytest.raises(BayesAdamError) as caught:
        read_state_dict(model, optimizer.state_dict(), optimizer=refusal.reader)
    assert refusal.advice in str(caught.value)


@pytest.mark.parametrize("saved", [False, True])
def test_sgd_gives_ones_when_asked_by_name(saved: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    if saved:
        curvature = read_state_dict(model, optimizer.state_dict(), optimizer="ogd")
    else:
        curvature = read_optimizer(model, optimizer, reader="ogd")
    assert same(dict(curvature.second_moment), {"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    assert curvature.weight_decay == {"weight": 0.01, "bias": 0.01}


# --- a user's own reader --------------------------------------------------------------------------------------------


class Halving(Optimizer):
    """Keeps v ← v/2 + g²/2 as a logarithm."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"forget": 0.5})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                before = state["log"].exp() if state else torch.zeros_like(p)
                state |= {"step": state.get("step", 0) + 1, "log": (0.5 * before + 0.5 * p.grad**2).log()}


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers registered by a test go away with it."""
    monkeypatch.setattr(registry_module, "_registry", dict(registry_module._registry))


@pytest.mark.usefixtures("own_registry")
def test_an_own_reader_by_a_function() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = Halving(model.parameters())
    for x in ([1.0, 2.0], [3.0, 1.0]):
        optimizer.zero_grad()
        model(torch.tensor([x])).sum().backward()
        optimizer.step()
    with pytest.raises(MatchError, match=r"no reader is registered for .*Halving.*register\(StateReader"):
        read_optimizer(model, optimizer)
    fields = {
        "decay": ("forget", None),
        "bias_correction": True,
        "read": lambda state, group, shape: state["log"].exp(),
    }
    register(StateReader("halving", (Halving,), **fields))
    # Gradients (1, 2) and (3, 1): v = g₁²/4 + g₂²/2.
    expected = torch.tensor([[4.75, 1.5]]) / 0.75
    assert_close(read_optimizer(model, optimizer).second_moment["weight"], expected)
    assert_close(read_state_dict(model, optimizer.state_dict(), optimizer="halving").second_moment["weight"], expected)
    wrong = StateReader("unregistered", (), read=lambda state, group, shape: state["log"].sum())
    with pytest.raises(MatchError, match=r"'weight' has shape \(\), the parameter \(1, 2\)"):
        read_optimizer(model, optimizer, reader=wrong)


@pytest.mark.usefixtures("own_registry")
def test_a_subclass_is_read_as_its_nearest_registered_ancestor() -> None:
    child = type("Child", (torch.optim.AdamW,), {})
    register(StateReader("child", (child,), key="exp_avg_sq"))
    assert reader_of(type("Grandchild", (child,), {})(nn.Linear(2, 1).parameters())).name == "child"


@pytest.mark.usefixtures("own_registry")
def test_a_mark_of_a_users_own_tells_what_else_is_kept() -> None:
    entries = {"step": torch.tensor(3.0), "zeph_m": torch.ones(2), "zeph_v": torch.ones(2)}
    state = {"state": {0: entries}, "param_groups": [{"zeta": (0.9, 0.99), "zephyr": True, "params": [0]}]}
    reader = StateReader("zephyr", (), key="zeph_v", decay=("zeta", 1), bias_correction=True)
    register(reader)
    with pytest.raises(MatchError):
        identify_reader(state)
    register(replace(reader, mark="zephyr"), replace=True)
    assert identify_reader(state).name == "zephyr"
