"""Arguments are checked against the class or function that a `_target_` names."""

import sys

import pytest

from armature.errors import ConfigError
from armature.validation import signatures, targets

ALLOWED = ["armature", "torch.optim", "lightning.pytorch", "sample"]


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """A package with the shapes of constructors that people write."""
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("from .net import Net as Renamed\n")
    (package / "net.py").write_text(
        "from collections.abc import Sequence\nfrom dataclasses import dataclass\nfrom pathlib "
        "import Path\nfrom typing import *\nfrom torch import Tensor\nfrom torch.optim import "
        "AdamW\nfrom typing import List, Tuple\nclass Base:\n    def __init__(self, *, depth: int "
        "= 2): ...\nclass Net(Base):\n    def __init__(self, width: int, scale: float | None = "
        "None, **kwargs): super().__init__(**kwargs)\nclass Inherits(Base): ...\nclass "
        "Keeps(Base):\n    def __init__(self, **config):\n        self.config = config\nclass "
        "Saves(Base):\n    def __init__(self, **kwargs):\n        self.save_hyperparameters()\n"
        "class Pops(Base):\n    def __init__(self, **kwargs):\n        self.rate = "
        "kwargs.pop('rate', 0.1)\n        super().__init__(**kwargs)\n@dataclass\nclass Options:\n "
        "   rate: float = 0.1\n    name: str = ''\ndef build(path: str): ...\ndef typed(*, tags: "
        "Sequence[str] = (), pair: tuple[float, float] = (0, 1), size: Optional[int] = None,\n     "
        "     kind: Literal['a', 'b'] = 'a', weights: 'dict[str, float] | None' = None, file: Path "
        "= None,\n          names: list[str] = [], other: 'Union[int, Unknown]' = 1): ...\ndef "
        "loose(*, depths: Tuple[int] = (2, 2), names: List[str] = None, anchors: list[Tensor] = "
        "(),\n          sizes: list[int] = (), options: dict[str, int] = {}, share: int = 0.5): "
        "...\nclass Mixin:\n    def named(self): ...\nclass Mixed(Mixin, Inherits): ...\nclass "
        "Deep(Mixin, AdamW): ...\nclass OfBase(Base): ...\nclass Child(Base):\n    def "
        "__init__(self, *, rate, depth=1): ...\nclass Diamond(OfBase, Child): ...\nclass "
        "MixedMore(Mixin, Inherits):\n    def __init__(self, eta=0.0, **kwargs): "
        "super().__init__(**kwargs)\n@dataclass\nclass Loose:\n    depths: list[int] = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("sample.net", "sample"):
        sys.modules.pop(name, None)


def found(**node):
    return targets.problems({"node": node}, ALLOWED)


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "sample.net.Net", "width": 3, "scale": 1, "depth": 4},
        {"_target_": "sample.net.Inherits", "depth": 1},
        {"_target_": "sample.net.Keeps", "anything": 1},
        {"_target_": "sample.net.Pops", "rate": 1, "depth": 1},
        {"_target_": "sample.net.Options", "rate": 0.5, "name": "a"},
        {"_target_": "sample.net.build", "path": "x", "_partial_": True},
        {
            "_target_": "sample.net.typed",
            "tags": "ab",
            "pair": [0, 0.5],
            "size": None,
            "kind": "b",
            "weights": {"a": 1},
        },
        {
            "_target_": "sample.net.typed",
            "tags": ["a"],
            "weights": None,
            "file": "x",
            "other": "y",
            "names": [],
        },
        {
            "_target_": "sample.net.typed",
            "tags": {"_target_": "sample.net.Options"},
            "file": {"_target_": "sample.net.build", "path": "x"},
        },
        {
            "_target_": "sample.net.loose",
            "depths": [2, 2, 6, 2],
            "names": None,
            "anchors": [[1, 2]],
            "share": 0.5,
        },
        {
            "_target_": "sample.net.loose",
            "sizes": {"_target_": "sample.net.build", "path": "x"},
            "options": {"_target_": "sample.net.build", "path": "x"},
        },
        {"_target_": "sample.net.Diamond", "rate": 1, "depth": 2},
        {"_target_": "sample.net.Deep", "_partial_": True, "lr": 0.1},
        {"_target_": "sample.net.MixedMore", "depth": 1, "eta": 0.5},
        {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3, "weight_decay": 0.1},
        {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "save_dir": "x"},
    ],
)
def test_sound_arguments_are_accepted(node):
    assert found(**node) == []


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"_target_": "sample.net.Net", "widht": 3}, ["node.widht", "Did you mean 'node.width'?"]),
        ({"_target_": "sample.net.Net", "width": "three"}, ["node.width='three'", "int"]),
        ({"_target_": "sample.net.Net", "width": True}, ["node.width=True", "int"]),
        ({"_target_": "sample.net.Net", "width": 3, "depth": 1.5}, ["node.depth=1.5"]),
        *(
            (
                {"_target_": "sample.net.typed", key: value},
                [f"node.{key}={value!r}", takes],
            )
            for key, value, takes in [
                ("tags", [1], "Sequence"),
                ("pair", [1, "a"], "tuple"),
                ("size", 1.5, "int"),
                ("kind", "c", "'a', 'b'"),
                ("weights", {"a": "b"}, "dict[str, float]"),
                ("file", 5, "Path"),
                ("names", ["a", ["b"]], "list[str]"),
            ]
        ),
        (
            {"_target_": "sample.net.loose", "depths": [2, "a"]},
            ["node.depths=[2, 'a']", "Tuple[int]"],
        ),
        (
            {"_target_": "sample.net.loose", "depths": None},
            ["node.depths=null", "Tuple[int]"],
        ),
        (
            {"_target_": "torch.optim.SGD", "_partial_": True, "lr": {"a": 1}},
            ["node.lr={'a': 1}", "takes float or"],
        ),
        (
            {"_target_": "sample.net.Net", "width": 3, "_convert_": "alll"},
            ["node._convert_='alll'", "partial, object, all"],
        ),
        (
            {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "save_dir": [1]},
            ["node.save_dir=[1]", "str"],
        ),
        (
            {"_target_": "sample.net.MixedMore", "etaa": 1},
            ["takes no argument 'etaa'", "Did you mean 'node.eta'?"],
        ),
        ({"_target_": "sample.net.Nett"}, ["no such class", "Did you mean 'sample.net.Net'?"]),
        ({"_target_": "sampel.net.Net"}, ["there is no package 'sampel'."]),
        ({"_target_": "sample.nett.Net"}, ["no module 'sample.nett'"]),
        (
            {"_target_": "torch.optim.AdamW", "_partial_": True, "learning_rate": 1.0},
            ["takes no argument 'learning_rate'"],
        ),
        ({"_target_": "os.system", "command": "true"}, ["launch.allowed_packages"]),
        ({"inner": [{"_target_": "pathlib.Path.unlink"}]}, ["node.inner[0]._target_"]),
    ],
)
def test_each_mistake_is_named(node, words):
    (problem,) = found(**node)
    for word in words:
        assert word in problem


