"""Linearised variances and covariances against a whole Jacobian in float64, over the table of networks."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import bayesadam as ba
from bayesadam.errors import BayesAdamError, ImproperError, MemoryBudgetError
from bayesadam.predict import layers, moments, plan
from bayesadam.predict.call import Call, evaluating
from bayesadam.predict.layers import MatrixUse
from bayesadam.predict.moments import parameters_at_mean
from bayesadam.predict.plan import Plan, make_plan
from cases import mlp, quick_of
from floats import assert_close, close
from predict.cases_networks import (
    NETWORKS,
    Lambda,
    Network,
    Then,
    brute_force,
    encoder,
    few_outputs,
    normal,
    posterior_over,
    predict,
    relative_error,
    spread_inputs,
)

# torch says so where an operation has no batching rule of its own; the numbers are the same.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

by_name = {network.name: network for network in NETWORKS}
every_network = pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)


def plan_of(posterior: ba.Posterior, inputs: Any) -> Plan:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in parameters_at_mean(posterior).items()}
    with evaluating(posterior.model):
        return make_plan(Call(posterior.model), leaves, inputs)


def error_of(posterior: ba.Posterior, inputs: Any, **options: Any) -> float:
    """The largest relative error of the mean, the variances and the covariances."""
    mean, expected = brute_force(posterior, lambda model: spread_inputs(model, inputs))
    alone = predict(posterior, inputs, **options)
    whole = predict(posterior, inputs, covariance=True, **options)
    assert alone.covariance is None
    assert alone.mean.shape == alone.variance.shape == whole.variance.shape == mean.shape
    assert whole.covariance.shape == expected.shape
    variance = expected.diagonal(dim1=1, dim2=2).clamp(min=1e-300)
    errors = [
        float((alone.mean - mean).abs().max() / mean.abs().max()),
        float((whole.mean - mean).abs().max() / mean.abs().max()),
        float((alone.variance.reshape(variance.shape) / variance - 1).abs().max()),
        float((whole.variance.reshape(variance.shape) / variance - 1).abs().max()),
        relative_error(whole.covariance, expected),
    ]
    return max(errors)


# --- the numbers ----------------------------------------------------------------------------------------------------


@every_network
def test_the_numbers_are_those_of_the_whole_jacobian(network: Network):
    model, inputs = network.make()
    assert error_of(posterior_over(model), inputs) <= 1e-8


@pytest.mark.parametrize("network", [n for n in NETWORKS if n.generic is not None], ids=lambda network: network.name)
def test_only_what_no_layer_explains_is_left_to_autograd(network: Network):
    model, inputs = network.make()
    posterior = posterior_over(model)
    expected = set(posterior.mean) if network.generic == "all" else set(network.generic)
    assert set(plan_of(posterior, inputs).generic) == expected


@every_network
def test_float32_gives_the_same_within_its_precision(network: Network):
    model, inputs = network.make(torch.float32)
    posterior = posterior_over(model)
    exact_model = copy.deepcopy(model).double()
    exact = posterior_over(exact_model)
    wide = pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, inputs)
    _, expected = brute_force(exact, lambda model: spread_inputs(model, wide))
    found = predict(posterior, inputs, covariance=True)
    assert found.mean.dtype == found.variance.dtype == found.covariance.dtype == torch.float32
    assert relative_error(found.covariance.double(), expected) <= 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: mlp(3, 5, 2), (5, 3)),
        (lambda: Then(nn.Conv2d(2, 3, 3, padding=1), few_outputs), (4, 2, 4, 4)),
        # The examples lie in the second dimension: at this precision a wrong guess must not pass for rounding.
        (lambda: encoder(1, batch_first=False), (3, 3, 4)),
        (lambda: encoder(1, batch_first=False), (2, 4, 4)),
        (lambda: encoder(1, batch_first=False), (6, 3, 4)),
    ],
    ids=["mlp", "convolution", "sequence-first-3-3", "sequence-first-2-4", "sequence-first-6-3"],
)
def test_half_precision_models_give_float32_results(build: Callable[[], nn.Module], shape: tuple[int, ...], dtype):
    torch.manual_seed(0)
    model, x = build().to(dtype).eval(), torch.randn(*shape).to(dtype)
    exact = posterior_over(copy.deepcopy(model).double())
    _, expected = brute_force(exact, lambda model: model(x.double()))
    found = predict(posterior_over(model), x, covariance=True)
    assert found.mean.dtype == found.variance.dtype == found.covariance.dtype == torch.float32
    layouts = [getattr(layout, "__name__", None) for layout in plan_of(posterior_over(model), x).layouts]
    in_float64 = [getattr(layout, "__name__", None) for layout in plan_of(exact, x.double()).layouts]
    assert layouts == in_float64
    assert relative_error(found.covariance.double(), expected) <= 0.15


def test_a_model_of_two_types_gives_the_wider_one():
    torch.manual_seed(0)
    model = Lambda(
        lambda self, x: self.wide(self.narrow(x).tanh().double()), narrow=nn.Linear(3, 4), wide=nn.Linear(4, 2).double()
    )
    posterior, x = posterior_over(model), torch.randn(4, 3)
    _, expected = brute_force(posterior, lambda model: model(x))
    found = predict(posterior, x, covariance=True)
    assert found.covariance.dtype == torch.float64
    assert relative_error(found.covariance, expected) <= 1e-5


def test_the_network_is_linearised_at_the_posteriors_mean_not_at_the_models_weights():
    torch.manual_seed(0)
    model, x = mlp(3, 4, 2).double(), normal(4, 3)()
    posterior = posterior_over(model, form="likelihood", prior_precision=20.0)
    at_mean = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in at_mean.named_parameters():
            parameter.copy_(posterior.mean[name])
    j = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(value, list(at_mean.parameters()), retain_graph=True)])
            for value in at_mean(x).flatten()
        ]
    )
    sigma = torch.cat([v.flatten() for v in posterior.variance.values()])
    found = predict(posterior, x)
    assert_close(found.variance.flatten(), j.square() @ sigma, rtol=1e-10)
    assert_close(found.mean, at_mean(x).detach(), rtol=1e-12)
    assert not close(found.mean, model(x))


def test_later_training_does_not_change_the_prediction():
    torch.manual_seed(0)
    model, x = mlp(3, 4, 2).double(), normal(4, 3)()
    posterior = posterior_over(model)
    before = predict(posterior, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    after = predict(posterior, x)
    assert torch.equal(before.mean, after.mean)
    assert torch.equal(before.variance, after.variance)


def test_the_posteriors_own_method_takes_the_same_options():
    torch.manual_seed(0)
    posterior, x = posterior_over(mlp(3, 4, 2).double()), normal(4, 3)()
    assert torch.equal(
        posterior.predict(x, likelihood="regression", covariance=True).covariance,
        predict(posterior, x, covariance=True).covariance,
    )


# --- examples that do not stand alone -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)),
            normal(5, 3),
        ),
        (
            lambda: nn.Sequential(
                nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten(), nn.Linear(12, 2)
            ),
            normal(5, 2, 3, 3),
        ),
        (lambda: Then(mlp(3, 4, 2), lambda z: z - z.mean(dim=0)), normal(4, 3)),
        # As many outputs as examples, but they are not the examples.
        (lambda: Then(mlp(3, 4, 2), lambda z: z.sum(dim=0)), normal(2, 3)),
        # A mask as long as the batch is taken for one entry an example, and cut with it.
        (
            lambda: Lambda(
                lambda self, x, mask: few_outputs(torch.einsum("ts,bsd->btd", mask, self.layer(x) * self.scale)),
                layer=nn.Linear(3, 3),
                scale=nn.Parameter(torch.randn(3)),
            ),
            lambda: (normal(4, 4, 3)(), normal(4, 4)()),
        ),
    ],
    ids=["batch-norm-1d", "batch-norm-2d", "centred", "summed", "mask-as-long-as-the-batch"],
)
def test_examples_that_depend_on_each_other_are_refused(build: Callable[[], nn.Module], inputs: Callable[[], Any]):
    torch.manual_seed(0)
    with pytest.raises(BayesAdamError, match=r"alone|each other|independent"):
        predict(posterior_over(build().double()), inputs())


def test_batch_norm_without_statistics_or_weights_is_no_trouble_where_it_does_not_mix():
    """With a frozen network before it, nothing that the posterior is over gets mixed; alone it cannot run at all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.ReLU(inplace=True), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model.double().eval()
    assert error_of(posterior_over(model), normal(5, 3)()) <= 1e-8


