"""The run directory holds what is needed to go on, and nothing of the environment."""

import os
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from armature import run_dir
from armature.checkpoint import directory, resume
from armature.config import NEEDED
from armature.errors import ConfigError, NotSaved
from tests.running import meet_a_full_disk


def config(root, **extra):
    base = {
        "run": {"root": str(root), "name": None, "dir": None, "group": None},
        "launch": {"rdzv_endpoint": None},
        "resume": "auto",
        "seed": 0,
    }
    return OmegaConf.create({**base, **extra})


def decided(root, *, trial=None, **extra):
    """Return a configuration whose run has its name and directory."""
    return run_dir.decide(config(root, **extra), label="x", trial=trial)


@pytest.fixture(autouse=True)
def _outside_slurm(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def test_config_comes_back_as_it_was_written(tmp_path):
    cfg = decided(tmp_path, a={"b": 1, "c": "${a.b}"})
    directory = run_dir.write(cfg, ["a.b=1"])
    back = run_dir.read(directory)
    assert (back.a.b, back.a.c) == (1, 1)
    assert (directory / "overrides.txt").read_text() == "a.b=1\n"


def test_an_older_config_gets_the_defaults_of_the_keys_it_lacks(tmp_path):
    lines = [
        "trainer: {max_steps: 7}",
        "run: {name: old}",
    ]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    cfg = run_dir.read(tmp_path)
    assert (cfg.trainer.max_steps, cfg.trainer.profile, cfg.run.root, cfg.resume) == (
        7,
        False,
        "outputs",
        "auto",
    )
    assert (cfg.launch.grace_seconds, cfg.checkpoint.mode) == (8, "min")


def test_machines_that_meet_by_themselves_need_a_name(tmp_path):
    cfg = config(tmp_path, launch={"rdzv_endpoint": "10.0.0.1:29500"})
    with pytest.raises(ConfigError, match=r"Type run\.name=NAME, the same on each"):
        run_dir.decide(cfg, label="x")
    cfg.run.name = "mine"
    assert run_dir.decide(cfg, label="x").run.dir == str(tmp_path / "mine")


def test_unnamed_runs_never_share_a_directory(tmp_path):
    names = set()
    for _ in range(3):
        cfg = run_dir.decide(config(tmp_path), label="digits")
        run_dir.write(cfg, [])
        names.add(cfg.run.name)
    assert len(names) == 3
    assert all(name.startswith("digits-") for name in names)


def test_slurm_jobs_are_named_by_their_id(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert decided(tmp_path).run.name == "17"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert decided(tmp_path).run.name == "16_3"


def test_never_refuses_a_directory_that_holds_a_run(tmp_path):
    cfg = config(tmp_path)
    cfg.run.name, cfg.resume = "mine", "never"
    cfg = run_dir.decide(cfg, label="x")
    (run_dir.write(cfg, []) / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="holds a run already"):
        run_dir.write(cfg, [])


def test_a_home_is_expanded_as_a_shell_does_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = decided("~/runs", checkpoint={"root": "~/kept"})
    assert cfg.run.dir.startswith(f"{tmp_path}/runs/")
    assert cfg.checkpoint.root == f"{tmp_path}/kept"
    assert resume.to_path("~/x.ckpt") == tmp_path / "x.ckpt"


def test_the_folder_of_checkpoints_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = decided("outputs", checkpoint={"root": "elsewhere"}, trial="mine")
    assert resume.folder(Path("outputs/mine"), cfg) == tmp_path / "elsewhere" / "mine"
    monkeypatch.setenv("MARKER", "s3cr3t")
    cfg = decided("outputs", checkpoint={"root": "${oc.env:MARKER}/runs"}, trial="mine")
    assert OmegaConf.to_container(cfg)["checkpoint"] == {
        "root": f"{tmp_path}/${{oc.env:MARKER}}/runs"
    }  # not resolved
    for root in ("s3://bucket/runs", "/scratch/runs", None):
        assert decided("outputs", checkpoint={"root": root}, trial="mine").checkpoint.root == root


def checkpoint_at(path):
    path.mkdir(parents=True)
    for name in (names := [directory.META, directory.TENSOR_INDEX]):
        (path / name).touch()
    directory.write_manifest(path, directory.describe(path, names), {})
    return path


def test_the_pointer_names_the_checkpoint(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    only = checkpoint_at(checkpoints / "step=000002")
    (checkpoints / "last").write_text("step=000002\n")
    assert resume.last_checkpoint(tmp_path) == resume.last_checkpoint(only) == only
    (checkpoints / "last").write_text("step=000004\n")
    assert resume.last_checkpoint(tmp_path) == only  # what it names is gone
    (only / "manifest.json").unlink()
    assert resume.last_checkpoint(tmp_path) is None  # half-written


@pytest.mark.parametrize("name", ["x.ckpt", "x.pt", "x.pth", "x.safetensors"])
def test_a_file_of_lightnings_can_be_resumed_from_whatever_its_name(tmp_path, name):
    (tmp_path / name).touch()
    cfg = config(tmp_path, resume=str(tmp_path / name), checkpoint={"root": None, "trust": False})
    assert bool(resume.problems(cfg)) == (name == "x.safetensors")


def test_a_path_that_a_run_with_checkpoints_would_not_begin_with_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "outputs/mine"
    other = checkpoint_at(tmp_path / "other/checkpoints/step=000050")

    def start(path):
        cfg = config("outputs", resume=str(path), checkpoint={"root": None, "trust": False})
        cfg.run.name = "mine"
        groups = {name: {"_target_": "x"} for name in NEEDED if name not in cfg}
        return run_dir.write(
            run_dir.decide(OmegaConf.merge(cfg, groups), label="x"), [f"resume={path}"]
        )

    start(other)
    first, last = (
        checkpoint_at(mine / "checkpoints" / name) for name in ("step=000060", "step=000070")
    )
    start("other/checkpoints/step=000050")  # as a requeue, and in another spelling
    for own in (mine, last, "auto"):
        start(own)
    for unused in (first, tmp_path / "other"):
        with pytest.raises(
            ConfigError,
            match=rf"resume={unused}: .*mine has checkpoints .* from .*step=000070, not .*name",
        ):
            start(unused)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start(first)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    monkeypatch.setenv("ARMATURE_ATTEMPT", "1")
    start(first)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_scratch(tmp_path, mode):
    cfg = decided(tmp_path, resume=mode, checkpoint={"root": None})
    (tmp_path / cfg.run.name / "checkpoints" / "step=000002").mkdir(parents=True)
    with pytest.raises(ConfigError, match="None of the run's checkpoints is complete"):
        run_dir.write(cfg, [])


def test_every_start_of_a_run_has_the_same_id(tmp_path):
    cfg = decided(tmp_path)
    run_dir.write(cfg, [])
    first = run_dir.read(tmp_path / cfg.run.name).run.id
    cfg.run.id = None
    run_dir.write(cfg, [])
    assert first
    assert run_dir.read(tmp_path / cfg.run.name).run.id == first


@pytest.mark.guarantee
@pytest.mark.parametrize("saved", [False, True])
def test_a_refused_start_leaves_the_settings_of_the_last_checkpoint(tmp_path, saved):
    cfg = decided(tmp_path, task={"width": 1})
    folder = run_dir.write(cfg, ["a"])
    files = folder / "config.yaml", folder / "overrides.txt"
    before = [file.read_text() for file in files]
    cfg.task.width = 2
    run_dir.write(cfg, ["b"])
    if saved:
        checkpoint_at(folder / "checkpoints" / "step=000001")
    run_dir.release(cfg)
    assert ([file.read_text() for file in files] == before) != saved


def test_the_state_of_the_code_and_the_sweep_s_name_are_written(tmp_path, monkeypatch):
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.setattr(run_dir.project, "ROOT", code)
    run_dir.git.cache_clear()  # an earlier test has asked
    cfg = decided(tmp_path, trial="lr/3")
    run = OmegaConf.load(run_dir.write(cfg, []) / "config.yaml").run
    assert run.git is None  # not a repository
    run_dir.git.cache_clear()
    assert run.group == "lr"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (code / "file").write_text("before")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Begin"]):
        subprocess.run([*git, *command], cwd=code, check=True)
    state = run_dir.git()
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (code / "file").write_text("after")
    assert run_dir.git() == state  # asked once
    run_dir.git.cache_clear()
    assert run_dir.git() == {**state, "dirty": True}
    run_dir.git.cache_clear()


def test_a_full_disk_is_named_at_the_start_and_at_the_end(tmp_path, monkeypatch):
    cfg = decided(tmp_path)
    monkeypatch.setattr(run_dir.files, "replace", meet_a_full_disk)
    with pytest.raises(
        ConfigError, match=r"run\.root=.* cannot be written \(No space left on device\)\. Make room"
    ):
        run_dir.write(cfg, [])
    with pytest.raises(NotSaved, match=r"summary\.json could not be written"):
        run_dir.write_summary(Path(cfg.run.dir), {})
