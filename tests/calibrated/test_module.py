"""The calibrated network as a module: exported, compiled, saved, moved, used by many threads."""

from __future__ import annotations

import copy
import json
import math
import pickle
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.calibrated import programs, ranges
from bayesadam.calibrated.programs import Exported
from bayesadam.errors import BayesAdamWarning, CalibrationError, FileError, MatchError, SettingError
from bayesadam.likelihoods import likelihood
from calibrated.cases_calibrated import NAMES, RISKS, blobs, data, same_answers, trained, waves
from cases import quick_of, rewrite, state_of
from floats import assert_close
from formats.same import Evil
from predict.cases_networks import Lambda, Then

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")


def calibrated(name: str, **settings: object) -> ba.Calibrated:
    return ba.calibrate(trained(name), data(name, 600, 200), **settings)


def same(answers: dict[str, Tensor], p: ba.Answer, rtol: float | None = None) -> None:
    for name in ("novelty", "p_value", "probs", "mean", "stddev", "f_mean", "answered", "in_range"):
        expected = getattr(p, name)
        assert (expected is None) == (name not in answers), name
        if expected is not None:
            assert_close(answers[name], expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name", quick_of(["classification", "regression"], "classification"))
def test_it_is_exported_as_it_is(name):
    net, x = calibrated(name), data(name, 20, 300)[0]
    program = torch.export.export(net, (x[:4],), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False)
    answer, expected = program.module()(x), net(x)
    assert isinstance(answer, ba.Answer)
    for own, other in zip(answer, expected, strict=True):
        assert own == other if not isinstance(own, Tensor) else torch.allclose(own, other, atol=1e-6)
    if name == "classification":
        assert torch.equal(answer.set(0.9), expected.set(0.9))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_whole(name):
    net, x = calibrated(name), data(name, 20, 300)[0]
    answer, expected = torch.compile(net, fullgraph=True, backend="aot_eager")(x), net(x)
    same({k: v for k, v in answer._asdict().items() if v is not None}, expected)


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda k: nn.Linear(6, k), (6,)),
    # Of factors of few columns.
    "wide": (lambda k: nn.Sequential(nn.Linear(400, 300), nn.Tanh(), nn.Linear(300, k)), (400,)),
    "cnn": (
        lambda k: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, k)
        ),
        (1, 8, 8),
    ),
    "gru": (
        lambda k: nn.Sequential(Then(nn.GRU(3, 5, batch_first=True), lambda z: z[0][:, -1]), nn.Linear(5, k)),
        (4, 3),
    ),
}


def case(network: str, name: str) -> tuple[ba.Calibrated, Tensor]:
    torch.manual_seed(0)
    build, shape = NETWORKS[network]
    model = build(3 if name == "classification" else likelihood(name).outputs_per_target)
    x = torch.randn(80, *shape)
    y = torch.randint(2, (80,)) if name == "classification" else torch.randint(2, (80, 1)).float()
    return ba.calibrate(model.eval(), (x[:60], y[:60]), likelihood=name), x[60:]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("network", NETWORKS)
