"""Damaged run directories: each command that reads one works without the file, or names it and what
to type.
"""

import json
import os
import shutil
import time
import zlib
from pathlib import Path

import pytest
import torch

import armature
from armature.checkpoint import storage
from armature.errors import ConfigError
from tests import in_process, running
from tests.sampled import sampled

NEWEST = "checkpoints/step=000004"
WITHIN = 10  # seconds


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    running.train(
        "trainer.max_steps=4",
        "checkpoint.every_n_steps=2",
        "checkpoint.keep_last=3",
        "run.name=a",
        cwd=folder,
        corpus=running.write_corpus(folder / "c"),
        ARMATURE_CACHE=str(folder / "cache"),
    )
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained / "outputs" / "a", tmp_path / "a"))


# ---------------------------------------------------------------- what happens to a directory
def write(name: str, content: bytes):
    def damage(run: Path) -> None:
        remove(name)(run)
        (run / name).write_bytes(content)

    return damage


def remove(name: str):
    def damage(run: Path) -> None:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)

    return damage


def folder(name: str):
    def damage(run: Path) -> None:
        remove(name)(run)
        (run / name).mkdir()

    return damage


def pipe(name: str):
    """Something whose reading never ends."""

    def damage(run: Path) -> None:
        remove(name)(run)
        os.mkfifo(run / name)

    return damage


def half(name: str):
    return lambda run: os.truncate(run / name, (run / name).stat().st_size // 2)


def half_a_config(run: Path) -> None:
    """Cut config.yaml, and open a bracket, so that it is no YAML: the half may be readable."""
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"{text[: len(text) // 2]}\n{{")


def of_each_checkpoint(name: str):
    return lambda run: [(folder / name).unlink() for folder in run.glob("checkpoints/step=*")]


def manifest(**changes):
    def damage(run: Path) -> None:
        file = run / NEWEST / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def meta(change):
    """Another content of the only meta.pt, for which its manifest vouches."""

    def damage(run: Path) -> None:
        file = run / NEWEST / "meta.pt"
        torch.save(change(torch.load(file, weights_only=True)), file)
        entry = {
            "bytes": file.stat().st_size,
            "crc32": zlib.crc32(file.read_bytes()),
        }
        manifest(
            files=json.loads((run / NEWEST / "manifest.json").read_text())["files"]
            | {"meta.pt": entry}
        )(run)
        remove("checkpoints/step=000002")(run)

    return damage


# ---------------------------------------------------------------- commands
def command(script: str, *arguments: object) -> tuple[int, str]:
    """Run a script in this process; return its exit code and output.

    What is no message fails the test.
    """
    begun = time.monotonic()
    ended = in_process.call(script, *arguments)
    assert time.monotonic() - begun < WITHIN
    return ended


JUNK = {"empty": b"", "NUL": bytes(300), "no text": b"\xff\xfe\x80"}
READABLE = {
    "last empty": write("checkpoints/last", b""),
    "last of NUL": write("checkpoints/last", bytes(300)),
    "last elsewhere": write("checkpoints/last", b"../../etc"),
    "last gone": remove("checkpoints/last"),
    "last a folder": folder("checkpoints/last"),
    "last a pipe": pipe("checkpoints/last"),
    "a file as a step": write("checkpoints/step=000099", b"x"),
    "an empty step": folder("checkpoints/step=000099"),
    "a step of another digit": folder("checkpoints/step=²"),
    "the newest a file": write(NEWEST, b"x"),
    **{
        f"manifest {name}": write(f"{NEWEST}/manifest.json", content)
        for name, content in JUNK.items()
    },
    "manifest a folder": folder(f"{NEWEST}/manifest.json"),
    "manifest a pipe": pipe(f"{NEWEST}/manifest.json"),
    "manifest without files": manifest(files={}),
    "manifest of numbers": manifest(files={"meta.pt": 5}),
    "manifest without sizes": manifest(files={"meta.pt": {}, ".metadata": {}}),
    "manifest of a device": manifest(files={"/dev/zero": {"bytes": 0, "crc32": 1}}),
    "manifest of another version": manifest(format=9),
    "meta.pt empty": write(f"{NEWEST}/meta.pt", b""),
    "meta.pt a pipe": pipe(f"{NEWEST}/meta.pt"),
    ".metadata gone": remove(f"{NEWEST}/.metadata"),
    "a shard gone": remove(f"{NEWEST}/__0_0.distcp"),
    "half a shard": half(f"{NEWEST}/__0_0.distcp"),
    "a shard a folder": folder(f"{NEWEST}/__0_0.distcp"),
}
REFUSED = {
    **{
        f"config.yaml {name}": (write("config.yaml", content), "config.yaml is damaged")
        for name, content in {"a list": b"[1]", **JUNK}.items()
    },
    "a few lines of config.yaml": (
        write("config.yaml", b"run:\n  name: a\n"),
        "is damaged .it holds no task, model",
    ),
    "half a config.yaml": (half_a_config, "config.yaml is damaged"),
    "config.yaml gone": (remove("config.yaml"), "no config.yaml"),
    "config.yaml a pipe": (pipe("config.yaml"), "no config.yaml"),
    "all manifests gone": (
        of_each_checkpoint("manifest.json"),
        "it holds no readable manifest.json",
    ),
    "no checkpoints": (remove("checkpoints"), "no complete checkpoint"),
    "checkpoints a file": (write("checkpoints", b"x"), "no complete checkpoint"),
    "meta.pt a list": (meta(lambda _: [1, 2]), "it holds a list, not a checkpoint's entries"),
}