# --- what is remembered of a model ----------------------------------------------------------------------------------


def test_a_setting_of_the_model_may_change_between_predictions():
    torch.manual_seed(0)

    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.layer(x).tanh()
        return F.linear(z, self.layer.weight) if self.twice else z

    model = Lambda(forward, layer=nn.Linear(3, 3)).double()
    posterior, x = posterior_over(model), normal(4, 3)()
    for twice in (False, True, False):
        model.twice = twice
        assert error_of(posterior, x) <= 1e-8


def test_a_hook_may_come_between_predictions():
    torch.manual_seed(0)
    model, x = mlp(3, 4, 2).double(), normal(4, 3)()
    posterior = posterior_over(model)
    assert error_of(posterior, x) <= 1e-8
    handle = model[0].register_forward_hook(lambda module, args, output: output.sin())
    assert error_of(posterior, x) <= 1e-8
    handle.remove()
    assert error_of(posterior, x) <= 1e-8


@pytest.mark.parametrize("name", ["weight-used-by-later-examples", "layer-counted-for-later-examples"])
def test_weights_that_did_not_count_at_first_are_not_forgotten(name: str):
    model, inputs = by_name[name].make()
    posterior = posterior_over(model)
    assert error_of(posterior, inputs[:3]) <= 1e-8
    assert error_of(posterior, inputs[3:]) <= 1e-8
    assert error_of(posterior, inputs) <= 1e-8


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