def test_onnx_runs_alike(network, name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net, x = case(network, name)
    net.save(tmp_path / "net.onnx", x[:2])
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    names = [output.name for output in session.get_outputs()]
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    answers, p = dict(zip(names, map(torch.from_numpy, found), strict=True)), net(x)
    if name in ("classification", "binary"):
        assert torch.equal(answers.pop("set"), p.set(0.95))
    else:
        for end, expected in zip(("lower", "upper"), p.interval(0.95), strict=True):
            assert_close(answers.pop(end), expected, rtol=1e-4, atol=1e-5)
    same(answers, p, rtol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["bayesadam"])["likelihood"] == name


@pytest.mark.parametrize("name", quick_of(["binary", "heteroscedastic"], "heteroscedastic"))
def test_a_program_runs_without_the_model_and_without_this_package(name, tmp_path):
    net, x = calibrated(name, **RISKS[name]), data(name, 20, 300)[0]
    net.save(tmp_path / "net.pt2", level=0.8)
    answers, p = torch.export.load(tmp_path / "net.pt2").module()(x), net(x)
    again = ba.load(tmp_path / "net.pt2")
    assert_close(again(x).doubt, p.doubt)
    torch.testing.assert_close(again(x).distribution.mean, p.distribution.mean)
    assert (again(x).likelihood, again.about["likelihood"]) == (name, name)
    assert ba.Monitor(again).same_reference(ba.Monitor(net))
    if name == "binary":
        assert torch.equal(again(x).set(0.7), p.set(0.7))
    else:
        assert_close(again(x).interval(0.7)[0], p.interval(0.7)[0])
    assert type(answers) is dict
    answers = dict(answers)
    if name == "binary":
        assert torch.equal(answers.pop("set"), p.set(0.8))
    else:
        assert_close(answers.pop("upper"), p.interval(0.8)[1])
        answers.pop("lower")
    same(answers, p)


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded(name, tmp_path):
    net, x = calibrated(name, **RISKS[name]), data(name, 20, 300)[0]
    net.save(tmp_path / "net.safetensors")
    fresh = nn.Sequential(nn.Linear(x.shape[1], 16), nn.Tanh(), nn.Linear(16, net(x).f_mean.shape[-1]))
    before = {key: t.clone() for key, t in fresh.state_dict().items()}
    again = ba.load(tmp_path / "net.safetensors", fresh)
    assert same_answers(again(x), net(x))
    assert str(again.report) == str(net.report)
    assert all(torch.equal(t, before[key]) for key, t in fresh.state_dict().items())


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def test_a_network_in_half_precision_is_saved_and_loaded_in_it(tmp_path):
    x, y = blobs(100, 200)
    net = ba.calibrate(Normed().eval(), (x, y), likelihood="classification").bfloat16()
    net.save(tmp_path / "net.safetensors")
    again = ba.load(tmp_path / "net.safetensors", Normed())
    assert {t.dtype for t in again.model.state_dict().values()} == {torch.bfloat16, torch.int64}
    assert same_answers(again(x), net(x))


@pytest.mark.slow
def test_a_program_takes_the_numbers_that_the_network_takes(tmp_path):
    net, x = calibrated("classification").bfloat16(), blobs(5, 300)[0]
    net.save(tmp_path / "net.pt2", x[:2].bfloat16())
    assert_close(ba.load(tmp_path / "net.pt2")(x).probs, net(x).probs)
    # Nothing of the data is in the file.
    assert not any(leaf.any() for leaf in torch.export.load(tmp_path / "net.pt2").example_inputs[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_inputs_of_a_type_that_the_model_has_stay(dtype):
    """Weights of several types, and inputs in one of them."""
    first, x = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False), torch.randn(40, 4)
    model = Lambda(lambda self, x: self.head(x * self.first.to(x)), first=first, head=nn.Linear(4, 3))
    net = ba.calibrate(model, (x, torch.arange(40) % 3), likelihood="classification")
    assert torch.equal(net(x).f_mean, model(x))


def test_outputs_may_be_calibrated_without_a_network(tmp_path):
    x = torch.randn(60, 3)
    net = ba.calibrate(nn.Identity(), (x[:50], x[:50].argmax(1)), likelihood="classification")
    net.save(tmp_path / "net.safetensors")
    assert same_answers(ba.load(tmp_path / "net.safetensors", nn.Identity())(x), net(x))


def test_a_forward_that_calls_another_model_is_told():
    q = trained("regression")
    with pytest.warns(BayesAdamWarning, match="call the model that it is given"):
        ba.calibrate(q, waves(100, 200), forward=lambda _, x: q.model(x))


def test_an_empty_batch_is_refused_in_words(tmp_path):
    net, x = calibrated("classification"), torch.zeros(0, 2)
    for use in (net, lambda batch: net.save(tmp_path / "net.pt2", batch)):
        with pytest.raises(MatchError, match="the batch is empty"):
            use(x)
    with pytest.raises(MatchError, match="the batch is empty"):
        ba.calibrate(net.model, (x, torch.zeros(0).long()), likelihood="classification")


def test_a_calibrated_network_is_not_a_model_to_calibrate():
    net = calibrated("regression")
    for wrapped in (net, torch.compile(net, backend="eager"), nn.DataParallel(net)):
        with pytest.raises(SettingError, match="calibrated already"):
            ba.calibrate(wrapped, waves(100, 200), likelihood="regression")
        assert ba.Monitor(wrapped).same_reference(ba.Monitor(net))


class Scaled(nn.Linear):
    """What it multiplies inputs by is in no state dict."""

    def __init__(self, scale: float) -> None:
        super().__init__(2, 3)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale * x)


def test_a_model_that_computes_something_else_is_refused(tmp_path):
    path, (x, y) = tmp_path / "net.safetensors", blobs(100, 200)
    net = ba.calibrate(Scaled(2.0), (x, y), likelihood="classification", forward=lambda m, z: m(z))
    net.save(path)
    assert same_answers(ba.load(path, Scaled(2.0), forward=lambda m, z: m(z))(x), net(x))
    for scale, forward in ((3.0, lambda m, z: m(z)), (2.0, lambda m, z: m(z).flip(1)), (2.0, lambda m, z: m(z)[:, :2])):
        with pytest.raises(FileError, match="of another network"):
            ba.load(path, Scaled(scale), forward=forward)


def test_outputs_that_are_drawn_are_refused():
    with pytest.raises(MatchError, match="is something in it random"):
        ba.calibrate(trained("classification"), blobs(100, 200), forward=lambda m, x: m(x) + torch.rand(len(x), 1))


def test_a_state_that_is_no_tensor_is_refused(tmp_path):
    net = calibrated("classification")
    memory = type("Remembering", (nn.Identity,), {"get_extra_state": lambda self: {"seen": 3}})
    net.model.register_module("memory", memory())
    with pytest.raises(SettingError, match=r"memory\._extra_state.*a dict"):
        net.save(tmp_path / "net.safetensors")


def test_files_of_others_are_refused(tmp_path):
    net, model = calibrated("classification"), trained("classification").model
    path, posterior, absent = (tmp_path / f"{name}.safetensors" for name in ("net", "posterior", "absent"))
    net.save(path)
    trained("classification").save(posterior)
    for use, error, match in (
        (lambda: ba.load(path, nn.Linear(2, 3)), FileError, "another model"),
        (lambda: ba.load(path, model, forward=lambda m, x: m(x)), SettingError, "without forward="),
        (lambda: ba.load(posterior, model), FileError, r"net\.save"),
        (lambda: ba.load(path), SettingError, r"ba\.load\(path, model\)"),
        (lambda: net.save(tmp_path / "net.bin"), SettingError, "must end in"),
        (lambda: net.save(tmp_path / "net.pt2", [1.0]), SettingError, "a program takes torch tensors with a row for"),
        (lambda: ba.load("net.onnx"), SettingError, "onnxruntime"),
        (lambda: ba.load(absent.with_suffix(".pt2")), FileNotFoundError, r"absent\.pt2"),
    ):
        with pytest.raises(error, match=match):
            use()


@pytest.mark.slow
def test_what_no_program_can_do_is_refused_in_words(tmp_path):
    x = torch.randn(40, 6)
    asking = Lambda(lambda self, x: self.layer(x if x.abs().sum() >= 0 else 2 * x), layer=nn.Linear(6, 3))
    net = ba.calibrate(asking, (x, torch.arange(40) % 3), likelihood="classification")
    with pytest.raises(SettingError, match=r"torch\.export does not take this network.*\.safetensors"):
        net.save(tmp_path / "net.pt2", x[:2])
    assert not list(tmp_path.iterdir())


def spoilt(program: Exported, name: str, rows: Callable[[Tensor], Tensor]) -> Callable[[object], dict[str, Tensor]]:
    """A file whose answers differ in one field, for some of the inputs."""

    def run(batch: object) -> dict[str, Tensor]:
        assert isinstance(batch, Tensor)
        outputs, wrong = program(batch), rows(batch)
        output = outputs[name]
        wrong = wrong.view(-1, *[1] * (output.dim() - 1))
        outputs[name] = output ^ wrong if output.dtype == torch.bool else output + 0.01 * wrong * (1 + output.abs())
        return outputs

    return run


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("probs", lambda x: torch.ones(len(x)), "the example"),
        ("set", lambda x: torch.ones(len(x), dtype=torch.bool), "the example"),
        ("p_value", lambda x: torch.ones(len(x)), "the example"),
        ("novelty", lambda x: torch.full((len(x),), float(len(x) == 1)), "a batch of one"),
        ("leverage", lambda x: torch.full((len(x),), float(len(x) == 3)), "a batch of three"),
        ("in_range", lambda x: x.abs().amax(1) > 100, "a thousand times"),
        ("in_range", lambda x: x.isnan().any(1), "NaN"),
        ("answered", lambda x: x.isnan().any(1), "NaN"),
    ],
)
def test_a_program_is_compared_in_and_out_of_range(name, rows, words):
    net, x = calibrated("classification", risk=0.05), blobs(2, 300)[0]
    program = Exported(net, 0.95)
    programs._check(program, "torch", program, x, len(x))
    with pytest.raises(FileError, match=f"torch's .*{words}.*not kept"), torch.no_grad():
        programs._check(spoilt(program, name, rows), "torch", program, x, len(x))


