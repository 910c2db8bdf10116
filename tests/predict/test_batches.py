"""What a batch is and what a loader is, arrays among them."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bayesadam.errors import MatchError
from bayesadam.predict.batches import (
    batch_size,
    batches_of,
    chosen_examples,
    examples,
    for_model,
    inputs_of,
    is_loader,
    parts,
    plain,
)
from floats import assert_close

N = 7
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(2))
Y = torch.arange(N) % 2
Named = namedtuple("Named", ["label", "inputs"])
CUTS = (slice(0, 3), slice(3, 6), slice(6, N))
LOADERS: dict[str, Any] = {
    "DataLoader of pairs": lambda: DataLoader(TensorDataset(X, Y), batch_size=3),
    "list of a loader's batches": lambda: list(DataLoader(TensorDataset(X, Y), batch_size=3)),
    "mappings with labels": lambda: [{"input": X[cut], "labels": Y[cut]} for cut in CUTS],
    "named tuples, targets first": lambda: [Named(Y[cut], X[cut]) for cut in CUTS],
    "pairs of arrays": lambda: [(X[cut].numpy(), Y[cut].numpy()) for cut in CUTS],
}
UNLABELLED: dict[str, Any] = {
    "DataLoader of inputs": lambda: DataLoader(TensorDataset(X), batch_size=3),
    "generator of tensors": lambda: (X[cut] for cut in CUTS),
    "generator of arrays": lambda: (X[cut].double().numpy() for cut in CUTS),
    "mappings without labels": lambda: iter([{"input": X[cut]} for cut in CUTS]),
}
MODEL = nn.Linear(3, 2)


GRAPHS = [{"x": X}, {"x": X[:2], "edge_index": X[:4]}]
# What a list is: whether a loader, and how many examples its first batch has.
LISTS: dict[str, tuple[Any, bool, int]] = {
    "arguments": ([X, X], False, N),
    "texts": (["a text", "another", "third"], False, 3),
    "objects": ([object(), object()], False, 2),
    "mappings are batches": (GRAPHS, True, N),
    "mappings that are examples": ([GRAPHS], True, 2),
    "tuples that are examples": ([[(X, X), (X, X)]], True, 2),
    "examples with targets": ((GRAPHS, Y[:2]), False, 2),
    "batches of examples with targets": ([(GRAPHS, Y[:2])], True, 2),
    "a collated pair": ([[X, Y]], True, N),
}


def alone(inputs: Any) -> Tensor:
    return inputs["input"] if isinstance(inputs, dict) else inputs


@pytest.mark.parametrize("name", [*LOADERS, *UNLABELLED])
def test_a_loader_gives_its_inputs_and_targets(name: str):
    make = (LOADERS | UNLABELLED)[name]
    loader = make()
    assert is_loader(loader)
    seen = [alone(batch) for batch in inputs_of(loader, MODEL)]
    assert [len(x) for x in seen] == [3, 3, 1]
    assert_close(torch.cat(seen), X)
    if name in LOADERS:
        assert torch.equal(torch.cat([y for _, y in batches_of(make(), MODEL)]), Y)


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], {"input": X, "labels": Y}, (X.numpy(), Y.numpy())])
def test_a_single_batch_is_no_loader(batch: Any):
    assert not is_loader(batch)
    ((inputs, y),) = batches_of(batch, MODEL)
    assert_close(alone(inputs), X)
    assert torch.equal(y, Y)


@pytest.mark.parametrize("name", LISTS)
def test_what_a_list_is(name: str):
    data, loader, size = LISTS[name]
    assert is_loader(data) == loader
    inputs = data[0] if isinstance(data, tuple) else next(inputs_of(data, MODEL))
    assert batch_size(inputs) == size
    assert [batch_size(part) for part in parts(inputs, 2)] == [min(2, size - i) for i in range(0, size, 2)]
    assert batch_size(chosen_examples(inputs, torch.tensor([1, 0, 1]))) == 3


@pytest.mark.parametrize("data", [[1.0, 2.0], [[1.0], [2.0]], [], "x"])
def test_what_holds_no_examples_is_told(data: Any):
    with pytest.raises(MatchError, match="or a list of examples of several rows each"):
        batch_size(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "must be a loader of .inputs, targets., got int"),
        (X, "must be .inputs, targets., or a mapping with one of .* got Tensor"),
        ([{"input": X}], r"got dict with keys \['input'\]"),
        ([(X, "ab")], "targets of a batch must be a tensor with a row for each example, got str"),
        ([(X, torch.tensor(1))], "collate the examples first"),
        ((X, np.array(["a"])), "holds no numbers"),
    ],
)
def test_what_has_no_targets_is_named(data: Any, message: str):
    with pytest.raises(MatchError, match=message):
        list(batches_of(data, MODEL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_arrays_take_the_models_type(dtype: torch.dtype):
    model, read_only = nn.Linear(3, 2).to(dtype), X.numpy().copy()
    read_only.flags.writeable = False
    wide = X.double().numpy()
    for array in (wide, X.numpy(), wide[::-1].copy()[::-1], wide.astype(">f8"), read_only):
        assert torch.equal(for_model(array, model), X.to(dtype))
    assert torch.equal(for_model((X.numpy(), {"a": X.numpy()}), model)[1]["a"], X.to(dtype))
    for kind in (np.int64, np.int32, np.uint16):
        assert torch.equal(for_model(Y.numpy().astype(kind), model), Y)


def test_tables_are_arrays():
    frames = pytest.importorskip("pandas")
    assert torch.equal(for_model(frames.DataFrame(X.numpy()), MODEL), X)


def test_some_examples_of_a_batch():
    whole = torch.arange(2.0)
    batch = {"input": (X, whole), "flag": True, "ids": Y}
    found = examples(batch, 2, 4)
    assert torch.equal(found["input"][0], X[2:4])
    assert torch.equal(found["ids"], Y[2:4])
    assert found["input"][1] is whole
    assert found["flag"]
    assert torch.equal(chosen_examples(batch, torch.tensor([5, 1]))["ids"], Y[[5, 1]])
    assert torch.equal(torch.cat([part["ids"] for part in parts(batch, 3)]), Y)
    assert [len(part["ids"]) for part in parts(batch, 3)] == [3, 3, 1]


def test_graphs_and_inference_tensors_are_left_behind():
    x = X.clone().requires_grad_()
    assert not plain(x).requires_grad
    assert plain(x, graph=True).requires_grad
    with torch.no_grad():
        assert not plain(x, graph=True).requires_grad
    with torch.inference_mode():
        made = X * 2
    assert not plain(made).is_inference()
