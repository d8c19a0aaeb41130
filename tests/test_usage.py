"""What the command line tells a user.

`--help`, `--cfg job`, tab completion, and the project's name.
"""

import argparse
import os
import shutil
import subprocess
import sys

import pytest

import armature
from armature import cli
from armature.errors import ConfigError
from armature.project import CONFIGS
from armature.validation import usage
from tests import running
from tests.sampled import sampled


def ask(*words: str, cwd, **environment: str) -> str:
    return running.call("train.py", *words, cwd=cwd, **environment).stdout


def test_a_help_that_is_no_text_is_added_later(monkeypatch):
    """Hydra's has one, which Python 3.14 would read."""
    usual = argparse.ArgumentParser.add_argument
    monkeypatch.setattr(
        argparse.ArgumentParser,
        "add_argument",
        lambda self, *args, help="", **options: usual(self, *args, help=help.strip(), **options),
    )
    cli._Parser().add_argument("--other", help=usage)


def test_every_group_has_a_sentence_and_its_files():
    folders = {folder.name: folder for folder in CONFIGS.glob("[!.]*/")}
    assert set(usage.GROUPS) == set(folders)
    lines = usage.text().splitlines()
    assert len(lines) < 100
    assert max(map(len, lines)) <= 120
    words = set(" ".join(lines).split())
    for name, folder in folders.items():
        shipped = {path.stem for path in folder.glob("[!_]*.yaml")}
        assert {name, *shipped} <= words


def test_help_is_ours(tmp_path):
    printed = ask("--help", cwd=tmp_path)
    assert printed.rstrip("\n") == usage.text()
    assert "Hydra" in ask("--hydra-help", cwd=tmp_path)


@pytest.mark.parametrize(
    ("line", "expected"),
    sampled(
        [
            ("optimizer=adamw optimizer.w", {"optimizer.weight_decay="}),
            ("strategy=pi", {"strategy=pipeline"}),
            ("trainer.max_s", {"trainer.max_steps="}),
        ],
        1,
    ),
)
def test_tab_completes_options_and_keys(line, expected, tmp_path):
    line = f"python train.py {line}"
    found = ask("-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
    assert expected <= set(found.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_tab_runs_no_file_that_is_not_hydras(tmp_path):
    (tmp_path / "ddp.py").write_text("open('ran', 'w')\n")
    (tmp_path / "install.sh").write_text(ask("-sc", "install=bash", cwd=tmp_path))
    typed = "python ddp.py o"
    press = (
        f"source ./install.sh; COMP_LINE={typed!r} COMP_POINT={len(typed)} COMP_CWORD=2 "
        "hydra_bash_completion"
    )
    subprocess.run(
        ["bash", "-c", press], cwd=tmp_path, env=running.environment(), timeout=60, check=False
    )
    assert not (tmp_path / "ran").exists()


def test_the_projects_name_reaches_the_loggers():
    cfg = armature.compose("logger=wandb", "logger.wandb.offline=true", "project.name=whales")
    assert cfg.logger.wandb.project == "whales"
    with pytest.raises(ConfigError, match=r"project.name=my project: must be letters"):
        armature.compose("project.name=my project")


def test_every_script_reads_dotenv(tmp_path, monkeypatch):
    (tmp_path / ".env").write_text("ARMATURE_TOKEN_OF_A_TEST=abc\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setenv("ARMATURE_TOKEN_OF_A_TEST", "")
    monkeypatch.delenv("ARMATURE_TOKEN_OF_A_TEST")  # is restored as it was: not there
    cli.parse_arguments(argparse.ArgumentParser())
    assert os.environ["ARMATURE_TOKEN_OF_A_TEST"] == "abc"


def test_a_key_with_several_values_is_named():
    typed = ["seed=0,1", "callbacks=ema", "+seed=2,3", "optimizer.lr=1", "optimizer.lr=1"]
    assert usage.repeated(typed) == ["seed has 2 values here: the last one counts."]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("split=test", ["split=test: here it is an option. Type --split test."]),
        ("best=true", ["best=true: here it is an option. Type --best."]),
        (
            "ckpt_path=a/b",
            ["ckpt_path=a/b: type the path alone, in the place of the run directory."],
        ),
        ("data.path=a", []),
        ("seed=3", []),
        ("out=a.csv", []),
    ],
)
def test_a_key_that_is_an_option_of_the_script_is_named(typed, expected):
    options = {"split": "test", "best": False, "seed": 0, "out": None, "path": "x"}
    assert usage.option_problems([typed], options) == expected
