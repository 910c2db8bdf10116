"""A few hundred damaged files."""

from pathlib import Path

from bayesadam.readers import format_of
from formats.fuzz import corpus, inspected


def test_damaged_files_end_in_an_error_or_are_read(tmp_path: Path) -> None:
    found = list(inspected(tmp_path, seed=7, numbers=range(200)))
    assert len(found) == 200
    assert [outcome for outcome in found if outcome.what not in ("read", "refused")] == []
    assert {outcome.what for outcome in found} == {"read", "refused"}


def test_the_corpus_has_every_format_of_one_file(tmp_path: Path) -> None:
    kinds = set()
    for name, content in corpus().items():
        (tmp_path / name).write_bytes(content)
        kinds.add(format_of(tmp_path / name).name)
    assert kinds == {"torch", "torch before 1.6", "pickle", "safetensors", "posterior", "zip archive"}
