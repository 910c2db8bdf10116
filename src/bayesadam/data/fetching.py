"""Every data set with its files and checksums, found in BAYESADAM_DATA, in the user's cache, or at a public source.

A download is checked against its sha256 before it takes its name, so a file in the cache is whole.
"""

import gzip
import hashlib
import lzma
import os
import sys
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesadam._extras import require
from bayesadam._files import replacing
from bayesadam.errors import DataError, MissingExtraError, SettingError

DATA_VARIABLE = "BAYESADAM_DATA"
CACHE_VARIABLE = "BAYESADAM_CACHE"
TIMEOUT = 20.0
# A checksum that begins with this is the name of a git blob.
_GIT = "git:"
# What opens a packed file, by its ending.
UNPACKED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


@dataclass(frozen=True)
class DataFile:
    """A file that a loader reads, and its public sources; a folder may also hold it compressed, as .gz or .xz.

    A source that ends in .gz or .zip, where the file's own name does not, delivers it packed.
    The checksum is a sha256; or, for a file whose sha256 and size (0) are not known, `"git:"` and its git blob's name.
    """

    name: str
    n_bytes: int
    checksum: str
    urls: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """A data set: its folder below that of all sets, its files, and the embedded set most like it."""

    name: str
    title: str
    folder: str = ""
    files: tuple[DataFile, ...] = ()
    instead: str = ""

    @property
    def embedded(self) -> bool:
        """Whether it needs no file."""
        return not self.files


# Folder and name, bytes, checksum. A set is called as its folder, and a part of one as what stands first.
_FILES = """
mnist/train-images-idx3-ubyte.gz 9912422 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
mnist/train-labels-idx1-ubyte.gz 28881 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
mnist/t10k-images-idx3-ubyte.gz 1648877 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
mnist/t10k-labels-idx1-ubyte.gz 4542 f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
fashion-mnist/train-images-idx3-ubyte.gz 26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
fashion-mnist/train-labels-idx1-ubyte.gz 29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
fashion-mnist/t10k-images-idx3-ubyte.gz 4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
fashion-mnist/t10k-labels-idx1-ubyte.gz 5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
bandits/mushroom/agaricus-lepiota.data 373704 e65d082030501a3ebcbcd7c9f7c71aa9d28fdfff463bf4cf4716a3fe13ac360e
bandits/financial/raw_stock_contexts 1987117 cf468e5aae150dfd5c6b096464cd11e85f8b01198f8e49bedb941948850a6315
bandits/jester/jester-data-1.csv 11712553 4692895acc91263ec11592cb94687725e28afdd451845ab46c2ac6ba3ebc414e
bandits/statlog/shuttle.trn 1153518 87b24ee9fb5137e1d417659cf905d84d0e15342bbaa60770f1ae83da1a38200a
bandits/adult/adult.data 3974305 5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d
bandits/adult/adult.test 2003153 a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05
bandits/covertype/covtype.data 75169317 0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945
bandits/census/USCensus1990.data.txt 361344227 38e99f50855ddc03167b715b36519ef40b77295ae4e85dfef0c6429ac79ed799
part=bandits/census/partaa 0 git:8087060305be8570379c881c39ddcc34f8028b22
1000=bandits/census/us_census_1990_rows1000.csv 145002 4c5c60d66a06e57dc41e3e5f08d2427b3dabd393839b2d8592e7038f55a3ee99
"""
_TITLES = {
    "mnist": "MNIST: 70,000 handwritten digits of 28 × 28 pixels",
    "fashion-mnist": "Fashion-MNIST: 70,000 pictures of clothes of 28 × 28 pixels",
    "mushroom": "UCI Mushroom: 8,124 mushrooms, edible or not",
    "financial": "The Showdown's stocks: 3,713 days of price changes of 21 stocks",
    "jester": "Jester: ratings of 40 jokes by the 19,181 users who rated them all",
    "statlog": "UCI Statlog (Shuttle): 43,500 states of a shuttle's radiators in 7 classes",
    "adult": "UCI Adult: 45,222 complete rows of a census, 14 occupations",
    "covertype": "UCI Covertype: 581,012 patches of forest in 7 classes",
    "census": "UCI US Census 1990: 2,458,285 people, 9 kinds of occupation",
    "census-part": "the first 307,283 people of the UCI US Census 1990",
    "census-1000": "the first 1,000 people of the UCI US Census 1990",
}
# A source that ends in "/" has every file under its published name. Jester's authors have a spreadsheet, which is not
# this file; UCI has statlog as .Z, which Python cannot unpack.
_SOURCES = """
mnist https://ossci-datasets.s3.amazonaws.com/mnist/
mnist https://storage.googleapis.com/cvdf-datasets/mnist/
fashion-mnist https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/
fashion-mnist http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/
mushroom https://archive.ics.uci.edu/ml/machine-learning-databases/mushroom/
mushroom https://storage.googleapis.com/bandits_datasets/mushroom.data
financial https://storage.googleapis.com/bandits_datasets/
financial https://raw.githubusercontent.com/andrewk1/pytorch-deep-bayesian-bandits/0d8ea13c232434736ecfdd4051f9685d9f734af7/bandits/data/selected_datasets/
jester https://raw.githubusercontent.com/negi-soumya/eigentaste/0877aa8b2b16531cc806a77bae606ad2b8ee5122/jester-data-1.zip
statlog https://storage.googleapis.com/bandits_datasets/
adult https://archive.ics.uci.edu/ml/machine-learning-databases/adult/
covertype https://archive.ics.uci.edu/ml/machine-learning-databases/covtype/covtype.data.gz
covertype https://storage.googleapis.com/bandits_datasets/
census https://archive.ics.uci.edu/ml/machine-learning-databases/census1990-mld/
census https://storage.googleapis.com/bandits_datasets/
census-part https://raw.githubusercontent.com/matkosoric/US-Census-1990-Stream/a425413105ab7579a144e116e133da47cd344018/src/main/resources/census-data/
census-1000 https://raw.githubusercontent.com/AmyLinck/project4/f0b912615fab8a5f395d6a4fa245e6c4a9687c5f/Data/original/us_census_1990.csv
"""


