"""Checks of one machine and of the launch: each fault is named, with what to type."""

import errno
import json
import os
import socket
import sys

import pytest
import torch
from omegaconf import OmegaConf

from armature.doctor import (
    communication,
    environment,
    finding,
    launch,
    replicas,
    run_directory,
    session,
)
from armature.doctor.communication import Link
from armature.doctor.examine import examine
from armature.launcher import lock
from tests import in_process


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


def test_a_check_that_raises_is_a_failure_and_the_others_count():
    def broken():
        yield finding.ok("launch", "first")
        raise PermissionError("/proc cannot be read")

    found = finding.gathered("launch", broken, lambda: [finding.ok("launch", "second")])
    assert [each.level for each in found] == ["ok", "failure", "ok"]
    assert found[1].what == "The check broken could not look: /proc cannot be read."


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


def test_a_build_without_cuda_and_hidden_gpus_are_named(run, monkeypatch):
    monkeypatch.setattr(environment.hardware, "gpu_count", lambda: 2)
    monkeypatch.setattr(environment, "_installed", lambda name: "2.13.0+cpu")
    found = list(environment.gpus(run, {"CUDA_VISIBLE_DEVICES": "0,1"}))
    assert found[0].what == "torch 2.13.0+cpu was built without CUDA, but trainer.accelerator=gpu."
    assert found[1].what == "trainer.devices=4, but CUDA_VISIBLE_DEVICES=0,1 shows 2 GPUs."
    monkeypatch.setattr(environment.hardware, "gpu_count", lambda: 1)
    bound = list(environment.gpus(run, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}))[1]
    assert bound.remedy.startswith(
        "Each task must see all GPUs of its node: remove --gpus-per-task"
    )


def test_ranks_that_disagree_with_devices_are_named(run):
    environ = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    found = only(launch.world_size(run, environ))
    assert "asks for 8 ranks, but the launcher started 4" in found.what
    assert "trainer.devices=2 trainer.num_nodes=2" in found.remedy


