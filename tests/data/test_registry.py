"""The records against the files themselves, where they are, and against each other."""

import os
import re
from pathlib import Path

import pytest

from bayesadam.data import data_set, data_sets, find
from bayesadam.data.fetching import _digest
from bayesadam.errors import SettingError

FILES = [(record, file) for record in data_sets() for file in record.files]
NAMES = [f"{record.name}/{file.name}" for record, file in FILES]


def test_names_are_unique_and_every_set_is_there():
    names = [record.name for record in data_sets()]
    assert len(set(names)) == len(names)
    assert set(names) == {
        *("mnist", "fashion-mnist"),
        *("mushroom", "financial", "jester", "statlog", "adult", "covertype", "census", "census-part", "census-1000"),
        *("digits", "wheel", "toy"),
    }


def test_a_set_with_files_names_an_embedded_one():
    for record in data_sets():
        assert record.embedded == (record.name in ("digits", "wheel", "toy"))
        if not record.embedded:
            assert data_set(record.instead).embedded
            assert record.folder.endswith(record.name.partition("-1000")[0].partition("-part")[0])


@pytest.mark.parametrize(("record", "file"), FILES, ids=NAMES)
def test_a_file_is_fully_described(record, file):
    assert re.fullmatch(r"[0-9a-f]{64}|git:[0-9a-f]{40}", file.checksum)
    assert (file.n_bytes == 0) == file.checksum.startswith("git:")
    for url in file.urls:
        assert re.fullmatch(r"https?://[\w./-]+", url)


@pytest.mark.parametrize(("record", "file"), FILES, ids=NAMES)
def test_the_record_is_that_of_the_file(record, file):
    if "BAYESADAM_DATA" not in os.environ:
        pytest.skip("BAYESADAM_DATA is not set")
    path = find(record.name).get(file.name)
    if path is None or Path(os.environ["BAYESADAM_DATA"]) not in path.parents:
        pytest.skip(f"{file.name} is not in BAYESADAM_DATA")
    assert _digest(path, file.checksum, packed=path.name != file.name) == file.checksum


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(SettingError, match=r"'mnst'.*mnist, fashion-mnist"):
        data_set("mnst")
