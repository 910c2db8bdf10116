"""One record per data set: what it is, its files with their checksums, and where each can be had."""

from __future__ import annotations

from collections.abc import Iterable
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
    """A file that a loader reads.

    Attributes:
        published: the file as its public source has it.
        packed: the same content, compressed, where such a copy is known.
        urls: public sources of `published`, the first choice first. One that ends in .gz or .zip, where the file's own
            name does not, delivers it packed. None at all where none is known.
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
    """A data set.

    Attributes:
        name: what users call it.
        title: what it is.
        folder: where its files lie below the folder of all data sets.
        files: what a loader reads; an embedded set has none.
        instead: the embedded set nearest to it, to be named where this one is absent.
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

    def file(self, name: str) -> DataFile:
        """The file of that published name."""
        return next(file for file in self.files if file.name == name)


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_SHOWDOWN = "https://storage.googleapis.com/bandits_datasets"
_GITHUB = "https://raw.githubusercontent.com"


def _images(name: str, title: str, mirrors: tuple[str, ...], copies: Iterable[Copy]) -> DataSet:
    files = tuple(DataFile(copy, urls=tuple(f"{mirror}/{copy.name}" for mirror in mirrors)) for copy in copies)
    return DataSet(name, title, name, files, instead="digits")


def _table(name: str, title: str, *files: DataFile) -> DataSet:
    return DataSet(name, title, f"bandits/{name}", files, instead="wheel")


_RECORDS = (
    _images(
        "mnist",
        "MNIST: 70,000 handwritten digits of 28 × 28 pixels",
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        (
            Copy(
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            Copy(
                "train-labels-idx1-ubyte.gz",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            Copy(
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            Copy(
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
    ),
    _images(
        "fashion-mnist",
        "Fashion-MNIST: 70,000 pictures of clothes of 28 × 28 pixels",
        (
            f"{_GITHUB}/zalandoresearch/fashion-mnist/master/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
        (
            Copy(
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            Copy(
                "train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            Copy(
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            Copy(
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
    ),
    _table(
        "mushroom",
        "UCI Mushroom: 8,124 mushrooms, edible or not",
        DataFile(
            Copy(
                "agaricus-lepiota.data",
                373_704,
                "e65d082030501a3ebcbcd7c9f7c71aa9d28fdfff463bf4cf4716a3fe13ac360e",
            ),
            Copy(
                "agaricus-lepiota.data.gz",
                29_462,
                "bf2157cb0f7aca0b2ce5537471c6b9636380b20e322a5aa97af985ba45affffa",
            ),
            (f"{_UCI}/mushroom/agaricus-lepiota.data", f"{_SHOWDOWN}/mushroom.data"),
        ),
    ),
    _table(
        "financial",
        "The Showdown's stocks: 3,713 days of price changes of 21 stocks",
        DataFile(
            Copy(
                "raw_stock_contexts",
                1_987_117,
                "cf468e5aae150dfd5c6b096464cd11e85f8b01198f8e49bedb941948850a6315",
            ),
            Copy(
                "raw_stock_contexts.gz",
                309_822,
                "5a23e986d9fa77ed80abef9153cd590bd3c9c777ccabc5e432c67e215f7a8805",
            ),
            (
                f"{_SHOWDOWN}/raw_stock_contexts",
                f"{_GITHUB}/andrewk1/pytorch-deep-bayesian-bandits/0d8ea13c232434736ecfdd4051f9685d9f734af7"
                "/bandits/data/selected_datasets/raw_stock_contexts",
            ),
        ),
    ),
    _table(
        "jester",
        "Jester: ratings of 40 jokes by the 19,181 users who rated them all",
        DataFile(
            Copy(
                "jester-data-1.csv",
                11_712_553,
                "4692895acc91263ec11592cb94687725e28afdd451845ab46c2ac6ba3ebc414e",
            ),
            Copy(
                "jester-data-1.csv.xz",
                2_719_700,
                "168e8e87e4617422e7e3142366d31ceadf7fc44a08a31a544dd77ad0afc5d0cc",
            ),
            # The authors' own site has a spreadsheet, which is not this file.
            (f"{_GITHUB}/negi-soumya/eigentaste/0877aa8b2b16531cc806a77bae606ad2b8ee5122/jester-data-1.zip",),
        ),
    ),
    _table(
        "statlog",
        "UCI Statlog (Shuttle): 43,500 states of a shuttle's radiators in 7 classes",
        DataFile(
            Copy(
                "shuttle.trn",
                1_153_518,
                "87b24ee9fb5137e1d417659cf905d84d0e15342bbaa60770f1ae83da1a38200a",
            ),
            Copy(
                "shuttle.trn.gz",
                313_387,
                "7e5b6c9db2350161b89b562a6b73c3ec2eea2c1d6f632bf568401236ad49b751",
            ),
            # UCI has it as .Z, which Python cannot unpack.
            (f"{_SHOWDOWN}/shuttle.trn",),
        ),
    ),
    _table(
        "adult",
        "UCI Adult: 45,222 complete rows of a census, 14 occupations",
        DataFile(
            Copy(
                "adult.data",
                3_974_305,
                "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            ),
            Copy(
                "adult.data.gz",
                408_969,
                "c7a2b4716a97f930123e0baf879188d701e798172631a654fc703d4b082907f3",
            ),
            (f"{_UCI}/adult/adult.data",),
        ),
        DataFile(
            Copy(
                "adult.test",
                2_003_153,
                "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
            ),
            Copy(
                "adult.test.gz",
                205_254,
                "8a2c1bffa6e7ce5abfa43881ae5e87c4311ebc2b3cd526c9c40a43f19f06f799",
            ),
            (f"{_UCI}/adult/adult.test",),
        ),
    ),
    _table(
        "covertype",
        "UCI Covertype: 581,012 patches of forest in 7 classes",
        DataFile(
            Copy(
                "covtype.data",
                75_169_317,
                "0a9371cef7c964b5475d6053cc3e0894a5aa6f65ad1ed3ecb01c45aa96217945",
            ),
            Copy(
                "covtype.data.xz",
                7_036_792,
                "bbaed4fe81a7ac1b4ce6d3df1bcf79f1e11fefcc2336dbcdecf2ca69fe7cf26d",
            ),
            (f"{_UCI}/covtype/covtype.data.gz", f"{_SHOWDOWN}/covtype.data"),
        ),
    ),
    _table(
        "census",
        "UCI US Census 1990: 2,458,285 people, 9 kinds of occupation",
        DataFile(
            Copy(
                "USCensus1990.data.txt",
                361_344_227,
                "38e99f50855ddc03167b715b36519ef40b77295ae4e85dfef0c6429ac79ed799",
            ),
            urls=(f"{_UCI}/census1990-mld/USCensus1990.data.txt", f"{_SHOWDOWN}/USCensus1990.data.txt"),
        ),
    ),
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