@pytest.mark.parametrize(("rank", "local"), [("abc", "0"), ("", "0"), ("4", "0"), ("1", "1")])
def test_one_rank_of_each_machine_reports_what_ends_the_examination(
    run, tmp_path, monkeypatch, rank, local
):
    for key, value in {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(key, value)
    run.run.root, shown = str(tmp_path), []
    code = examine(run, deadlines={}, show=shown.extend)
    assert (code, bool(shown)) == ((2, True) if local == "0" else (0, False))
    if rank == "abc":
        assert any(each.what == "RANK=abc: no number." for each in shown)


def test_an_address_of_another_machine_is_named():
    found = only(launch.port_findings("192.0.2.1", 29500))  # of no machine (RFC 5737)
    assert "is no address of" in found.what


def test_a_port_that_is_taken_is_named_with_who_took_it():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = only(launch.port_findings("127.0.0.1", port))
    assert found.what.startswith(f"MASTER_PORT={port} is taken")
    assert f"process {os.getpid()}" in found.what
    assert "export MASTER_PORT=" in found.remedy
    assert (
        "rank 0 has not started there"
        in only(launch.answer_findings("127.0.0.1", port, rank=1)).what
    )


def test_what_must_be_equal_on_all_ranks_is_named_with_its_ranks():
    everyones = [
        {"torch": "2.13.0" if rank < 4 else "2.12.1", "Python": "3.11"} for rank in range(8)
    ]
    found = only(session.differences(everyones, name=name))
    assert (
        found.what
        == "torch differs between the ranks: 2.13.0 on rank 0 on node0, 2.12.1 on rank 4 on node1."
    )


def links(*, slow=lambda link: False):
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    return [Link(a, b, 1e-5, 4e9 if slow((a, b)) else 2e10) for a, b in pairs]


def judged(measured, hosts=("a", "a", "b", "b"), within=3e10, between=3e10):
    expected = {"within": within, "between": between}
    return list(communication.link_findings(measured, hosts=hosts, name=name, expected=expected))


def test_a_slow_link_a_slow_rank_and_a_slow_kind_of_link_are_named():
    assert [each.level for each in judged(links())] == ["ok", "ok"]
    link = judged(links(slow=lambda pair: pair == (0, 2)))
    assert (
        "The link between rank 0 on node0 and rank 2 on node0 has 20% of the others' bandwidth"
        in link[1].what
    )
    rank = judged(links(slow=lambda pair: 3 in pair), hosts=("a", "b", "c", "d"))
    assert only(rank).what == "All links of rank 3 on node0 have 20% of the others' bandwidth."
    kind = judged(links(), between=4e11)
    assert kind[1].what == "Links between machines: 20 GB/s, 10 µs; the hardware's give 400 GB/s."


# ------------------------------------------------------------ replicas
def test_a_fingerprint_sees_one_bit_and_an_exchange():
    one = torch.arange(7, dtype=torch.float32)
    other = one.clone()
    assert replicas.fingerprint(one) == replicas.fingerprint(other)
    other[[2, 5]] = other[[5, 2]]
    assert replicas.fingerprint(one) != replicas.fingerprint(other)
    assert replicas.fingerprint(torch.tensor(0.0)) != replicas.fingerprint(torch.tensor(-0.0))
    assert replicas.fingerprint(one.bfloat16()) == replicas.fingerprint(one.bfloat16())


def test_the_first_parameter_that_differs_is_named_with_its_ranks():
    prints = [
        {"a": ((), "1"), "b": ((), "1" if rank != 2 else "2"), "c": ((rank % 2,), str(rank % 2))}
        for rank in range(4)
    ]
    found = only(replicas.difference("gradient", prints, name=name))
    assert found.what == "The gradient of b differs between replicas: ranks 0, 1, 3 from rank 2."
    assert not list(
        replicas.difference(
            "gradient", [{"c": ((rank,), str(rank))} for rank in range(2)], name=name
        )
    )


def test_different_data_on_equal_ranks_and_the_same_data_on_others_are_named():
    assert not list(replicas.batch_findings([(0, "a"), (0, "a"), (1, "b"), (1, "b")]))
    different = only(replicas.batch_findings([(0, "a"), (0, "x"), (1, "b"), (1, "b")]))
    assert different.what.startswith("rank 0 and rank 1 must train on the same samples")
    same = only(replicas.batch_findings([(0, "a"), (1, "a")]))
    assert same.what.startswith("rank 0 and rank 1 train on the same samples")


# ------------------------------------------------------------ run directory
def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_directory.os, "fsync", full)
    found = only(run_directory.folder(tmp_path / "runs", key="run.root"))
    assert found.what == f"run.root={tmp_path / 'runs'}: its disk or your quota is full."
    assert not list(tmp_path.iterdir())


def test_another_run_in_the_run_directory_is_named(run, tmp_path):
    run.run = {"root": str(tmp_path), "name": "mine", "dir": str(tmp_path / "mine")}
    (tmp_path / "mine").mkdir()
    assert not list(run_directory.in_use(run))
    with lock.hold(run):
        held = only(run_directory.in_use(run))
    assert held.what.startswith(f"{tmp_path}/mine is in use by process {os.getpid()} on ")


def test_room_for_the_checkpoints_is_counted(run):
    levels = [
        only(run_directory.room(run, free=free, trained=10**6)).level
        for free in (10**7, 2 * 10**7, 10**8)
    ]
    assert levels == ["failure", "warning", "ok"]
    whole = only(
        run_directory.room(run, free=10**7, trained=1000, frozen_bytes=10**8)
    )  # adapters, with include_base
    assert whole.level == "failure"
    assert "1,000 trained parameters with AdamW's state, and 95.4 MiB of others" in whole.what
    assert only(run_directory.room(run, free=10**7, trained=1000)).level == "ok"
    run.checkpoint.keep_every_n_steps = 10
    assert run_directory.kept_checkpoints(run) == 14