def test_ranks_may_turn_on_the_last_digits():
    """A file whose novelty differs by rounding has other p-values than torch, and those that follow from its own."""
    net, x = calibrated("classification"), blobs(2, 300)[0]
    program = Exported(net, 0.95)
    with torch.no_grad():
        net.novelties = net(x[:1]).novelty.expand(50).clone()

    def run(batch: object) -> dict[str, Tensor]:
        outputs = program(batch)
        return program.implied({**outputs, "novelty": outputs["novelty"] * (1 + 1e-6)})

    assert not torch.equal(run(x)["p_value"], program(x)["p_value"])
    programs._check(run, "onnxruntime", program, x, len(x))


@pytest.mark.slow
def test_a_file_that_is_not_the_network_is_removed(monkeypatch, tmp_path):
    net, x = calibrated("classification"), blobs(2, 300)[0]
    (tmp_path / "net.pt2").write_bytes(b"before")
    other = calibrated("classification", risk=0.3)
    exported = torch.export.export(Exported(other, 0.5), (x,), strict=False)
    monkeypatch.setattr(torch.export, "load", lambda *_, **__: exported)
    with pytest.raises(FileError, match="not kept"):
        net.save(tmp_path / "net.pt2", x)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"before"]


def test_nan_is_out_of_range_and_novel_whatever_the_minimum_says(monkeypatch):
    """The minimum of onnxruntime, and its recurrent layers, skip NaN."""
    net, (x, _) = calibrated("regression", risk=0.1, tolerance=0.7), waves(3, 300)
    x[1] = torch.nan
    monkeypatch.setattr(ranges, "_ends", lambda leaf: (leaf.nan_to_num().amin(1), leaf.nan_to_num().amax(1)))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    handle = net.model.register_forward_pre_hook(lambda _, args: (args[0].nan_to_num(),))
    p = net(x)
    handle.remove()
    assert p.in_range.tolist() == [True, False, True]
    assert not p.answered[1]
    assert p.novelty.isinf().tolist() == [False, True, False]
    assert_close(p.p_value[1], torch.tensor(1 / (len(net.novelties) + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["pooled", "tokens"])
def test_texts_with_a_mask_through_an_encoder(network, tmp_path):
    """Torch's own encoder makes nested tensors of texts with padding, which have no shape."""
    net, batch = encoder_case(pooled=network == "pooled")
    net.save(tmp_path / "net.pt2", {name: t[:2] for name, t in batch.items()})
    again, expected = ba.load(tmp_path / "net.pt2")(batch), net(batch)
    assert_close(again.probs, expected.probs)
    assert_close(again.novelty, expected.novelty)


def encoder_case(*, pooled: bool) -> tuple[ba.Calibrated, dict[str, Tensor]]:
    mask = (torch.arange(7) < torch.randint(2, 7, (60, 1))).long()
    batch = {"input_ids": torch.randint(1, 20, (60, 7)) * mask, "attention_mask": mask}
    y = torch.randint(3, (60,) if pooled else (60, 7))

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        z = self.encoder(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head(z[:, 0] if pooled else z)

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    model = Lambda(forward, words=nn.Embedding(20, 8), encoder=encoder, head=nn.Linear(8, 3)).eval()
    return ba.calibrate(model, (batch, y), likelihood="classification"), batch


def test_an_encoder_with_padding_is_calibrated():
    net, batch = encoder_case(pooled=True)
    alone = net({name: t[3:4] for name, t in batch.items()})
    assert_close(alone.probs, net(batch).probs[3:4])
    assert "encoder.layers.0.linear1" in net.layers


def with_parts(source: Path, **changed: bytes | None) -> None:
    """Rewrite an archive with other parts, by the end of their names; None takes one out."""
    with zipfile.ZipFile(source) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(parts)).partition("/")[0]
    for name, content in changed.items():
        parts[f"{root}/{name}"] = content
    with zipfile.ZipFile(source, "w") as archive:
        for name, content in parts.items():
            if content is not None:
                archive.writestr(name, content)


def test_programs_that_are_damaged_or_hold_pickles_are_refused(tmp_path):
    path = tmp_path / "net.pt2"
    calibrated("classification").save(path, torch.zeros(1, 2))
    assert ba.load(path)(torch.zeros(5, 2)).probs.shape == (5, 3)
    with pytest.raises(SettingError, match="without a model"):
        ba.load(path, nn.Linear(2, 3))
    whole = path.read_bytes()
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"x": entry}}).encode()
    for parts in (
        {"data/sample_inputs/model.pt": pickle.dumps(Evil(tmp_path / "ran"), 2)},
        {
            "data/constants/model_constants_config.json": config,
            "data/constants/opaque_obj_0": pickle.dumps(Evil(tmp_path / "ran"), 2),
        },
        {"data/aotinductor/model/x.so": b"code"},
        {"models/model.json": None},
        {"models/model.json": b"{}"},
    ):
        path.write_bytes(whole)
        with_parts(path, **parts)
        with pytest.raises(FileError, match=r"net\.pt2"):
            ba.load(path)
    assert not (tmp_path / "ran").exists()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match="damaged"):
        ba.load(path)