def _record(name: str, title: str) -> DataSet:
    """A set by the name of its folder."""
    sources = [url for known, url in map(str.split, _SOURCES.strip().splitlines()) if known == name]
    files, folder = [], ""
    for where, n_bytes, digest in map(str.split, _FILES.strip().splitlines()):
        part, _, path = where.rpartition("=")
        if name == "-".join(filter(None, (path.split("/")[-2], part))):
            folder, _, file = path.rpartition("/")
            urls = tuple(url + file if url.endswith("/") else url for url in sources)
            files.append(DataFile(file, int(n_bytes), digest, urls))
    return DataSet(name, title, folder, tuple(files), "wheel" if folder.startswith("bandits/") else "digits")


DATA_SETS: dict[str, DataSet] = {
    **{name: _record(name, title) for name, title in _TITLES.items()},
    "digits": DataSet("digits", "scikit-learn's 1,797 handwritten digits of 8 × 8 pixels"),
    "wheel": DataSet("wheel", "the wheel bandit, drawn by the simulation"),
    "toy": DataSet("toy", "the paper's toy regression, drawn from a generator"),
}


def data_sets() -> tuple[DataSet, ...]:
    """The record of every data set, embedded ones last."""
    return tuple(DATA_SETS.values())


def data_set(name: str) -> DataSet:
    """The record of one data set."""
    if name not in DATA_SETS:
        raise SettingError(f"no data set is called {name!r}: choose from {', '.join(DATA_SETS)}")
    return DATA_SETS[name]


