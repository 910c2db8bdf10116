"""Linearised variances and covariances against a whole Jacobian in float64: of a table of networks, and of random ones."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import bayesadam as ba
from bayesadam.errors import BayesAdamError, ImproperError, SettingError
from bayesadam.predict import linearised, moments, moments_under, plan, uses
from bayesadam.predict.network import Call, evaluating
from bayesadam.weights.networks import copy_into
from cases import mlp, state_of
from floats import assert_close, close
from predict.cases_networks import (
    METHODS,
    NETWORKS,
    Conv1D,
    Lambda,
    Network,
    Then,
    brute_force,
    encoder,
    error_of,
    few_outputs,
    normal,
    posterior_of,
    posterior_over,
    relative_error,
    spread_inputs,
)
from predict.cases_random import (
    FAMILIES,
    STRUCTURES,
    Family,
    attention,
    bilinear,
    error_of_random,
    experts,
    mixed_precision,
    transformers,
)

pytestmark = [
    # torch says so where an operation has no batching rule of its own; the numbers are the same.
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    # Eight recorded gradients are few.
    pytest.mark.filterwarnings("ignore:the posterior has .* gradients behind it"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated"),
]

by_name = {network.name: network for network in NETWORKS}


def run_of(posterior: ba.Posterior, inputs: Any) -> plan.Pass:
    """A pass of all examples, as it is explained."""
    with evaluating(posterior.model):
        call = Call.of(posterior, None)
        return plan.examined(call, inputs, plan.plan_for(call, inputs).shared)


# --- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_the_numbers_are_those_of_the_whole_jacobian(network: Network):
    """And only what no layer explains is left to autograd."""
    model, inputs = network.make()
    posterior = posterior_over(model)
    assert error_of(posterior, inputs) <= 1e-10
    if network.generic is not None:
        odd = set(posterior.mean) if network.generic == "all" else set(network.generic)
        assert set(run_of(posterior, inputs).odd) == odd


@pytest.mark.parametrize("network", NETWORKS[::3], ids=lambda network: network.name)
def test_float32_in_the_least_memory_gives_the_same_within_its_precision(
    network: Network, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uses, "_PIECE", 11)
    monkeypatch.setattr(moments, "_OUTPUTS_AT_ONCE", 2)
    model, inputs = network.make(torch.float32)
    exact = posterior_over(copy.deepcopy(model).double())
    wide = pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, inputs)
    _, expected = brute_force(exact, lambda model: spread_inputs(model, wide))
    posterior = posterior_over(model)
    monkeypatch.setattr(moments, "BUDGET", 1 << 15)
    whole = linearised(posterior, inputs, covariance=True)
    assert whole.mean.dtype == whole.variance.dtype == whole.covariance.dtype == torch.float32
    assert relative_error(whole.covariance.double(), expected) <= 1e-3
    # In a budget that is enough, where an eighth of it is not.
    alone = linearised(posterior, inputs).variance
    with contextlib.suppress(SettingError):
        while True:
            monkeypatch.setattr(moments, "BUDGET", moments.BUDGET // 8)
            alone = linearised(posterior, inputs).variance
    variance = expected.diagonal(dim1=1, dim2=2)
    assert_close(alone.double().reshape(variance.shape), variance, rtol=1e-3, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: mlp(3, 5, 2), (5, 3)),
        (lambda: Then(nn.Conv2d(2, 3, 3, padding=1), few_outputs), (4, 2, 4, 4)),
        # The examples lie in the second dimension: at this precision a wrong guess must not pass for rounding.
        (lambda: encoder(1, batch_first=False), (3, 3, 4)),
        (lambda: encoder(1, batch_first=False), (6, 3, 4)),
    ],
    ids=["mlp", "convolution", "sequence-first-3-3", "sequence-first-6-3"],
)
def test_half_precision_models_give_float32_results(build: Callable[[], nn.Module], shape: tuple[int, ...], dtype):
    model, x = build().to(dtype).eval(), torch.randn(*shape).to(dtype)
    exact, posterior = posterior_over(copy.deepcopy(model).double()), posterior_over(model)
    _, expected = brute_force(exact, lambda model: model(x.double()))
    found = linearised(posterior, x, covariance=True)
    assert found.mean.dtype == found.variance.dtype == found.covariance.dtype == torch.float32
    runs = run_of(posterior, x), run_of(exact, x.double())
    half, double = ([use.layout for use in run.explained] for run in runs)
    assert half == double
    assert relative_error(found.covariance.double(), expected) <= 0.15


def test_under_autocast_layers_are_still_contracted_in_closed_form():
    """A forward pass of bfloat16, sums in float32."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    posterior, x = posterior_over(model), torch.randn(6, 3, 5, 5)
    whole = linearised(posterior, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_of(posterior, x).odd == ()
        half = linearised(posterior, x)
    assert half.variance.dtype == torch.float32
    assert_close(half.variance, whole.variance, rtol=0.05)


def test_the_network_is_linearised_at_the_posteriors_mean_not_at_the_models_weights():
    model, x = mlp(3, 4, 2).double(), normal(4, 3)()
    posterior = posterior_over(model, form="likelihood", prior_precision=20.0)
    at_mean = replace(posterior, model=copy.deepcopy(model))
    copy_into(at_mean.model, at_mean.mean)
    mean, expected = brute_force(at_mean, lambda model: model(x))
    # Later training does not change the prediction.
    with torch.no_grad():
        model[0].weight.mul_(3.0)
    found = linearised(posterior, x, covariance=True)
    assert_close(found.covariance, expected, rtol=1e-10)
    assert_close(found.mean, mean, rtol=1e-12)
    assert not close(found.mean, model(x))


def test_several_variances_of_one_mean_take_one_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moments, "BUDGET", 1 << 12)
    posterior, x = posterior_over(mlp(3, 4, 2).double()), normal(4, 3)()
    others = [posterior.replace(prior_precision=delta) for delta in (0.5, 8.0)]
    mean, variance, covariance = moments_under(posterior, [q.coordinate_variance for q in others], x, covariance=True)
    for i, q in enumerate(others):
        found = linearised(q, x, covariance=True)
        assert_close(mean, found.mean)
        assert_close(variance[i], found.variance)
        assert_close(covariance[i], found.covariance)