@pytest.mark.parametrize("damage", sampled(READABLE.values(), 3, guarantee=True), ids=READABLE)
def test_what_other_files_make_up_for_is_read(damage, run, tmp_path):
    damage(run)
    assert isinstance(armature.load(run), torch.nn.Module)
    code, shown = command("convert", run, tmp_path / "x.safetensors")
    assert (code, "tensors" in shown) == (0, True), shown


NO_ENTRIES = "it holds a list, not a checkpoint's entries"
CHECKPOINT_IS_ENOUGH = ("no config.yaml", "is damaged .it holds no task, model")


@pytest.mark.parametrize(
    ("damage", "message"), sampled(REFUSED.values(), 6, guarantee=True), ids=REFUSED
)
def test_what_nothing_makes_up_for_is_named(damage, message, run, tmp_path):
    damage(run)
    with pytest.raises(ConfigError, match=message):
        armature.load(run)
    for script, *arguments in (
        ("evaluate",),
        ("generate",),
        ("predict", "out=p.csv"),
        ("convert", tmp_path / "x.ckpt"),
    ):
        code, shown = command(script, run, *arguments)
        if script == "predict" and message == NO_ENTRIES:  # the task is built before
            assert (code, "has neither predict_step" in shown) == (2, True), shown
        elif script == "convert" and message in CHECKPOINT_IS_ENOUGH:
            assert (code, "tensors" in shown) == (0, True), shown
        else:
            assert (code, str(run) in shown) == (2, True), f"{script}: {shown}"


@pytest.mark.parametrize(
    "content", sampled([*JUNK.values(), b"{}"], 2, guarantee=True), ids=[*JUNK, "an object"]
)
def test_a_damaged_tokenizer_is_named(content, run):
    write("tokenizer.json", content)(run)
    code, shown = command("generate", run)
    assert (code, "tokenizer.json is damaged" in shown) == (2, True), shown


RESUMED = {
    "metrics.csv of NUL": (write("metrics.csv", bytes(300)), "resuming from"),
    "metrics.csv gone": (remove("metrics.csv"), "resuming from"),
    "summary.json and overrides.txt": (
        lambda run: [write(name, b"\xff\xfe")(run) for name in ("summary.json", "overrides.txt")],
        "resuming from",
    ),
    "meta.pt empty": (write(f"{NEWEST}/meta.pt", b""), "step=000004 is skipped"),
    "config.yaml empty": (write("config.yaml", b""), "config.yaml is damaged"),
}


@pytest.mark.parametrize(
    ("damage", "message"), sampled(RESUMED.values(), 3, guarantee=True), ids=RESUMED
)
def test_a_resume_goes_on_or_names_the_file(damage, message, run, trained, tmp_path):
    damage(run)
    done = running.train(
        "trainer.max_steps=5",
        "run.name=a",
        f"run.root={tmp_path}",
        cwd=tmp_path,
        corpus=trained / "c" / "*.txt",
        code=2 if "config.yaml" in message else 0,
        ARMATURE_CACHE=str(trained / "cache"),
    )
    assert "Traceback" not in done.stderr
    assert message in done.stderr


@pytest.mark.parametrize("name", ["checkpoints", "config.yaml"])
def test_a_path_in_a_run_that_is_no_checkpoint_names_the_run(name, run):
    code, shown = command("evaluate", run / name)
    assert (code, f"no complete checkpoint. Name the run, {run}, or a step=" in shown) == (
        2,
        True,
    ), shown


def test_checkpoints_that_a_run_removes_while_they_are_compared_are_looked_for_again(run):
    newest = run / NEWEST
    lists = iter([[newest.with_name("step=000099")], [newest], [newest]])
    found = storage.intact_beside_training(lambda: next(lists))
    assert found == newest