def data_folder() -> Path | None:
    """The folder named by BAYESADAM_DATA, if any is."""
    named = os.environ.get(DATA_VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise SettingError(f"{DATA_VARIABLE} names {folder}, which is not a folder: correct it, or unset it")
    return folder


def cache_folder() -> Path | None:
    """The folder for downloads: BAYESADAM_CACHE, or pooch's for this user; None where pooch is not installed."""
    try:
        return Path(os.environ.get(CACHE_VARIABLE) or require("pooch").os_cache("bayesadam")).expanduser()
    except MissingExtraError:
        return None


def find(name: str) -> dict[str, Path]:
    """The files of a data set on this machine, by published name; nothing is fetched."""
    record, found = data_set(name), dict[str, Path]()
    for place in filter(None, (data_folder(), cache_folder())):
        for file in record.files:
            for form in (file.name, f"{file.name}.gz", f"{file.name}.xz"):
                if (path := place / record.folder / form).is_file():
                    found.setdefault(file.name, path)
    return found


def locate(name: str, files: Collection[str] | None = None, *, progress: bool = False) -> dict[str, Path]:
    """Where the wanted files of a data set are, by published name; missing ones are downloaded to the cache.

    Raises:
        DataError: a file has the wrong size, or is absent and cannot be downloaded.
    """
    record, present, paths = data_set(name), find(name), {}
    for file in record.files:
        if files is not None and file.name not in files:
            continue
        path = paths[file.name] = present.get(file.name) or _download(record, file, progress)
        # A truncated file is caught without reading it.
        if file.n_bytes and path.name == file.name and (size := path.stat().st_size) != file.n_bytes:
            wrong = f"{path} has {size:,} bytes, expected {file.n_bytes:,}: it is truncated or another file"
            raise DataError(f"{wrong}; remove it, then `bayesadam data fetch {record.name}`")
    return paths


def fetch(name: str, *, progress: bool = True) -> tuple[Path, ...]:
    """Bring every file of a data set to this machine, check it against its checksum, and return the paths.

    A damaged file in the cache is fetched again; one in BAYESADAM_DATA is the user's, and so an error.
    """
    record, users, present, paths = data_set(name), data_folder(), find(name), []
    for file in record.files:
        path = present.get(file.name)
        digest = None if path is None else _digest(path, file.checksum, packed=path.name != file.name)
        if path and digest != file.checksum and users in path.parents:
            damage = f"{path} is damaged: its checksum is {digest}, expected {file.checksum}"
            raise DataError(f"{damage}: replace it, or remove it to have it fetched")
        paths.append(path if path and digest == file.checksum else _download(record, file, progress))
    return tuple(paths)


def verify(name: str) -> dict[str, str]:
    """What is wrong with the files of a data set on this machine, by published name: missing, or of another sha256."""
    present, wrong = find(name), {}
    for file in data_set(name).files:
        path = present.get(file.name)
        if path is None:
            wrong[file.name] = "missing"
        elif (digest := _digest(path, file.checksum, packed=path.name != file.name)) != file.checksum:
            wrong[file.name] = f"{path}: expected checksum {file.checksum}, found {digest}"
    return wrong


def _digest(path: Path, like: str, *, packed: bool = False) -> str:
    """The checksum, of the same kind as another, of the content, unpacked where it is packed."""
    try:
        with (UNPACKED[path.suffix] if packed else open)(path, "rb") as file:
            if like.startswith(_GIT):
                content = file.read()
                return _GIT + hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return "none: it cannot be unpacked"
    return digest.hexdigest()


def _download(record: DataSet, file: DataFile, progress: bool) -> Path:
    """Download one file to the cache from the first source that delivers it; it has its name only once it is whole."""
    folder = cache_folder()
    absent = (
        f"{file.name} of the data set {record.name!r} is neither in {DATA_VARIABLE} ({data_folder() or 'not set'}) nor "
        f"in {folder}, below {record.folder}: put it there by hand, or use the embedded set {record.instead!r}"
    )
    try:
        # A server that packs what it sends would have it unpacked on arrival, .gz files included.
        download = require("pooch").HTTPDownloader(timeout=TIMEOUT, headers={"Accept-Encoding": "identity"})
    except MissingExtraError as error:
        raise DataError(f"{absent}; to download it, {error}") from error
    target, reasons = (folder or Path()) / record.folder / file.name, []
    for url in file.urls:
        if progress:
            print(f"{record.name}: {file.n_bytes:,} bytes from {url}", file=sys.stderr)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as temporary:
                download(url, temporary, None)
                if url.endswith((".gz", ".zip")) and not url.endswith(file.name):
                    _unpack(temporary, url, file.n_bytes)
                if (digest := _digest(temporary, file.checksum)) != file.checksum:
                    raise DataError(f"wrong checksum: {digest}, expected {file.checksum}")
            return target
        except OSError as error:
            reasons.append(f"{url}: {error}")
    raise DataError(f"{absent}; no source delivered it ({'; '.join(reasons) or 'no public source is known'})")


def _unpack(path: Path, url: str, n_bytes: int) -> None:
    """Replace what a source delivers packed by the file in it, of an archive the largest."""
    try:
        opener: Any = gzip.open if url.endswith(".gz") else zipfile.ZipFile
        with opener(path) as packed:
            if isinstance(packed, zipfile.ZipFile):
                packed = packed.open(max(packed.infolist(), key=lambda member: member.file_size))
            # One byte more than expected shows a wrong file, whatever it would unpack to.
            content = packed.read(n_bytes + 1)
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"not a packed file: {error}") from error
    path.write_bytes(content)
