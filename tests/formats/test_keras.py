"""Keras' files, written by h5py in the layout of Keras 3.15: keras itself is not needed."""

from __future__ import annotations

import io
import json
import math
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayesadam as ba
from bayesadam.errors import FileError, MatchError, MissingExtraError, SettingError, StateError
from bayesadam.readers import read_checkpoint, read_curvature
from floats import assert_close, close

h5py = pytest.importorskip("h5py")

STEPS = 7
ADAM = {
    "learning_rate": 0.01,
    "weight_decay": None,
    "use_ema": False,
    "gradient_accumulation_steps": None,
    "beta_1": 0.8,
    "beta_2": 0.9,
    "epsilon": 1e-7,
    "amsgrad": False,
}
Arrays = Mapping[str, Sequence[Any]]


# --- files ----------------------------------------------------------------------------------------------------------


def layer(kind: str, name: str, module: str = "keras.layers", **settings: Any) -> dict[str, Any]:
    """A layer as config.json has it."""
    held = {"name": name, "trainable": True, **settings}
    return {"module": module, "class_name": kind, "config": held, "registered_name": None}


def optimizer(
    kind: str = "Adam", module: str = "keras.src.backend.torch.optimizers", **settings: Any
) -> dict[str, Any]:
    """An optimiser as config.json has it."""
    return {"module": module, "class_name": kind, "config": {**ADAM, **settings}, "registered_name": kind}


