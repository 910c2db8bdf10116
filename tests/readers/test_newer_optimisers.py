"""Schedule-Free, Muon beside Adam, projections: live, as a saved state, and as a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import bayesadam as ba
from bayesadam.errors import BayesAdamError, BayesAdamWarning, MatchError
from bayesadam.readers import identify_reader, read_checkpoint, read_curvature, read_optimizer, read_state_dict
from bayesadam.readers.match import slots_of
from cases import mlp
from floats import assert_close
from readers.references import gradients_of, squares, through_a_file, weighted_mean

Classes = Callable[[str], type]
SIZES, STEPS = (6, 16, 3), 12


def trained(model: nn.Module, *optimizers: Any) -> dict[str, list[Tensor]]:
    """Steps on random data, and every gradient that was used, in float64."""
    generator = torch.Generator().manual_seed(1)

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(8, SIZES[0], generator=generator)
        return (model(x) - x.sum(dim=1, keepdim=True).sin() - 1).square().mean()

    steps = gradients_of(model, optimizers, [loss] * STEPS)
    return {name: [step[name] for step in steps] for name in steps[0]}


def fresh(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(*(sizes or SIZES))


def split(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Matrices, and all others."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def assert_moments(found: Mapping[str, Tensor], seen: Mapping[str, list[Tensor]], beta: float) -> None:
    for name, v in found.items():
        assert_close(v.double(), weighted_mean(squares(seen[name]), beta), rtol=1e-5)


# --- Schedule-Free --------------------------------------------------------------------------------------------------

FREE = {
    "schedulefree.adamw_schedulefree.AdamWScheduleFree": "schedule-free",
    "pytorch_optimizer.optimizer.schedulefree.ScheduleFreeRAdam": "schedule-free-pytorch-optimizer",
}


def schedule_free(path: str, optimizer_class: Classes) -> tuple[nn.Module, Any, dict[str, list[Tensor]]]:
    model = fresh()
    # RAdam's first steps do nothing but where β₂ is small.
    optimizer = optimizer_class(path)(model.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.train()
    return model, optimizer, trained(model, optimizer)


@pytest.mark.parametrize("path", FREE)
def test_schedule_free_is_read_once_it_evaluates(path: str, optimizer_class: Classes) -> None:
    model, optimizer, seen = schedule_free(path, optimizer_class)
    with pytest.raises(MatchError, match=r"train mode.*call optimizer\.eval\(\) before"):
        ba.Posterior.from_optimizer(model, optimizer, n_data=100)
    with pytest.raises(MatchError, match=r"call optimizer\.eval\(\) before"):
        read_state_dict(model, optimizer.state_dict(), optimizer=FREE[path])
    optimizer.eval()
    curvature = read_optimizer(model, optimizer)
    assert set(curvature.reader.values()) == {FREE[path]}
    assert set(curvature.steps.values()) == {STEPS}
    assert_moments(curvature.second_moment, seen, 0.95)
    state = through_a_file(optimizer.state_dict())
    assert identify_reader(state).name == FREE[path]
    again = read_state_dict(model, state, optimizer=identify_reader(state)).second_moment
    assert all(torch.equal(again[name], v) for name, v in curvature.second_moment.items())
    posterior = ba.Posterior.from_optimizer(model, optimizer, n_data=100)
    assert all(torch.equal(posterior.mean[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("path", FREE)
def test_a_file_of_schedule_free_gives_the_average(
    path: str, mode: str, tmp_path: Path, optimizer_class: Classes
) -> None:
    model, optimizer, seen = schedule_free(path, optimizer_class)
    if mode == "eval":
        optimizer.eval()
    file = tmp_path / "c.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    optimizer.eval()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_moments(read_curvature(read_checkpoint(file)).second_moment, seen, 0.95)
    opened = ba.GaussianWeights.open(file, n_data=100)
    own = fresh()
    if mode == "train":
        with pytest.warns(BayesAdamWarning, match="saved while schedule-free.* was in train mode"):
            posterior = ba.Posterior.from_checkpoint(file, own, n_data=100)
    else:
        posterior = ba.Posterior.from_checkpoint(file, own, n_data=100)
    for name, x in expected.items():
        for found in (opened.mean[name], posterior.mean[name], own.get_parameter(name).detach()):
            assert_close(found, x, rtol=1e-5, atol=1e-6)


# --- Muon beside Adam -----------------------------------------------------------------------------------------------

LISTED = "muon.SingleDeviceMuonWithAuxAdam"
MUONS = {
    LISTED: "muon-with-adam",
    **{
        f"pytorch_optimizer.optimizer.muon.{path}": "muon-pytorch-optimizer"
        for path in ("muon.Muon", "normuon.NorMuon")
    },
}


@pytest.mark.parametrize("path", MUONS)
def test_of_muon_and_adam_in_one_optimiser_adams_part_is_read(path: str, optimizer_class: Classes) -> None:
    model = fresh(6, 16, 5, 3)
    matrices, others = split(model)
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False, "betas": (0.9, 0.95)}]
    optimizer = optimizer_class(path)(groups)
    seen = trained(model, optimizer)
    assert_parts(model, optimizer, MUONS[path], seen)


@pytest.mark.parametrize("algorithm", ["muon", "adamuon"])
def test_timms_muon_says_in_the_state_whom_adam_trains(algorithm: str, optimizer_class: Classes) -> None:
    """As AdaMuon it averages squares of the orthogonalised update, under Adam's own name."""
    model = fresh(6, 16, 5, 3)
    optimizer = optimizer_class("timm.optim.muon.Muon")(model.parameters(), betas=(0.9, 0.95), algo=algorithm)
    seen = trained(model, optimizer)
    assert ("exp_avg_sq" in optimizer.state[model[0].weight]) == (algorithm == "adamuon")
    assert_parts(model, optimizer, "muon-timm", seen)


