"""`bayesadam data`: which data sets there are, where they are, and whether they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayesadam.errors import BayesAdamError

# Numbers and tensors are imported by a command that has begun, and not for its help.
if TYPE_CHECKING:
    from bayesadam.data import DataSet, FileCheck

app = typer.Typer(
    name="data",
    help="The paper's data sets: list them, fetch them, verify them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# As `bayesadam.data` has them, which a test holds together: completion does not wait for its imports.
DATA_SETS = (
    *("mnist", "fashion-mnist", "mushroom", "financial", "jester", "statlog", "adult", "covertype", "census"),
    *("digits", "wheel", "toy"),
)


def _data_sets(what: str) -> Any:
    """The argument that takes data sets, whose names the shell completes."""
    return typer.Argument(metavar="NAME", help=what, autocompletion=lambda: [*DATA_SETS, "all"])


_Folder = typer.Option("--out", "-o", metavar="DIR", help="A folder to bring them to, for use as BAYESADAM_DATA.")
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the paths, one per line.")]


@app.command("list")
def list_() -> None:
    """Show every data set, and where it was found."""
    from bayesadam.data import data_sets
    from bayesadam.data.fetching import CACHE_VARIABLE, DATA_VARIABLE, cache_folder, data_folder

    typer.echo(f"{DATA_VARIABLE}: {data_folder() or 'not set'}")
    typer.echo(f"cache: {cache_folder() or f'none: name a folder in {CACHE_VARIABLE}'}")
    typer.echo("")
    records = data_sets()
    widths = [max(len(text) for text in column) for column in zip(*((r.name, r.title) for r in records), strict=True)]
    for record in records:
        typer.echo(f"{record.name:{widths[0]}}  {record.title:{widths[1]}}  {_where(record)}")


@app.command("fetch")
def fetch_(
    names: Annotated[list[str], _data_sets("Data sets, or `all`; `bayesadam data list` shows them.")],
    out: Annotated[Path | None, _Folder] = None,
    quiet: Quiet = False,
) -> None:
    """Bring data sets to this machine.

    What BAYESADAM_DATA or the cache has is checked, the rest is downloaded.
    """
    from bayesadam.data import fetch

    failed = False
    for record in _chosen(names):
        try:
            paths = fetch(record.name, folder=out, progress=not quiet)
        except BayesAdamError as error:
            typer.echo(f"bayesadam: {error}", err=True)
            failed = True
            continue
        if record.embedded and not quiet:
            typer.echo(f"{record.name} is embedded: there is nothing to fetch")
        for path in paths:
            typer.echo(path)
    if failed:
        raise typer.Exit(1)


_Verified = _data_sets(
    "Data sets that must be there. Without any, or with `all`, sets of which no file is here are passed over."
)


@app.command("verify")
def verify_(
    names: Annotated[list[str] | None, _Verified] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only what is wrong.")] = False,
) -> None:
    """Compare the files on this machine with their published checksums.

    Ends with code 1 where a checksum is wrong, and where a file is missing of a set that was named or begun.
    """
    from bayesadam.data import verify

    failed = False
    asked = names or ["all"]
    for record in _chosen(asked):
        checks = verify(record.name)
        needed = asked != ["all"] or any(check.status != "missing" for check in checks)
        for check in checks:
            wrong = check.status == "wrong checksum" or (check.status == "missing" and needed)
            failed |= wrong
            if wrong or not quiet:
                typer.echo(_line(check), err=wrong)
    if failed:
        raise typer.Exit(1)


def _chosen(names: list[str]) -> tuple[DataSet, ...]:
    """The records, every name checked before any work."""
    from bayesadam.data import data_set, data_sets

    return data_sets() if names == ["all"] else tuple(data_set(name) for name in names)


def _where(record: DataSet) -> str:
    from bayesadam.data import find

    if record.embedded:
        return "embedded"
    found = find(record.name)
    folders = " and ".join(dict.fromkeys(str(item.path.parent) for item in found.values()))
    if len(found) == len(record.files):
        return folders
    if found:
        return f"{len(found)} of {len(record.files)} files: {folders}"
    return "absent" if all(file.urls for file in record.files) else "absent, and no public source is known"


def _line(check: FileCheck) -> str:
    where = f"{check.data_set}/{check.file}" if check.path is None else str(check.path)
    detail = f": expected sha256 {check.expected}, found {check.found}" if check.status == "wrong checksum" else ""
    return f"{check.status}  {where}{detail}"