@pytest.mark.parametrize(
    ("entry", "value"), [("dims", []), ("exponent", "x"), ("report", {}), ("leverage", {"source": "x", "modules": []})]
)
def test_a_damaged_header_is_a_file_error(entry, value, tmp_path):
    path, net = tmp_path / "net.safetensors", calibrated("classification")
    net.save(path)
    rewrite(path, lambda header, _: header.update({entry: value}))
    with pytest.raises(FileError, match="damaged"):
        ba.load(path, net.model)


@pytest.mark.parametrize("name", quick_of(["regression", "binary", "poisson"], "poisson"))
def test_one_number_an_example(name, tmp_path):
    """Outputs (batch,), in batches of any size, through a program too; a copy of the network is its own."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    x, y = torch.randn(80, 2), torch.randint(2, (80,)).float()
    net = ba.calibrate(model, (x[:60], y[:60]), likelihood=name)
    p, again = net(x[60:]), copy.deepcopy(net)(x[60:])
    assert p.f_mean.shape == (20,)
    assert same_answers(p, again)
    assert_close(net(x[:7]).novelty, net(x).novelty[:7])
    net.save(tmp_path / "net.pt2", x[:2])
    same_but = ("set", "lower", "upper")
    answers = torch.export.load(tmp_path / "net.pt2").module()(x[60:])
    same({key: t for key, t in answers.items() if key not in same_but}, p)


def test_the_users_model_is_left_alone():
    q = trained("classification")
    q.model.train()
    before = state_of(q.model), [p.requires_grad for p in q.model.parameters()]
    try:
        net = ba.calibrate(q, blobs(100, 200))
        assert (state_of(q.model), [p.requires_grad for p in q.model.parameters()]) == before
        assert not net.train().training
    finally:
        q.model.eval()


def test_half_precision_is_the_models_alone():
    net, x = calibrated("classification"), blobs(50, 300)[0]
    expected = net(x)
    p = net.bfloat16()(x)
    assert p.probs.dtype == net.centre.dtype == torch.float32
    assert next(net.model.parameters()).dtype == torch.bfloat16
    assert_close(p.probs, expected.probs, rtol=0.05, atol=0.05)
    p = net.double()(x.double())
    assert p.probs.dtype == torch.float64


def test_many_threads():
    net, (x, _) = calibrated("classification"), blobs(400, 300)
    expected = net(x)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda rows: net(rows), x.split(5)))
    assert_close(torch.cat([p.novelty for p in answers]), expected.novelty)
    assert_close(torch.cat([p.probs for p in answers]), expected.probs)


def test_answers_have_gradients_with_respect_to_inputs():
    net, x = calibrated("regression"), waves(6, 300)[0].double().requires_grad_()
    net = net.double()
    assert torch.autograd.gradcheck(lambda inputs: net(inputs)[3:5], (x,), atol=1e-3, rtol=1e-2)


def test_inputs_out_of_range_are_told_once_a_kind():
    net, x = calibrated("regression", risk=0.1, tolerance=0.7), torch.full((3, 1), 500.0)
    with pytest.warns(BayesAdamWarning, match="scale and normalise"):
        p = net(x)
    assert not (p.in_range | p.answered).any()
    net(2 * x)
    with pytest.warns(BayesAdamWarning, match="NaN"):
        net(x * math.nan)
    net(x * math.nan)


def test_classes_that_are_answered_warn_of_other_data():
    def data(shift: float) -> torch.Tensor:
        return blobs(200, 7)[0] + shift

    quiet, net = calibrated("classification"), calibrated("classification", risk=0.3)
    quiet(data(0))
    quiet(data(4))
    net(data(0))
    with pytest.warns(BayesAdamWarning, match="other data than the held-out"):
        net(data(4))


def test_what_does_not_apply():
    p, numbers = calibrated("classification")(blobs(5, 1)[0]), calibrated("regression")(waves(5, 1)[0])
    with pytest.raises(SettingError, match="of numbers"):
        p.interval()
    with pytest.raises(SettingError, match="of classes"):
        numbers.set()
    with pytest.raises(SettingError, match="level must lie"):
        p.set(1.5)
    assert p.answered is None
    few = ba.calibrate(nn.Linear(2, 3), (torch.randn(20, 2), torch.arange(20) % 3), likelihood="classification")
    few.scores = None
    with pytest.raises(CalibrationError, match="held-out scores"):
        few(torch.randn(3, 2)).set(0.9)


@pytest.mark.parametrize("name", quick_of(NAMES, "classification", "heteroscedastic"))
def test_it_is_compiled_in_place(name):
    """From the third batch of a size on; it warns as before, and a move or another type is compiled anew."""
    net, (x, _) = ba.calibrate(trained(name), data(name, 600, 1)), data(name, 8, 5)
    expected, graphs = net(x), list[object]()
    net.compile(backend=lambda graph, _: graphs.append(graph) or graph)
    for number in range(4):
        answer = net(x)
        assert len(graphs) == (number > 1)
        assert isinstance(answer, ba.Answer)
        for one, other in zip(answer, expected, strict=True):
            if isinstance(one, Tensor):
                assert_close(one, other, rtol=1e-5, atol=1e-6)
    with pytest.warns(ba.errors.BayesAdamWarning, match="scale and normalise"):
        net(1e4 * x)
    net.double()
    for _ in range(3):
        assert_close(net(x.double()).f_mean, expected.f_mean.double(), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2


def test_networks_that_are_compiled_share_nothing():
    """Guards that were left out would make one of the others: constants, copies, blocks of one class."""
    x, nets = blobs(300, 1)[0], list[ba.Calibrated]()
    for by in (0.5, 3.0):
        model = nn.Sequential(Scaled(by), nn.ReLU(), nn.Linear(3, 2), Scaled(2 * by))
        net = ba.calibrate(model, (x, model(x).argmax(dim=1)), likelihood="classification")
        nets += [net, copy.deepcopy(net)] if by == 0.5 else [net]
    with torch.no_grad():
        for net in nets:
            net.compile(backend="eager")
            for size in (5, 5, 5, 9, 9, 9) if net is nets[0] else (5, 5, 5):
                plain = copy.deepcopy(net)
                plain._compiling = None
                assert_close(net(x[:size]).probs, plain(x[:size]).probs, rtol=1e-6)
        moved = copy.deepcopy(nets[0])
        moved.model[0].bias.add_(1)
        assert moved._fast is None
        assert not torch.equal(moved(x[:5]).probs, nets[0](x[:5]).probs)


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_under_autocast_doubt_is_of_all_digits(name):
    """The same as of the network's own outputs and layers' inputs in 16 bits."""
    net, (x, _) = ba.calibrate(trained(name), data(name, 300, 1)), data(name, 50, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer, (f, pooled) = net(x), net.tapped(x)
    exact = net.judged(net.answer(f, pooled))
    assert torch.equal(answer.novelty, exact.novelty)
    assert torch.equal(answer.p_value, exact.p_value)
    assert not torch.equal(f, net(x).f_mean)