def model(layers: Sequence[Any], trained_by: Mapping[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """config.json."""
    whole = layer("Functional", "functional", "keras.src.models.functional", layers=layers, **settings)
    return whole | {"compile_config": {"optimizer": trained_by, "loss": "mse"} if trained_by else {}}


def hdf5(
    variables: Arrays, names: Mapping[str, str] | None = None, change: Callable[[Any], None] | None = None
) -> bytes:
    """model.weights.h5: lists of variables by group, and the layers' names where they are there."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        for path, arrays in variables.items():
            group = file.create_group(f"{path}/vars")
            for number, array in enumerate(arrays):
                group[str(number)] = array
            if names is not None:
                group.attrs["name"] = names.get(path, path.rpartition("/")[2])
        if change is not None:
            change(file)
    return buffer.getvalue()


def write(path: Path, config: Mapping[str, Any], weights: bytes, **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.15.1"}))
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", weights)
    return path


def numbers(*shapes: Iterable[int], seed: int = 0, dtype: str = "float32") -> list[np.ndarray]:
    """Positive numbers that no other has."""
    random = np.random.default_rng((seed, 1))
    return [random.uniform(0.5, 1.5, tuple(shape)).astype(dtype) for shape in shapes]


def head(steps: int = STEPS) -> list[np.ndarray]:
    """What the optimiser's list begins with: steps and learning rate."""
    return [np.array(steps, "int32"), np.array(0.01, "float32")]


def adam(moments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Adam's list: a momentum and a second moment in turn."""
    return [*head(), *(one for moment in moments for one in (-moment, moment))]


DENSE = [(3, 4), (4,), (4, 4), (4,), (4, 4), (4,)]


def three(kind: str = "Dense", **settings: Any) -> list[dict[str, Any]]:
    """Three layers, two of which have equal shapes; in the order of the alphabet the last is the first."""
    return [layer(kind, name, **settings) for name in ("dense_2", "dense", "a")]


def mlp(states: Sequence[np.ndarray], trained_by: Mapping[str, Any] | None = None, **more: Any) -> tuple[Any, bytes]:
    """config.json and model.weights.h5 of `three`."""
    weights = numbers(*DENSE)
    arrays = {f"layers/dense{end}": weights[2 * i : 2 * i + 2] for i, end in enumerate(("", "_1", "_2"))}
    names = {"layers/dense": "dense_2", "layers/dense_1": "dense", "layers/dense_2": "a"}
    return model(three(), trained_by or optimizer()), hdf5({**arrays, "optimizer": states}, names, **more)


MLP = [f"layers.dense{end}.vars.{number}" for end in ("", "_1", "_2") for number in (0, 1)]


def check(
    path: Path, names: Sequence[str], moments: Sequence[np.ndarray], beta: float = 0.9, steps: int = STEPS
) -> ba.readers.Checkpoint:
    """Each parameter has its own v̂, and no other has one."""
    read = read_checkpoint(path)
    found = read_curvature(read)
    assert read.format == "keras"
    assert list(found.second_moment) == list(names)
    for name, moment in zip(names, moments, strict=True):
        expected = torch.from_numpy(moment.astype("float64")) / (1 - beta**steps)
        assert close(found.second_moment[name].double(), expected, rtol=1e-6), name
        assert found.steps[name] == steps
    return read


# --- read -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_every_parameter_has_its_own_state(compression: int, tmp_path: Path) -> None:
    moments = numbers(*DENSE, seed=1)
    read = check(write(tmp_path / "m.keras", *mlp(adam(moments)), compression=compression), MLP, moments)
    assert all(torch.equal(read.weights[n], torch.from_numpy(w)) for n, w in zip(MLP, numbers(*DENSE), strict=True))
    assert (read.recorded.step, read.recorded.optimizer) == (STEPS, "Adam")
    (group,) = read.optimizer["param_groups"]
    assert group["params"] == MLP
    assert (group["betas"], group["weight_decay"]) == ((0.8, 0.9), 0.0)
    assert torch.equal(read.optimizer["state"][MLP[2]]["exp_avg"], -torch.from_numpy(moments[2]))


def test_the_folder_that_is_not_zipped(tmp_path: Path) -> None:
    moments = numbers(*DENSE, seed=1)
    config, weights = mlp(adam(moments))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.weights.h5").write_bytes(weights)
    check(tmp_path, MLP, moments)


def test_more_than_ten_layers_without_names_are_in_order(tmp_path: Path) -> None:
    # Files of earlier releases have no names. By the alphabet dense_10 is the third, and variable 10 too.
    count = 12
    groups = ["dense", *(f"dense_{number}" for number in range(1, count))]
    arrays = {f"layers/{group}": [weight] for group, weight in zip(groups, numbers(*[(4, 4)] * count), strict=True)}
    moments = numbers(*[(4, 4)] * (count - 1), seed=1)
    layers = [layer("Dense", f"any_{group}", trainable=group != groups[-1]) for group in groups]
    # An operation has no group, and no number.
    config = model([layer("Dense", "x", "keras.src.ops.nn"), *layers], optimizer())
    path = write(tmp_path / "m.keras", config, hdf5({**arrays, "optimizer": adam(moments)}))
    check(path, [f"layers.{group}.vars.0" for group in groups[:-1]], moments)


def test_layers_that_hold_layers_and_statistics(tmp_path: Path) -> None:
    inner = layer(
        "Sequential", "s", "keras", layers=[layer("Dense", "z"), layer("BatchNormalization", "b", center=False)]
    )
    config = model(
        [
            layer("Normalization", "normalization"),
            layer("Multiply", "multiply", "keras.src.ops.numpy"),
            layer("LSTM", "lstm"),
            layer("Dropout", "dropout"),
            layer("TimeDistributed", "t", layer=inner),
            layer("BatchNormalization", "batch_normalization", scale=True, center=True),
            layer("Dense", "frozen", trainable=False),
            layer("Dense", "last"),
        ],
        optimizer("AdamW", weight_decay=0.02),
    )
    square, vector = (4, 4), (4,)
    lists = {
        "normalization": [vector, vector, ()],
        "lstm/cell": [square, square, vector],
        "time_distributed/layer/layers/dense": [square, vector],
        "time_distributed/layer/layers/batch_normalization": [vector] * 3,
        "batch_normalization": [vector] * 4,
        "dense": [square, vector],
        "dense_1": [square, vector],
    }
    names = {"layers/time_distributed/layer": "s", "layers/time_distributed/layer/layers/dense": "z"}
    names |= {"layers/time_distributed/layer/layers/batch_normalization": "b", "layers/dense": "frozen"}
    names |= {"layers/dense_1": "last"}
    arrays = {f"layers/{path}": numbers(*shapes, seed=i) for i, (path, shapes) in enumerate(lists.items())}
    arrays |= {"layers/time_distributed/layer": []}
    kept = {
        "time_distributed/layer/layers/batch_normalization": 1,
        "batch_normalization": 2,
        "dense": 0,
        "normalization": 0,
    }
    trained = [
        (f"layers/{path}/vars/{n}", shape) for path, s in lists.items() for n, shape in enumerate(s[: kept.get(path)])
    ]
    moments = numbers(*(shape for _, shape in trained), seed=99)
    path = write(tmp_path / "m.keras", config, hdf5({**arrays, "optimizer": adam(moments)}, names))
    read = check(path, [name.replace("/", ".") for name, _ in trained], moments)
    assert len(read.weights) == len(trained) + 2 + 2 + 2 + 2 + 1
    assert read_curvature(read).weight_decay["layers.dense_1.vars.0"] == 0.02


def test_layers_inside_a_layer_without_order(tmp_path: Path) -> None:
    parts = [f"multi_head_attention/{part}_dense" for part in ("query", "key", "value", "output")]
    arrays = {f"layers/{part}": numbers((4, 4), seed=i) for i, part in enumerate(parts)}
    moments = numbers(*[(4, 4)] * 4, seed=9)
    config = model([layer("MultiHeadAttention", "multi_head_attention")], optimizer())
    path = write(tmp_path / "m.keras", config, hdf5({**arrays, "optimizer": adam(moments)}))
    with pytest.raises(MatchError, match="may belong to"):
        read_curvature(read_checkpoint(path))


def test_a_schedule_has_no_learning_rate(tmp_path: Path) -> None:
    moments = numbers(*DENSE, seed=1)
    trained_by = optimizer("AdamW", learning_rate={"class_name": "CosineDecay"}, weight_decay=0.1)
    check(write(tmp_path / "m.keras", *mlp(adam(moments)[:1] + adam(moments)[2:], trained_by)), MLP, moments)


def test_what_was_frozen_after_training(tmp_path: Path) -> None:
    moments = numbers(*DENSE, seed=1)
    config, weights = mlp(adam(moments[:4]))
    refused(tmp_path, config, weights, "4 states have other shapes than the 6 variables")
    config["config"]["layers"][2]["config"]["trainable"] = False
    check(write(tmp_path / "frozen.keras", config, weights), MLP[:4], moments[:4])


def test_a_model_of_the_users_own(tmp_path: Path) -> None:
    config = layer("Mine", "mine", "my_package") | {"compile_config": {"optimizer": optimizer()}}

    def path(*shapes: Iterable[int]) -> tuple[Path, list[np.ndarray]]:
        a, b = numbers(*shapes)
        moments = numbers(shapes[1], shapes[0], seed=1)
        # Attributes are in the order of the alphabet; they were made in another.
        content = hdf5({"a": [a], "b": [b], "optimizer": adam(moments)}, {})
        return write(tmp_path / "m.keras", config, content), moments[::-1]

    check(*(lambda made: (made[0], ["a.vars.0", "b.vars.0"], made[1]))(path((2, 3), (3, 4))))
    alike, moments = path((3, 3), (3, 3))
    with pytest.raises(MatchError, match=r"may belong to 'a\.vars\.0' or to 'b\.vars\.0'.*param_names="):
        read_curvature(read_checkpoint(alike))
    found = read_curvature(read_checkpoint(alike), param_names=["b.vars.0", "a.vars.0"]).second_moment
    expected = torch.from_numpy(moments[0]) / (1 - 0.9**STEPS)
    assert_close(found["a.vars.0"], expected)


def test_a_layer_of_the_users_own(tmp_path: Path) -> None:
    # It may have saved its variables in an order of its own.
    arrays = {"layers/own": numbers((3, 3), (3, 3)), "optimizer": adam(numbers((3, 3), (3, 3), seed=1))}
    config = model([layer("Own", "own", "my_package")], optimizer())
    with pytest.raises(MatchError, match=r"may belong to 'layers\.own\.vars\.0' or to 'layers\.own\.vars\.1'"):
        read_curvature(read_checkpoint(write(tmp_path / "m.keras", config, hdf5(arrays))))


def test_weight_decay_is_apart_from_the_gradient_in_adam_too(tmp_path: Path) -> None:
    path = write(tmp_path / "m.keras", *mlp(adam(numbers(*DENSE)), optimizer(weight_decay=0.1)))
    for entry in ba.readers.match_checkpoint(read_checkpoint(path)).entries:
        assert (entry.reader.name, entry.weight_decay) == ("adam", 0.1)
        assert not entry.reader.couples_decay(entry.group)


def test_a_model_without_optimiser_takes_the_state_of_another_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.keras", model([layer("Dense", "dense")], None), hdf5({"layers/dense": numbers((2, 3))}))
    with pytest.raises(FileError, match="1 variables of a Keras model without its optimiser"):
        read_checkpoint(path)
    weight = torch.nn.Parameter(torch.ones(2, 3))
    live = torch.optim.Adam([weight])
    weight.sum().backward()
    live.step()
    torch.save(live.state_dict(), tmp_path / "o.pt")
    found = read_curvature(read_checkpoint(path, optimizer_path=tmp_path / "o.pt")).second_moment
    assert_close(found["layers.dense.vars.0"], torch.ones(2, 3))


# --- refused --------------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, config: Any, weights: bytes, message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        read_checkpoint(write(tmp_path / "m.keras", config, weights))
    assert str(tmp_path) in str(caught.value)


def test_states_of_another_model(tmp_path: Path) -> None:
    moments = numbers(*DENSE, seed=1)
    refused(tmp_path, *mlp(adam(moments)[:-1]), "truncated, damaged or not a file of Keras")
    refused(tmp_path, *mlp(adam([*moments, moments[0]])), "7 states have other shapes than the 6 variables")
    refused(tmp_path, *mlp(adam([moments[1], moments[0], *moments[2:]])), "6 states have other shapes")
    in_blocks = [*head(), *(-m for m in moments), *moments]
    refused(tmp_path, *mlp(in_blocks), "a layout that is not known")
    refused(tmp_path, *mlp(adam([*moments[:-1], moments[0]])), "6 states have other shapes")
    refused(tmp_path, *mlp(adam(moments), optimizer(learning_rate={})), "not a file of Keras")


def test_layers_of_another_model(tmp_path: Path) -> None:
    config, weights = mlp(adam(numbers(*DENSE, seed=1)))
    config["config"]["layers"][1]["config"]["name"] = "another"
    with pytest.raises(MatchError, match="may belong to"):
        read_curvature(read_checkpoint(write(tmp_path / "m.keras", config, weights)))


def test_a_statistic_is_no_parameter(tmp_path: Path) -> None:
    arrays = {"layers/batch_normalization": numbers(*[(4,)] * 4), "optimizer": adam(numbers(*[(4,)] * 4, seed=1))}
    config = model([layer("BatchNormalization", "batch_normalization")], optimizer())
    refused(tmp_path, config, hdf5(arrays), "4 states have other shapes than the 2 variables")


@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "LossScaleOptimizer"])
def test_other_optimisers_are_named(kind: str, tmp_path: Path) -> None:
    refused(tmp_path, *mlp(head(), optimizer(kind)), f"trained with {kind} of keras.* train with Keras' Adam or AdamW")


@pytest.mark.parametrize("option", ["amsgrad", "use_ema", "gradient_accumulation_steps"])
def test_options_that_add_lists_are_named(option: str, tmp_path: Path) -> None:
    states = adam(numbers(*DENSE, seed=1))
    refused(tmp_path, *mlp(states, optimizer(**{option: 2})), f"with {option}, which is not read")


def test_what_the_file_does_not_have(tmp_path: Path) -> None:
    config, weights = mlp(adam(numbers(*DENSE, seed=1)))
    refused(tmp_path, {**config, "compile_config": {}}, weights, "does not say which optimiser")
    own = optimizer(module="my_package")
    refused(tmp_path, {**config, "compile_config": {"optimizer": own}}, weights, "Adam of my_package, which is")
    with pytest.raises(SettingError, match="weights_key='a' makes no sense"):
        read_checkpoint(tmp_path / "m.keras", weights_key="a")


def test_a_model_that_was_not_trained(tmp_path: Path) -> None:
    refused(tmp_path, *mlp(head(0)), "0 states have other shapes")
    path = tmp_path / "m.keras"
    write(path, *mlp([np.array(0, "int32"), *adam(numbers(*DENSE))[1:]]))
    with pytest.raises(StateError, match="has not taken a step yet"):
        read_curvature(read_checkpoint(path))


def _external_data(file: Any) -> None:
    file.create_dataset("layers/x", (4,), "float32", external=[("/etc/hostname", 0, h5py.h5f.UNLIMITED)])


def _virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((4,), "float32")
    layout[:] = h5py.VirtualSource("other.h5", "x", (4,))
    file.create_virtual_dataset("layers/x", layout)


def _assign(link: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda file: file.__setitem__("layers/x", link(file))


HOSTILE = {
    "soft link": (_assign(lambda _: h5py.SoftLink("/layers/dense")), "/layers/x is a link"),
    "external link": (_assign(lambda _: h5py.ExternalLink("/etc/passwd", "/")), "/layers/x is a link"),
    "two names": (_assign(lambda file: file["layers/dense/vars/0"]), "is in the file under two names"),
    "itself": (_assign(lambda file: file["layers"]), "is in the file under two names"),
    "external data": (_external_data, "/layers/x declares 16 bytes"),
    "virtual data": (_virtual, "/layers/x declares 16 bytes, and 0 of"),
    "absurd size": (
        lambda file: file.create_dataset("layers/x", (2**40,), "float32", chunks=(1024,)),
        f"/layers/x declares {2**42} bytes, and 0 of",
    ),
    "compressed": (
        lambda file: file.create_dataset("layers/x", data=np.zeros(2**20, "float32"), compression="gzip"),
        f"/layers/x declares {2**22} bytes",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_files_that_lead_elsewhere_or_unpack(case: str, tmp_path: Path) -> None:
    change, message = HOSTILE[case]
    refused(tmp_path, *mlp(adam(numbers(*DENSE)), change=change), message)


def test_damaged_files(tmp_path: Path) -> None:
    config, weights = mlp(adam(numbers(*DENSE)))
    refused(tmp_path, config, weights[: len(weights) // 2], "truncated, damaged or not a file of Keras")
    refused(tmp_path, config, weights[1:], "truncated, damaged or not a file of Keras")
    refused(tmp_path, [], weights, "truncated, damaged or not a file of Keras")
    refused(tmp_path, {**config, "config": {}}, weights, "truncated, damaged or not a file of Keras")
    (tmp_path / "m.weights.h5").write_bytes(weights)
    with pytest.raises(FileError, match=r"is an HDF5 file alone.*nor β₂.*model\.save\('model\.keras'\)"):
        read_checkpoint(tmp_path / "m.weights.h5")


def test_bytes_that_were_changed_are_read_or_refused(tmp_path: Path) -> None:
    moments = numbers(*DENSE, seed=1)
    config, weights = mlp(adam(moments))
    random = np.random.default_rng(0)
    for _ in range(60):
        changed = bytearray(weights)
        changed[random.integers(len(changed))] ^= int(random.integers(1, 256))
        try:
            found = read_curvature(read_checkpoint(write(tmp_path / "m.keras", config, bytes(changed))))
        except (FileError, MatchError, StateError):
            continue
        assert all(math.prod(v.shape) for v in found.second_moment.values())


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.keras", *mlp(adam(numbers(*DENSE))))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bayesadam\[keras\]'"):
        read_checkpoint(path)