def test_batches_may_have_any_size_one_after_the_other():
    model, _ = by_name["encoder-layer-sequence-first"].make()
    posterior = posterior_over(model)
    for size in (5, 1, 3, 2, 6):
        assert error_of(posterior, normal(size, 3, 4)()) <= 1e-8


def test_a_model_is_not_kept_alive_by_a_forward_that_holds_it():
    def predicted() -> weakref.ref[nn.Module]:
        model = mlp(3, 4, 2)
        predict(posterior_over(model), torch.randn(4, 3), forward=lambda _, x: model(x))
        return weakref.ref(model)

    gone = predicted()
    gc.collect()
    assert gone() is None


# --- memory ---------------------------------------------------------------------------------------------------------


def least_budget(posterior: ba.Posterior, inputs: Any) -> int:
    """A budget that is enough, where an eighth of it is not."""
    budget = 1 << 16
    while True:
        try:
            predict(posterior, inputs, memory_budget=budget // 8)
        except MemoryBudgetError:
            return budget
        budget //= 8


@pytest.mark.parametrize("network", quick_of(NETWORKS, *NETWORKS[::3]), ids=lambda network: network.name)
def test_the_least_memory_gives_the_same_numbers(network: Network, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers, "_PIECE", 11)
    monkeypatch.setattr(moments, "_OUTPUTS_AT_ONCE", 2)
    model, inputs = network.make()
    posterior = posterior_over(model)
    _, expected = brute_force(posterior, lambda model: spread_inputs(model, inputs))
    variance = expected.diagonal(dim1=1, dim2=2)
    alone = predict(posterior, inputs, memory_budget=least_budget(posterior, inputs))
    whole = predict(posterior, inputs, memory_budget=1 << 16, covariance=True)
    assert_close(alone.variance.reshape(variance.shape), variance, rtol=1e-8, atol=1e-300)
    assert relative_error(whole.covariance, expected) <= 1e-8


def test_the_work_is_really_cut_into_chunks():
    rows: list[int] = []
    torch.manual_seed(0)
    model = Lambda(lambda self, x: rows.append(len(x)) or self.net(x), net=mlp(3, 4, 2)).double()
    posterior, x = posterior_over(model), normal(64, 3)()
    predict(posterior, x, memory_budget=10_000)
    assert sum(rows[-3:]) == 64
    predict(posterior, x, memory_budget=400)
    assert rows[-64:] == [1] * 64


def test_too_small_a_budget_names_the_bytes_and_what_needs_less():
    torch.manual_seed(0)
    posterior, x = posterior_over(mlp(3, 4, 10).double()), normal(4, 3)()
    with pytest.raises(MemoryBudgetError, match=r"[\d,]+ bytes.*budget is 1,000.*covariance=False"):
        predict(posterior, x, covariance=True, memory_budget=1_000)
    assert predict(posterior, x, memory_budget=1_000).variance.shape == (4, 10)
    with pytest.raises(MemoryBudgetError, match=r"[\d,]+ bytes.*budget is 100.*'linearised-sampled'"):
        predict(posterior, x, memory_budget=100)


def test_too_small_a_budget_for_unknown_layers_names_the_parameter():
    torch.manual_seed(0)
    bare = Lambda(lambda self, x: (x @ self.matrix).tanh(), matrix=nn.Parameter(torch.randn(50, 40))).double()
    with pytest.raises(MemoryBudgetError, match=r"'matrix'.*640,000 bytes.*budget is 10,000.*'linearised-sampled'"):
        predict(posterior_over(bare), normal(2, 50)(), memory_budget=10_000)


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
def test_no_tensor_has_an_entry_for_every_example_output_and_weight(covariance: bool):
    torch.manual_seed(0)
    model, x = mlp(20, 30, 25, 4), torch.randn(8, 20)
    posterior = posterior_over(model)
    weights = sum(p.numel() for p in model.parameters())
    with LargestTensor() as meter:
        predict(posterior, x, covariance=covariance)
    # D at the widest layer, (outputs, examples, 30), which is less than a single example's Jacobian.
    assert 4 * 8 * 30 <= meter.largest < 4 * weights
    with LargestTensor() as meter:
        brute_force(posterior, lambda model: model(x))
    assert meter.largest == 8 * 4 * weights


@pytest.mark.parametrize("covariance", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(
            nn.Conv2d(3, 40, 3, padding=1), nn.Tanh(), nn.Conv2d(40, 40, 3), nn.Flatten(), nn.Linear(640, 10)
        ),
        lambda: Lambda(lambda self, x: few_outputs(self.table(self.ids(x))), table=nn.Embedding(5_000, 20)),
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
    ids=["convolutions", "embedding", "embedding-used-twice", "embedding-tied-to-the-head"],
)
def test_shared_weights_keep_within_the_piece_they_are_worked_on_in(
    build: Callable[[], nn.Module], covariance: bool, monkeypatch: pytest.MonkeyPatch
):
    """The gradients of one parameter exist a piece at a time, not for every example and output."""
    monkeypatch.setattr(layers, "_PIECE", 1 << 15)
    monkeypatch.setattr(Lambda, "ids", lambda self, x: (x.flatten(1)[:, :6] * 1e4).long().abs() % 5_000, raising=False)
    torch.manual_seed(0)
    model, x = build(), torch.randn(12, 3, 6, 6)
    if hasattr(model, "tie"):
        model.head.weight = model.table.weight
    posterior = posterior_over(model)
    biggest_parameter = max(p.numel() for p in model.parameters())
    outputs = model(x).shape[1]
    with LargestTensor() as meter:
        predict(posterior, x, covariance=covariance)
    # What a layer sees or puts out, (outputs, examples, entries), is bounded by the memory budget instead.
    assert meter.largest < 12 * outputs * biggest_parameter / 4


def test_a_thousand_outputs_take_little_memory():
    torch.manual_seed(0)
    model, x = mlp(10, 20, 1_000), torch.randn(6, 10)
    posterior = posterior_over(model)
    with LargestTensor() as meter:
        found = predict(posterior, x, memory_budget=4_000_000)
    assert meter.largest * 4 <= 4_000_000
    # The last layer and the first, written out by hand.
    (first, second), s = (model[0], model[2]), posterior.variance
    hidden = first(x).tanh()
    slope = (1 - hidden.square()).detach()
    inner = x.square() @ s["0.weight"].T + s["0.bias"]
    expected = (
        hidden.square() @ s["2.weight"].T
        + s["2.bias"]
        + torch.einsum("ch,bh,bh->bc", second.weight.square(), slope.square(), inner)
    )
    assert_close(found.variance, expected.detach(), rtol=1e-4)


# --- the last layer -------------------------------------------------------------------------------------------------


class Ending(nn.Module):
    """A body and a head, whose ends differ: `end(head, hidden, x)` makes the output."""

    def __init__(self, end: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.end = nn.Linear(4, 4), nn.Linear(4, 4, bias=bias), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.head, self.body(x).tanh(), x)


DIRECT = {
    "plain": Ending(lambda head, h, x: head(h)),
    "no-bias": Ending(lambda head, h, x: head(h), bias=False),
    "through-its-input": Ending(lambda head, h, x: head(h.square() + x)),
}
INDIRECT = {
    "skip": Ending(lambda head, h, x: head(h) + h),
    "scaled": Ending(lambda head, h, x: 2 * head(h)),
    "cloned": Ending(lambda head, h, x: head(h).clone()),
    "twice": Ending(lambda head, h, x: head(head(h))),
    "turned": Ending(lambda head, h, x: head(h).flip(1)),
    "in-place": Ending(lambda head, h, x: head(h).tanh_()),
    "weight-used-elsewhere": Ending(lambda head, h, x: head(h @ head.weight)),
    "no-body": Ending(lambda head, h, x: head(x)),
}


@pytest.mark.parametrize(("end", "direct"), [(e, True) for e in DIRECT] + [(e, False) for e in INDIRECT])
def test_back_propagation_starts_behind_the_last_layer_only_where_that_is_the_output(
    end: str, direct: bool, monkeypatch: pytest.MonkeyPatch
):
    model = copy.deepcopy((DIRECT | INDIRECT)[end]).double()
    x = normal(5, 4)()
    taken = []
    found = moments._head
    monkeypatch.setattr(moments, "_head", lambda *given: taken.append(found(*given)) or taken[-1])
    assert error_of(posterior_over(model), x) <= 1e-8
    assert all((head is not None) is direct for head in taken)
    assert taken


# --- state ----------------------------------------------------------------------------------------------------------

METHODS = ("linearised", "sampled", "linearised-sampled")


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


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "training": [module.training for module in model.modules()],
        "hooks": [
            [tuple(getattr(module, name)) for name in sorted(vars(module)) if "hooks" in name]
            for module in model.modules()
        ],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "identity": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "memory": [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())],
        "version": [tensor._version for tensor in model.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "grad": [id(parameter.grad) for parameter in model.parameters()],
        "values": [
            tensor.detach().clone().tolist()
            for tensor in (
                *model.parameters(),
                *model.buffers(),
                *(p.grad for p in model.parameters() if p.grad is not None),
            )
        ],
    }


