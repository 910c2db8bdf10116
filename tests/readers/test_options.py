"""One record of options, wherever a checkpoint is read."""

import inspect
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from bayesadam import GaussianWeights, Posterior
from bayesadam.cli import app
from bayesadam.inspect import inspect_checkpoint
from bayesadam.compress import prune_checkpoint
from bayesadam.readers import CheckpointKeywords, CheckpointOptions, read_checkpoint

OPTIONS = {field.name: field.default for field in fields(CheckpointOptions)}


def test_keywords_and_record_are_the_same():
    assert list(CheckpointKeywords.__annotations__) == list(OPTIONS)
    taken = inspect.signature(Posterior.from_checkpoint).parameters
    assert {name: taken[name].default for name in OPTIONS} == OPTIONS


@pytest.mark.parametrize(
    "function",
    [
        read_checkpoint,
        inspect_checkpoint,
        lambda path, **options: GaussianWeights.open(path, **options).write_sample("out.safetensors"),
        lambda path, **options: prune_checkpoint(path, "out.safetensors", 0.5, **options),
    ],
)
def test_an_unknown_option_is_refused(function, tmp_path):
    with pytest.raises(TypeError, match="groups_in_ordr"):
        function(tmp_path, groups_in_ordr=True)


@pytest.mark.parametrize("command", ["inspect", "prune", "export"])
def test_every_command_takes_them(command):
    told = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    for option in ("--optimizer-file", "--optimizer", "--groups-in-order", "--weights-key", "--optimizer-key"):
        assert option in told