def test_a_recurrent_layer_whose_weights_are_made_of_others():
    """Those have gradients through it."""
    layer = nn.utils.weight_norm(nn.LSTM(3, 4, batch_first=True), "weight_hh_l0").double()
    assert error_of(posterior_over(Then(layer, lambda z: few_outputs(z[0]))), normal(3, 4, 3)()) <= 1e-8


# --- structures, and all inputs together ----------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "inputs"])
def test_moments_and_gradients_in_every_structure(structure: str):
    """One layer has its inputs first."""
    model, x = nn.Sequential(Conv1D(3, 6), nn.Tanh(), mlp(6, 5, 2)).double(), normal(5, 3)()
    posterior = posterior_of(structure, model, x)
    assert error_of(posterior, x) <= 1e-7
    x = x[:2].requires_grad_()
    for outcome in ("mean", "variance", "joint"):
        joint = outcome == "joint"
        assert torch.autograd.gradcheck(
            lambda z, o=outcome, j=joint: getattr(linearised(posterior, z, joint=j), o), (x,)
        )


def test_parameters_are_taken_one_by_one_where_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    posterior, x = posterior_over(mlp(3, 6, 5, 2).double()), normal(4, 3)()
    expected = linearised(posterior, x, joint=True).joint
    monkeypatch.setattr(moments, "BUDGET", 3 * 8 * 8 * 30)
    assert_close(linearised(posterior, x, joint=True).joint, expected)
    monkeypatch.setattr(moments, "BUDGET", 100)
    with pytest.raises(SettingError, match="draw weights"):
        linearised(posterior, x, joint=True)