@pytest.fixture
def fragile() -> tuple[Fragile, ba.Posterior, Tensor, list[int]]:
    torch.manual_seed(0)
    model, x = Fragile(), torch.randn(5, 1, 3, 3)
    posterior = posterior_over(model, prior_precision=1e4)
    model.train()
    model.norm.eval()
    model(x).sum().backward()
    model.linear.weight.grad = None
    calls: list[int] = []
    model.linear.register_forward_hook(lambda *_: calls.append(1))
    return model, posterior, x, calls


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_as_before(fragile, method: str):
    model, posterior, x, calls = fragile
    before = state_of(model)
    with torch.random.fork_rng():
        predict(posterior, x, predictive=method, n_samples=5, generator=torch.Generator().manual_seed(0))
    assert state_of(model) == before
    assert calls


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_as_before_whichever_of_its_calls_fails(fragile, method: str):
    model, posterior, x, _ = fragile
    options = {"predictive": method, "n_samples": 3, "generator": torch.Generator().manual_seed(0)}
    start = model.seen
    predict(posterior, x, **options)
    calls = model.seen - start
    assert calls >= 2
    before = state_of(model)
    for call in range(1, calls + 1):
        model.fail_at = model.seen + call
        with pytest.raises(ZeroDivisionError):
            predict(posterior, x, **options)
        model.fail_at = None
        assert state_of(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_dropout_is_off_and_the_global_random_numbers_are_left_alone(fragile, method: str):
    _, posterior, x, _ = fragile
    state = torch.get_rng_state()
    found = [
        predict(posterior, x, predictive=method, n_samples=5, generator=torch.Generator().manual_seed(0))
        for _ in range(2)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[0].mean, found[1].mean)
    assert torch.equal(found[0].variance, found[1].variance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_results_carry_a_graph_where_inputs_do_and_any_gradient_mode_will_do(method: str, mode: Callable[[], Any]):
    torch.manual_seed(0)
    model = Lambda(lambda self, x: self.b(self.a(x).tanh() * self.scale), a=nn.Linear(3, 4), b=nn.Linear(4, 2), scale=nn.Parameter(torch.randn(4)))  # fmt: skip
    posterior = posterior_over(model, form="likelihood", prior_precision=100.0, n_data=1e4)
    with mode():
        # Made here, the batch is an inference tensor in inference mode.
        x = torch.linspace(-1, 1, 12).view(4, 3)
        found = predict(
            posterior, x, predictive=method, covariance=True, n_samples=3, generator=torch.Generator().manual_seed(0)
        )
    expected = predict(posterior, torch.linspace(-1, 1, 12).view(4, 3).requires_grad_(), predictive=method, covariance=True, n_samples=3, generator=torch.Generator().manual_seed(0))  # fmt: skip
    for name in ("mean", "variance", "covariance"):
        assert not getattr(found, name).requires_grad
        assert getattr(expected, name).requires_grad
        assert_close(getattr(found, name), getattr(expected, name).detach())


class Head:
    """A forward that cannot be referred to weakly, and one that is a method."""

    __slots__ = ()

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, :1]


class Holder:
    def first(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, :1]


def test_a_forward_may_be_any_callable_and_a_method_is_planned_once(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    posterior, x, holder = posterior_over(mlp(3, 4, 2)), torch.randn(5, 3), Holder()
    expected = predict(posterior, x).variance[:, :1]
    planned = []
    monkeypatch.setattr(plan, "make_plan", lambda *a: planned.append(a) or make_plan(*a))
    for forward in (Head(), Head(), lambda model, x: model(x)[:, :1]):
        assert_close(predict(posterior, x, forward=forward).variance, expected)
    planned.clear()
    for _ in range(3):
        assert_close(predict(posterior, x, forward=holder.first).variance, expected)
    assert len(planned) == 1


# --- bad requests ---------------------------------------------------------------------------------------------------


def test_weights_without_curvature_or_prior_are_refused_not_turned_into_nan():
    torch.manual_seed(0)
    model, x = mlp(3, 4, 2), torch.randn(4, 3)
    x[:, 1] = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model(x).square().mean().backward()
    optimizer.step()
    improper = ba.Posterior.from_optimizer(model, optimizer, 100, prior_precision=0.0)
    with pytest.raises(ImproperError, match=r"'0.weight': 4 of 12"):
        predict(improper, x)
    assert torch.isfinite(predict(improper.replace(prior_precision=1.0), x).variance).all()


def test_a_model_that_is_random_in_evaluation_is_told_so():
    model = Lambda(lambda self, x: F.dropout(self.layer(x), 0.5), layer=nn.Linear(3, 200))
    with pytest.raises(BayesAdamError, match="something in it is random"):
        predict(posterior_over(model), torch.ones(4, 3))


def test_outputs_that_no_weight_reaches_are_named():
    model = Lambda(lambda self, x: x * 2.0, layer=nn.Linear(3, 2))
    with pytest.raises(BayesAdamError, match="does not depend on the posterior's parameters"):
        predict(posterior_over(model), torch.ones(4, 3))


def test_each_projection_of_attention_has_a_place_of_its_own():
    """Tensors that are gone give their identity to later ones."""
    attention = nn.MultiheadAttention(4, 2)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in attention.named_parameters()}
    call = Call(attention, lambda model, x: model(x, x, x)[0].transpose(0, 1))
    for _ in range(20):
        uses, _ = plan.recorded(call, leaves, torch.randn(3, 2, 4))
        matrices = [use for use in uses if isinstance(use, MatrixUse)]
        assert len({use.at for use in matrices}) == len(matrices) == 4


def test_under_autocast_layers_are_still_contracted_in_closed_form():
    """A forward pass of bfloat16, sums in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    posterior, x = posterior_over(model), torch.randn(6, 3, 5, 5)
    whole = predict(posterior, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with evaluating(model):
            leaves = {name: tensor.requires_grad_() for name, tensor in parameters_at_mean(posterior).items()}
            assert plan.plan_for(Call(model), leaves, x).generic == ()
        half = predict(posterior, x)
    assert half.variance.dtype == torch.float32
    assert_close(half.variance, whole.variance, rtol=0.05)