def test_a_module_gets_the_groups_that_its_constructor_takes():
    def accepted(target, **node):
        return signatures.accepted({"_target_": target, **node})

    users = "tests.validation.users"
    signatures.allow(["tests"])
    assert accepted("armature.tasks.language_modeling.LanguageModeling") == [
        "model",
        "optimizer",
        "scheduler",
    ]
    assert accepted(f"{users}.Template") == ["optimizer", "scheduler"]
    assert accepted(f"{users}.Template", optimizer={"_target_": "torch.optim.Adam"}) == [
        "scheduler"
    ]
    assert [accepted(f"{users}.{kind}") for kind in ("Plain", "Inherited", "Bare", "Ignores")] == [
        [],
        [],
        [],
        [],
    ]
    assert accepted(f"{users}.Reads") == ["optimizer"]
    assert accepted(f"{users}.Returns") == []
    assert accepted("nowhere.Module") == ["model", "optimizer", "scheduler"]


def test_a_module_that_fails_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    signatures.allow(["broken_by_hand", "needs_another"])
    (tmp_path / "broken_by_hand.py").write_text("class A(:\n")
    (tmp_path / "needs_another.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ConfigError, match=r"broken_by_hand.py:1: .*invalid syntax.*Correct the"):
        signatures.find_definition("broken_by_hand.A")
    with pytest.raises(
        ConfigError,
        match=r"another.py:1: .*Correct the import, or install the package nowhere_at_all",
    ):
        signatures.find_definition("needs_another.A")