# --- what only some examples tell -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["weight-used-by-later-examples", "layer-counted-for-later-examples", "second-use-behind-a-gate"]
)
def test_a_use_that_did_not_count_at_first_is_not_forgotten(name: str):
    model, inputs = by_name[name].make()
    posterior = posterior_over(model)
    for part in (inputs[:3], inputs[3:], inputs):
        assert error_of(posterior, part) <= 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gate_that_is_open_for_one_example_of_many(dtype: torch.dtype):
    """A weight has a second use for the last example alone, in a batch that the plan has long known."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.layer(x) + (x[:, :1] < -2.5) * F.linear(x.sin(), self.layer.weight)

    model, x = Lambda(forward, layer=nn.Linear(3, 2)).double(), normal(3000, 3)().clamp(min=-2.4)
    linearised(posterior_over(model.to(dtype)), x.to(dtype))
    x[-1, 0] = -3.0
    _, expected = brute_force(posterior_over(model.double()), lambda model: model(x[-2:]))
    found = linearised(posterior_over(model.to(dtype)), x.to(dtype), covariance=True)
    assert relative_error(found.covariance[-2:].double(), expected) <= 1e-5


def test_gradients_that_cancel_are_rounding_and_not_a_sign_of_another_use():
    """Attention does not change where all keys move alike: the gradient of their bias is 0 but for rounding."""

    def attend(self: Any, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        return few_outputs(scores.softmax(dim=-1) @ x)

    torch.manual_seed(0)
    model = Lambda(attend, query=nn.Linear(4, 4), key=nn.Linear(4, 4))
    assert run_of(posterior_over(model), torch.randn(5, 3, 4)).odd == ()


def test_examples_that_are_no_numbers_leave_the_others_alone():
    posterior, x = posterior_over(mlp(3, 4, 2).double()), normal(5, 3)()
    expected = linearised(posterior, x, covariance=True)
    x[1, 0], x[4, 2] = torch.nan, torch.inf
    found = linearised(posterior, x * 1.0, covariance=True)
    keep = torch.tensor([0, 2, 3])
    assert found.variance[1].isnan().all()
    assert_close(found.variance[keep], expected.variance[keep])
    assert_close(found.covariance[keep], expected.covariance[keep])


MIXED = r"alone|each other|independent"


@pytest.mark.parametrize(
    ("model", "inputs", "match"),
    [
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)),
            normal(5, 3),
            MIXED,
        ),
        (Then(mlp(3, 4, 2), lambda z: z - z.mean(dim=0)), normal(4, 3), MIXED),
        # As many outputs as examples, but they are not the examples.
        (Then(mlp(3, 4, 2), lambda z: z.sum(dim=0)), normal(2, 3), MIXED),
        # A mask as long as the batch is taken for one entry an example, and cut with it.
        (
            Lambda(
                lambda self, x, mask: few_outputs(torch.einsum("ts,bsd->btd", mask, self.layer(x) * self.scale)),
                layer=nn.Linear(3, 3),
                scale=nn.Parameter(torch.randn(3)),
            ),
            lambda: (normal(4, 4, 3)(), normal(4, 4)()),
            MIXED,
        ),
        (Then(nn.Linear(3, 200), lambda z: F.dropout(z, 0.5)), normal(4, 3), "something in it is random"),
        (
            Lambda(lambda self, x: 2 * x, layer=nn.Linear(3, 2)),
            normal(4, 3),
            "not depend on the posterior's parameters",
        ),
    ],
    ids=["batch-norm", "centred", "summed", "mask-as-long-as-the-batch", "random", "of-no-weight"],
)
def test_what_is_no_function_of_one_example_and_the_weights_is_refused(
    model: nn.Module, inputs: Callable[[], Any], match: str
):
    with pytest.raises(BayesAdamError, match=match):
        linearised(posterior_over(model.double()), inputs())


def test_a_model_that_begins_to_mix_examples_is_refused():
    model = Lambda(lambda self, x: self.net(x) - self.share * self.net(x).mean(dim=0), net=mlp(3, 4, 2)).double()
    posterior, x = posterior_over(model), normal(4, 3)()
    model.share = 0.0
    linearised(posterior, x)
    model.share = 0.5
    with pytest.raises(BayesAdamError, match="alone"):
        linearised(posterior, x)


# --- what changes between calls -------------------------------------------------------------------------------------


def test_a_model_first_seen_with_a_last_layer_of_zeros():
    """No gradient reaches the layers before it, so that nothing can be learned about them from that call."""
    model, inputs = by_name["encoder-layer-sequence-first-batch-is-length"].make()
    head = copy.deepcopy(model.head.weight)
    with torch.no_grad():
        model.head.weight.zero_()
    assert error_of(posterior_over(model), inputs) <= 1e-8
    with torch.no_grad():
        model.head.weight.copy_(head)
    assert error_of(posterior_over(model), inputs) <= 1e-8


def test_a_model_is_not_kept_alive_by_a_forward_that_holds_it():
    def predicted() -> weakref.ref[nn.Module]:
        model = mlp(3, 4, 2)
        linearised(posterior_over(model), torch.randn(4, 3), forward=lambda _, x: model(x))
        return weakref.ref(model)

    gone = predicted()
    gc.collect()
    assert gone() is None


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_known_model_runs_once_a_batch_unless_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    torch.manual_seed(0)
    model = Lambda(lambda self, x: rows.append(len(x)) or self.net(x), net=mlp(3, 4, 2)).double()
    posterior, x = posterior_over(model), normal(64, 3)()
    linearised(posterior, x)
    for budget, expected in ((1 << 30, [64]), (400, [1] * 64)):
        monkeypatch.setattr(moments, "BUDGET", budget)
        rows.clear()
        linearised(posterior, x)
        assert rows == expected


def test_too_little_memory_names_the_bytes_and_what_needs_less(monkeypatch: pytest.MonkeyPatch):
    posterior, x = posterior_over(mlp(3, 4, 10).double()), normal(4, 3)()
    monkeypatch.setattr(moments, "BUDGET", 1_000)
    with pytest.raises(SettingError, match=r"[\d,]+ bytes.*budget is 1,000.*covariance=False"):
        linearised(posterior, x, covariance=True)
    assert linearised(posterior, x).variance.shape == (4, 10)
    monkeypatch.setattr(moments, "BUDGET", 100)
    with pytest.raises(SettingError, match=r"[\d,]+ bytes.*budget is 100.*draws"):
        linearised(posterior, x)
    bare = Lambda(lambda self, x: (x @ self.matrix).tanh(), matrix=nn.Parameter(torch.randn(50, 40))).double()
    monkeypatch.setattr(moments, "BUDGET", 10_000)
    with pytest.raises(SettingError, match=r"'matrix'.*640,000 bytes.*budget is 10,000.*draw"):
        linearised(posterior_over(bare), normal(2, 50)())


class LargestTensor(TorchDispatchMode):
    """Notes the number of entries of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.parametrize("covariance", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(
            nn.Conv2d(3, 40, 3, padding=1), nn.Tanh(), nn.Conv2d(40, 40, 3), nn.Flatten(), nn.Linear(640, 10)
        ),
        lambda: Lambda(
            lambda self, x: few_outputs(self.table(self.ids(x)) * self.table(self.ids(-x))),
            table=nn.Embedding(5_000, 20),
        ),
        lambda: Lambda(
            lambda self, x: self.head(self.table(self.ids(x)).mean(dim=1).tanh())[:, :10],
            table=nn.Embedding(5_000, 20),
            head=nn.Linear(20, 5_000, bias=False),
            tie=True,
        ),
    ],
    ids=["convolutions", "embedding-used-twice", "embedding-tied-to-the-head"],
)
def test_shared_weights_keep_within_the_piece_they_are_worked_on_in(
    build: Callable[[], nn.Module], covariance: bool, monkeypatch: pytest.MonkeyPatch
):
    """The gradients of one parameter exist a piece at a time, not for every example and output."""
    monkeypatch.setattr(uses, "_PIECE", 1 << 15)
    monkeypatch.setattr(Lambda, "ids", lambda self, x: (x.flatten(1)[:, :6] * 1e4).long().abs() % 5_000, raising=False)
    torch.manual_seed(0)
    model, x = build(), torch.randn(12, 3, 6, 6)
    if hasattr(model, "tie"):
        model.head.weight = model.table.weight
    posterior = posterior_over(model)
    biggest_parameter = max(p.numel() for p in model.parameters())
    outputs = model(x).shape[1]
    with LargestTensor() as meter:
        linearised(posterior, x, covariance=covariance)
    # What a layer sees or puts out, (outputs, examples, entries), is bounded by the memory budget instead.
    assert meter.largest < 12 * outputs * biggest_parameter / 4


