"""Checks of one machine and of the launch: each fault is named, with what to type."""

import json
import os
import sys

import pytest
from omegaconf import OmegaConf

from armature.doctor import communication, environment, finding, run_directory
from armature.doctor.communication import Rate
from armature.doctor.examine import examine
from armature.launcher import lock
from tests import in_process
from tests.running import meet_a_full_disk


@pytest.fixture
def run():
    return OmegaConf.create({
        "trainer": {"devices": 4, "num_nodes": 2, "accelerator": "gpu", "max_steps": 100},
        "data": {"num_workers": 2},
        "run": {"root": "outputs", "name": None, "dir": None},
        "launch": {"rdzv_endpoint": None},
        "checkpoint": {"root": None, "keep_last": 2, "keep_best": 1, "keep_every_n_steps": None},
    })  # fmt: skip


def only(found):
    (each,) = list(found)
    return each


def name(rank):
    return f"rank {rank} on node{rank // 4}"


# ------------------------------------------------------------ report
def test_the_report_joins_equal_findings_and_the_exit_code_is_the_worst():
    same = [finding.ok("launch", "fine", where=host) for host in ("a", "b")]
    bad = finding.failure("environment", "broken", remedy="Type fix.")
    assert finding.exit_code(same) == 0
    assert finding.exit_code([*same, finding.warning("data", "slow", remedy="Type x.")]) == 1
    assert finding.exit_code([*same, bad]) == 2
    text = finding.as_text([*same, bad])
    assert "ok       fine [a, b]" in text
    assert text.index("environment") < text.index("launch")
    assert "→ Type fix." in text
    assert "1 failure, 0 warnings, 1 ok" in text
    assert json.loads(finding.as_json([bad]))["exit_code"] == 2


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("trainer.devcies=2", "Did you mean 'trainer.devices'?"),
        ("--deadline=nan", "type a number of seconds"),
    ],
)
def test_a_command_that_is_refused_is_json_too_on_the_first_rank(typed, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--json", typed])
    with pytest.raises(SystemExit) as ended:
        in_process.load("doctor").command()
    assert ended.value.code == 2
    shown = json.loads(capsys.readouterr().out)
    assert shown["exit_code"] == 2
    assert said in shown["findings"][0]["what"]
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--json", typed])
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        in_process.load("doctor").command()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("rank", "local"), [("abc", "0"), ("1", "1")])
def test_one_rank_of_each_machine_reports_what_ends_the_examination(
    run, tmp_path, monkeypatch, rank, local
):
    for key, value in {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(key, value)
    run.run.root, shown = str(tmp_path), []
    code = examine(run, deadlines={}, show=shown.extend)
    assert (code, bool(shown)) == ((2, True) if local == "0" else (0, False))
    if shown and rank == "abc":
        assert "RANK=abc: must be a number" in shown[0].what


def test_variables_of_another_job_are_named():
    assert only(environment.leftovers({"RANK": "0"})).remedy.endswith("type unset RANK")
    started = {"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    assert only(environment.leftovers(started)).level == "ok"


def rates(*, slow=lambda pair: False):
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    return [Rate("link", pair, 1e-5, 4e9 if slow(pair) else 2e10) for pair in pairs]


def judged(measured, hosts=("a", "a", "b", "b"), within=3e10, between=3e10):
    expected = {"within": within, "between": between}
    return list(communication.rate_findings(measured, hosts=hosts, name=name, expected=expected))


def test_a_slow_link_and_a_slow_kind_of_link_are_named():
    assert [each.level for each in judged(rates())] == ["ok", "ok"]
    link = judged(rates(slow=lambda pair: pair == (0, 2)))[1].what
    assert link == (
        "Links between machines: rank 0 on node0, rank 2 on node0: 20% of the others' bandwidth."
    )
    kind = judged(rates(), between=4e11)
    assert kind[1].what == "Links between machines: 20 GB/s, 10 µs; the hardware's give 400 GB/s."


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_left_behind(tmp_path, monkeypatch):
    root = tmp_path / "runs"
    assert only(run_directory.writable(str(root), key="run.root")).level == "ok"

    monkeypatch.setattr(run_directory.files.os, "fsync", meet_a_full_disk)
    found = only(run_directory.writable(str(root), key="run.root"))
    assert found.level == "failure"
    assert "No space left on device" in found.what
    assert not list(tmp_path.iterdir())


def test_another_run_in_the_run_directory_is_named(run, tmp_path):
    run.run = {"root": str(tmp_path), "name": "mine", "dir": str(tmp_path / "mine")}
    (tmp_path / "mine").mkdir()
    assert not list(run_directory.in_use(run))
    with lock.hold(run):
        held = only(run_directory.in_use(run))
    assert held.what.startswith(f"{tmp_path}/mine is in use by process {os.getpid()} on ")


def test_room_for_the_checkpoints_is_counted(run):
    for free, level in {10**7: "failure", 2 * 10**7: "warning", 10**8: "ok"}.items():
        assert run_directory.room(run, free=free, trained=10**6).level == level
    # adapters, with include_base
    whole = run_directory.room(run, free=10**7, trained=1000, frozen_bytes=10**8)
    assert whole.level == "failure"
    run.checkpoint.keep_every_n_steps = 10
    assert run_directory.room(run, free=10**7, trained=1).what.startswith("14 checkpoints of")
