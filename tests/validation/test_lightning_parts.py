"""What Lightning has and a run cannot use is refused by name; modules get what their constructors
take.
"""

import pytest
from hydra import compose
from omegaconf import open_dict

from armature.errors import ConfigError
from armature.layout import Layout
from armature.validation import checks, lightning_parts, signatures
from armature.validation.composing import composing

USERS = "tests.validation.users"
ALLOWED = "launch.allowed_packages=[armature,torch,lightning.pytorch,tests]"


def composed(*overrides):
    signatures.allow(["tests"])
    with composing():
        return compose("train", overrides=[ALLOWED, *overrides])


def test_a_logger_whose_package_is_missing_says_what_to_install(monkeypatch):
    usual = lightning_parts.importlib.util.find_spec
    monkeypatch.setattr(
        lightning_parts.importlib.util,
        "find_spec",
        lambda name: None if "ml" in name else usual(name),
    )
    problems = lightning_parts.package_problems(composed("logger=[csv,mlflow,comet]"))
    assert problems == [
        "logger.mlflow: mlflow is not installed. Type pip install mlflow, or another logger.",
        "logger.comet: comet_ml is not installed. Type pip install comet-ml, or another logger.",
    ]


def test_an_upload_of_files_that_nothing_saves_is_refused(monkeypatch):
    monkeypatch.setattr(lightning_parts.importlib.util, "find_spec", lambda name: name)
    words = ["logger=wandb", "logger.wandb.log_model=all"]
    (problem,) = lightning_parts.package_problems(composed(*words))
    assert problem.startswith(
        "logger.wandb.log_model=all: it uploads the files of Lightning's ModelCheckpoint"
    )
    assert lightning_parts.package_problems(composed("logger=wandb")) == []
    files = "+callbacks.files._target_=lightning.pytorch.callbacks.ModelCheckpoint"
    assert lightning_parts.package_problems(composed(*words, files)) == []


def test_a_module_that_builds_its_own_model_is_not_held_to_the_unused_one(caplog):
    typed = ["model.width=100", "model.heads=3", "~task.preview_prompt", "~task.preview_tokens"]
    own = composed(f"task._target_={USERS}.Plain", *typed, "~task.preview_temperature")
    lightning_parts.warn_of_unused_groups(own)
    assert "does not take the groups model, optimizer, scheduler: they are not used" in caplog.text
    assert Layout.of(checks.decide(own)).plan is None
    assert checks._model_problems(own) == []
    with pytest.raises(ConfigError, match="heads"):
        checks.check(composed(*typed[:2]), prepare=False)


def test_a_key_of_the_task_in_a_group_that_it_does_not_take_is_refused():
    cfg = composed()
    with open_dict(cfg):
        cfg.task, cfg.model.hidden = {"_target_": f"{USERS}.Ignores", "hidden": 8}, 64
    (problem,) = lightning_parts.misplaced_problems(cfg)
    assert problem.startswith("model.hidden: tests.validation.users.Ignores does not take the")
    assert problem.endswith("In the experiment, write hidden below task: instead of below model:.")
    with pytest.raises(ConfigError, match=r"^model\.hidden: "):
        checks.check(cfg, prepare=False)


def test_a_typed_key_of_a_group_that_the_task_does_not_use_is_refused():
    cfg = composed()
    with open_dict(cfg):
        cfg.task = {
            "_target_": f"{USERS}.Template",
            "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.1},
        }
    typed = ["optimizer=sgd", "optimizer.lr=0.2", "scheduler.warmup=0", "model.net=2"]
    problems = lightning_parts.unused_problems(cfg, typed)
    assert [each.partition("group ")[2] for each in problems] == [
        "optimizer. Type task.optimizer.lr=0.2.",
        "model. Type +task.net=2.",
    ]
    with open_dict(cfg):
        cfg.task.optimizer.lr = "${optimizer.lr}"  # then what is typed reaches it
    assert lightning_parts.unused_problems(cfg, ["optimizer.lr=0.2"]) == []


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("LoadsItself", "(train_dataloader, val_dataloader)"), ("LoadsAsWell", "(train_dataloader, "
                                                                               "val_dataloader)"),
        ("AddsToOurs", None),
    ],
)  # fmt: skip
def test_a_data_module_of_ours_with_loaders_of_its_own_is_refused(name, own):
    found = checks._loader_problems(composed(f"data._target_={USERS}.{name}"))
    if own is None:
        assert found == []
    else:
        (problem,) = found
        assert f"{name} has loaders of its own {own}" in problem
        assert "derive the class from LightningDataModule" in problem