# --- the model afterwards -------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Has everything a prediction could disturb, and fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)
        self.dropout, self.linear = nn.Dropout(0.5), nn.Linear(8, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.fail_at: int | None = None
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z = self.norm(self.convolution(x)).relu()
        self.seen += 1
        if self.seen == self.fail_at:
            raise ZeroDivisionError
        return self.frozen(self.linear(self.dropout(z).flatten(1)))


def written(model: nn.Module) -> tuple[Any, ...]:
    return state_of(model), [parameter._version for parameter in model.parameters()]


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_as_before_whichever_of_its_calls_fails(method: str):
    model, x = Fragile(), torch.randn(5, 1, 3, 3)
    posterior = posterior_over(model, prior_precision=1e4)
    model.train()
    model.norm.eval()
    model(x).sum().backward()
    model.linear.weight.grad = None
    before, random, run = written(model), torch.get_rng_state(), METHODS[method]
    found, start = run(posterior, x), model.seen
    again, calls = run(posterior, x), model.seen - start
    # Dropout is off, and the random numbers of the process are left alone.
    assert torch.equal(found.mean, again.mean)
    assert torch.equal(found.variance, again.variance)
    assert torch.equal(torch.get_rng_state(), random)
    assert written(model) == before
    for call in range(1, calls + 1):
        model.fail_at = model.seen + call
        with pytest.raises(ZeroDivisionError):
            run(posterior, x)
        model.fail_at = None
        assert written(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_any_gradient_mode_will_do(method: str):
    model = Lambda(lambda self, x: self.b(self.a(x).tanh() * self.scale), a=nn.Linear(3, 4), b=nn.Linear(4, 2), scale=nn.Parameter(torch.randn(4)))  # fmt: skip
    posterior = posterior_over(model, form="likelihood", prior_precision=100.0, n_data=1e4)
    expected = METHODS[method](posterior, torch.linspace(-1, 1, 12).view(4, 3).requires_grad_())
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            # Made here, the batch is an inference tensor in inference mode.
            found = METHODS[method](posterior, torch.linspace(-1, 1, 12).view(4, 3))
        for name in ("mean", "variance"):
            assert not getattr(found, name).requires_grad
            assert getattr(expected, name).requires_grad
            assert_close(getattr(found, name), getattr(expected, name).detach())


# --- bad requests ---------------------------------------------------------------------------------------------------


def test_weights_without_curvature_or_prior_are_refused_not_turned_into_nan():
    posterior, x = posterior_over(mlp(3, 4, 2)), torch.randn(4, 3)
    posterior.curvature.second_moment["0.weight"][:, 1] = 0.0
    for run in METHODS.values():
        with pytest.raises(ImproperError, match=r"'0.weight': 4 of 12"):
            run(posterior.replace(prior_precision=0.0), x)
    assert torch.isfinite(linearised(posterior, x).variance).all()


# --- random networks --------------------------------------------------------------------------------------------------


# Matrices of one row and one column have no eigenbases.
_MAY_BE_REFUSED = "no parameter has eigenbases"


def outcome(family: Family, seed: int, structure: str) -> str:
    try:
        error = error_of_random(family, seed, structure)
    except BayesAdamError as refusal:
        if _MAY_BE_REFUSED in str(refusal):
            return "refused"
        raise
    tolerance = 2e-3 if family is mixed_precision else 1e-7
    assert error <= tolerance, f"{family.__name__}, seed {seed}, {structure}: an error of {error:.2g}"
    return "right"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_a_random_network_is_predicted_right(family: Family):
    seed = FAMILIES.index(family)
    assert outcome(family, seed, STRUCTURES[seed % len(STRUCTURES)]) == "right"


@pytest.mark.parametrize(
    ("family", "seed", "structure"),
    [
        (attention, 62, "kronecker"),
        (transformers, 64, "kronecker"),
        (bilinear, 101, "diagonal"),
        (attention, 207, "inputs"),
        (experts, 303, "inputs"),
    ],
)
def test_what_was_wrong_before_or_an_error_of_torchs(family: Family, seed: int, structure: str):
    assert outcome(family, seed, structure) == "right"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_networks(part: int):
    counts: Counter[str] = Counter()
    for seed in range(100 * part, 100 * (part + 1)):
        torch.manual_seed(seed)
        family, structure = FAMILIES[seed % len(FAMILIES)], STRUCTURES[seed % len(STRUCTURES)]
        counts[outcome(family, seed, structure)] += 1
    assert counts["refused"] <= 3
