"""One record per data set: what it is, its files with their checksums, and where each can be had."""

from __future__ import annotations

from dataclasses import dataclass

from bayesadam.errors import SettingError


@dataclass(frozen=True)
class Copy:
    """One form in which a file may lie in a folder: as published, or packed."""

    name: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class DataFile:
    """A file that a loader reads: as its public source has it, and compressed, where such a copy is known.

    `urls` are the public sources of `published`, the first choice first. One that ends in .gz or .zip, where the file's
    own name does not, delivers it packed.
    """

    published: Copy
    packed: Copy | None = None
    urls: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The published name."""
        return self.published.name

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Every form that may lie in a folder."""
        return (self.published,) if self.packed is None else (self.published, self.packed)


@dataclass(frozen=True)
class DataSet:
    """A data set: its folder below that of all data sets, and the files that a loader reads; an embedded set has none.

    `instead` is the embedded set nearest to it, to be named where this one is absent.
    """

    name: str
    title: str
    folder: str = ""
    files: tuple[DataFile, ...] = ()
    instead: str = ""

    @property
    def embedded(self) -> bool:
        """Whether it needs no file."""
        return not self.files


# Folder and name, bytes, sha256.
_COPIES = """
mnist/train-images-idx3-ubyte.gz 9912422 440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
mnist/train-labels-idx1-ubyte.gz 28881 3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
mnist/t10k-images-idx3-ubyte.gz 1648877 8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
mnist/t10k-labels-idx1-ubyte.gz 4542 f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
fashion-mnist/train-images-idx3-ubyte.gz 26421880 3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
fashion-mnist/train-labels-idx1-ubyte.gz 29515 a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
fashion-mnist/t10k-images-idx3-ubyte.gz 4422102 346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
fashion-mnist/t10k-labels-idx1-ubyte.gz 5148 67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
bandits/mushroom/agaricus-lepiota.data 373704 e65d082030501a3ebcbcd7c9f7c71aa9d28fdfff463bf4cf4716a3fe13ac360e
bandits/mushroom/agaricus-lepiota.data.gz 29462 bf2157cb0f7aca0b2ce5537471c6b9636380b20e322a5aa97af985ba45affffa
bandits/financial/raw_stock_contexts 1987117 cf468e5aae150dfd5c6b096464cd11e85f8b01198f8e49bedb941948850a6315
bandits/financial/raw_stock_contexts.gz 309822 5a23e986d9fa77ed80abef9153cd590bd3c9c777ccabc5e432c67e215f7a8805
bandits/jester/jester-data-1.csv 11712553 4692895acc91263ec11592cb94687725e28afdd451845ab46c2ac6ba3ebc414e
bandits/jester/jester-data-1.csv.xz 2719700 168e8e87e4617422e7e3142366d31ceadf7fc44a08a31a544dd77ad0afc5d0cc
bandits/statlog/shuttle.trn 1153518 87b24ee9fb5137e1d417659cf905d84d0e15342bbaa60770f1ae83da1a38200a
bandits/statlog/shuttle.trn.gz 313387 7e5b6c9db2350161b89b562a6b73c3ec2eea2c1d6f632bf568401236ad49b751
bandits/adult/adult.data 3974305 5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d
bandits/adult/adult.data.gz 408969 c7a2b4716a97f930123e0baf879188d701e798172631a654fc703d4b082907f3
bandits/adult/adult.test 2003153 a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05
bandits/adult/adult.test.gz 205254 8a2c1bffa6e7ce5abfa43881ae5e87c4311ebc2b3cd526c9c40a43f19f06f799
bandits/covertype/covtype.data 75169317 0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945
bandits/covertype/covtype.data.xz 7036792 bbaed4fe81a7ac1b4ce6d3df1bcf79f1e11fefcc2336dbcdecf2ca69fe7cf26d
bandits/census/USCensus1990.data.txt 361344227 38e99f50855ddc03167b715b36519ef40b77295ae4e85dfef0c6429ac79ed799
"""
_KNOWN = {
    path: Copy(path.rpartition("/")[2], int(n), digest)
    for path, n, digest in map(str.split, _COPIES.strip().splitlines())
}


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
}
# A source that ends in "/" has every file under its published name. Jester's authors have a spreadsheet, which is not this
# file; UCI has statlog as .Z, which Python cannot unpack.
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
"""


def _record(name: str, title: str) -> DataSet:
    """A set by the name of its folder."""
    files = []
    sources = [url for known, url in map(str.split, _SOURCES.strip().splitlines()) if known == name]
    for path, copy in _KNOWN.items():
        if path.split("/")[-2] == name and path.rpartition(".")[0] not in _KNOWN:
            packed = _KNOWN.get(f"{path}.gz") or _KNOWN.get(f"{path}.xz")
            urls = tuple(url + copy.name if url.endswith("/") else url for url in sources)
            files.append(DataFile(copy, packed, urls))
    is_table = f"bandits/{name}/{files[0].name}" in _KNOWN
    folder, instead = (f"bandits/{name}", "wheel") if is_table else (name, "digits")
    return DataSet(name, title, folder, tuple(files), instead)


_RECORDS = (
    *(_record(name, title) for name, title in _TITLES.items()),
    DataSet("digits", "scikit-learn's 1,797 handwritten digits of 8 × 8 pixels"),
    DataSet("wheel", "the wheel bandit, drawn by the simulation"),
    DataSet("toy", "the paper's toy regression, drawn from a generator"),
)

DATA_SETS: dict[str, DataSet] = {record.name: record for record in _RECORDS}


def data_sets() -> tuple[DataSet, ...]:
    """The record of every data set, embedded ones last.

    >>> [record.name for record in data_sets() if record.embedded]
    ['digits', 'wheel', 'toy']
    """
    return tuple(DATA_SETS.values())


def data_set(name: str) -> DataSet:
    """The record of one data set.

    >>> data_set("mnist").folder
    'mnist'
    """
    if name not in DATA_SETS:
        raise SettingError(f"no data set is called {name!r}: choose from {', '.join(DATA_SETS)}")
    return DATA_SETS[name]
