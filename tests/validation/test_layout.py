"""The layout of a run, and what the classes that a config names say of themselves."""

import sys
from pathlib import Path

import pytest
from hydra import compose

from armature.errors import ConfigError
from armature.layout import Layout
from armature.models.decoder.plan import PLAN
from armature.models.plan import plan_beside
from armature.validation import checks
from armature.validation.composing import composing

ROOT = Path(__file__).parents[2]
FILES = {
    "__init__.py": "from reexporting.net import Net\n",
    "net/__init__.py": "from .model import Net\n",
    "net/model.py": "from armature.models.decoder.model import Decoder\n\n\nclass Net(Decoder):\n  "
    "  pass\n",
    "net/plan.py": "from armature.models.decoder.plan import PLAN\n",
    "net/check.py": "def problems(arguments):\n"
    "    return ['model.width=48 is odd for Net'] if arguments['width'] == 48 else []\n",
    "images.py": "from lightning.pytorch import LightningModule\n\n\nclass Task(LightningModule):\n"
    "    modality = 'images'\n\n    def __init__(self, model, **o): ...\n",
    "average.py": "from armature.callbacks.ema import EMA\n\n\nclass Average(EMA):\n    pass\n",
}


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Checks a configuration whose model is re-exported by its package."""
    for name, text in FILES.items():
        (tmp_path / "reexporting" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "reexporting" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "_data_problems", lambda cfg, *, prepare: [])
    for name in [name for name in sys.modules if name.startswith("reexporting")]:
        del sys.modules[name]

    def check(*overrides: str):
        typed = [
            "model._target_=reexporting.Net",
            "launch.allowed_packages=[armature,torch,lightning.pytorch,reexporting]",
        ]
        with composing():
            return checks.check(
                compose("train", overrides=[*typed, "trainer.accelerator=cpu", *overrides])
            )

    return check


def test_the_plan_and_the_check_of_a_reexported_model_are_found(checked):
    cfg = checked("strategy=tensor", "trainer.devices=2")
    layout = Layout.of(cfg)
    assert (layout.plan, layout.world_size, layout.data_ranks) == (PLAN, 2, 1)
    from reexporting import Net  # pyright: ignore[reportMissingImports]

    assert plan_beside(Net.__module__) is layout.plan  # what the strategy finds
    with pytest.raises(ConfigError, match=r"model.width=48 is odd for Net"):
        checked("model.width=48")


def test_a_model_and_a_task_for_different_data_are_refused(checked):
    with pytest.raises(
        ConfigError, match=r"task=Task trains on images, but model=Net takes tokens. Type task="
    ):
        checked("task._target_=reexporting.images.Task")


def test_a_class_inherits_what_its_base_does_not_support(checked):
    overrides = ["+callbacks.mine._target_=reexporting.average.Average", "trainer.devices=2"]
    checked("strategy=deepspeed", *overrides)
    with pytest.raises(
        ConfigError, match=r"callbacks.mine=Average does not work with this strategy \(zero3\)"
    ):
        checked("strategy=deepspeed_zero3", *overrides)


def test_an_option_that_is_not_in_the_config_has_its_constructors_default():
    layout = Layout.resolve(
        {"_target_": "armature.strategies.mesh.MeshStrategy", "shard": 2}, world_size=2
    )
    assert layout.options["schedule"] == "1f1b"
    assert layout.options["stages"] is None
    assert Layout.resolve({"_target_": "mine.Strategy"}, world_size=2).kind == "other"