def assert_parts(model: nn.Module, optimizer: Any, reader: str, seen: Mapping[str, list[Tensor]]) -> None:
    live = read_optimizer(model, optimizer)
    state = through_a_file(optimizer.state_dict())
    found = identify_reader(state)
    assert found.name == reader
    # In several groups nothing says which bias is which.
    names = {id(p): name for name, p in model.named_parameters()}
    # timm's has Adam train small matrices too.
    adams = {name for name, p in model.named_parameters() if not optimizer.state[p].get("use_muon", p.dim() == 2)}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    for curvature in (live, read_state_dict(model, state, optimizer=found, param_names=order)):
        assert set(curvature.second_moment) == adams
        assert_moments(curvature.second_moment, seen, 0.95)
        assert set(curvature.omitted) == {*names.values()} - adams != set()
        for reason in curvature.omitted.values():
            assert reason == "trained by muon, which keeps no second moment per weight; ba.track(optimizer) keeps one"


def test_a_file_with_the_states_of_muon_and_adamw(tmp_path: Path, optimizer_class: Classes) -> None:
    model = fresh()
    matrices, others = split(model)
    muon = optimizer_class("torch.optim.Muon")(matrices)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95))
    seen = trained(model, muon, adamw)
    states = [muon.state_dict(), adamw.state_dict()]
    tree: dict[str, Any] = {"state_dict": model.state_dict(), "optimizer_states": states}
    file = tmp_path / "c.ckpt"
    torch.save(tree, file)
    key = {"optimizer_key": "optimizer_states.1"}
    found = read_curvature(read_checkpoint(file, **key))
    assert list(found.second_moment) == ["0.bias", "2.bias"]
    assert_moments(found.second_moment, seen, 0.95)
    with pytest.raises(BayesAdamError, match=r"is muon.*ba\.track"):
        read_curvature(read_checkpoint(file, optimizer_key="optimizer_states.0"))


# --- projections ----------------------------------------------------------------------------------------------------


def test_of_projected_gradients_nothing_is_read() -> None:
    """As galore_torch and apollo_torch keep them: averages of projected gradients, with the projection beside them."""
    model = fresh(6, 6, 3)
    projected, others = split(model)
    optimizer = torch.optim.AdamW([{"params": others}, {"params": projected, "rank": 2}], betas=(0.9, 0.95))
    seen = trained(model, optimizer)
    for parameter in projected:
        optimizer.state[parameter]["projector"] = object()
    state = optimizer.state_dict()
    order = ["0.bias", "2.bias", "0.weight", "2.weight"]
    assert [slot.shape for slot in slots_of(state)] == [(6,), (3,), None, None]
    saved_one = read_state_dict(model, state, optimizer=identify_reader(state), param_names=order)
    for curvature in (read_optimizer(model, optimizer), saved_one):
        assert_moments(curvature.second_moment, seen, 0.95)
        assert set(curvature.second_moment) == {"0.bias", "2.bias"}
        assert all(reason.startswith("trained by galore, which") for reason in curvature.omitted.values())
    only = {"state": {0: state["state"][2]}, "param_groups": [{**state["param_groups"][1], "params": [0]}]}
    only["param_groups"][0]["update_proj_gap"] = 5
    with pytest.raises(MatchError, match=r"ba\.track"):
        identify_reader(only)


# --- none is misread ------------------------------------------------------------------------------------------------

# pytorch_optimizer's whose average of squares is of other gradients, starts elsewhere or has another β.
ALTERED = (
    *("adagc.AdaGC", "adamod.AdaMod", "adan.Adan", "adapnm.AdaPNM", "adashift.AdaShift", "adasmooth.AdaSmooth"),
    *("adopt.ADOPT", "ano.Ano", "conda.Conda", "dadapt.DAdaptAdan", "grokfast.GrokFastAdamW", "mars.MARS"),
    *("prodigy.Prodigy", "qhadam.QHAdam", "ranger.Ranger", "adamw.StableAdamW", "spam.StableSPAM", "yogi.Yogi"),
    *("adalite.Adalite", "came.CAME", "sm3.SM3", "tiger.Tiger", "racs.Alice", "splus.SPlus", "adanorm.AdaNorm"),
)


@pytest.mark.parametrize("path", ALTERED)
def test_a_saved_state_that_only_looks_like_adams_is_refused(path: str, optimizer_class: Classes) -> None:
    model = fresh()
    optimizer: Optimizer = optimizer_class(f"pytorch_optimizer.optimizer.{path}")(model.parameters())
    trained(model, optimizer)
    with pytest.raises(MatchError, match=r"(optimizer=|galore).*ba\.track"):
        identify_reader(optimizer.state_dict())
    if ba.readers.reader_of(optimizer) is None:
        with pytest.raises(MatchError, match=r"no reader is registered for pytorch_optimizer.*ba\.track"):
            read_optimizer(model, optimizer)
