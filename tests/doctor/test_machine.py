"""Checks of one machine and of the launch: each fault is named, with what to type."""

import errno
import json
import os
import socket
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from armature.doctor import (
    communication,
    environment,
    finding,
    launch,
    order,
    replicas,
    run_directory,
    session,
    training,
)
from armature.doctor.communication import AxisGroup, Link
from armature.doctor.examine import examine
from armature.launcher import lock
from armature.planner import devices
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
    "typed", ["--deadline=nan", "--deadline=inf", "--deadline=-1", "--step-seconds=x"]
)
def test_a_deadline_that_is_no_time_is_refused(typed, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor.py", typed])
    with pytest.raises(SystemExit) as ended:
        in_process.load("doctor").take_options()
    assert ended.value.code == 2
    assert f"{typed}: type a number of seconds" in capsys.readouterr().err


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


# ------------------------------------------------------------ environment
def test_a_version_outside_of_the_requirements_is_named():
    found = list(environment.versions(["torch>=2.11,<2.14", "psutil>=7"], {"torch": "2.15.0"}.get))
    assert [each.level for each in found] == ["failure", "failure"]
    assert found[0].what == "torch 2.15.0 is installed, but this project needs <2.14,>=2.11."
    assert found[1].what == "psutil is not installed."


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


def test_a_driver_that_is_too_old_is_named(run, monkeypatch):
    monkeypatch.setattr(environment.hardware, "gpu_count", lambda: 4)
    monkeypatch.setattr(environment, "_installed", lambda name: "2.13.0+cu130")
    monkeypatch.setattr(environment.hardware, "cuda_driver_version", lambda: (12, 2))
    found = [each for each in environment.gpus(run, {}) if each.level == "failure"]
    assert "was built for CUDA 13.0, but the driver supports up to 12.2" in only(found).what


def test_limits_that_are_too_small_are_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        environment.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 64 * 2**20})()
    )
    assert "64 MiB free" in only(environment.shared_memory(run, tmp_path)).what
    assert only(environment.open_files(run, 1024)).remedy.startswith("Type ulimit -n 65536")
    few = only(environment.memory(run, {"the machine": 2**40, "Slurm (--mem)": 2**32}))
    assert few.what.startswith(
        "Slurm (--mem) allows 4.0 GiB; 4 ranks with 2 loader workers each need"
    )
    assert only(environment.threads(run, {}, cpus=2)).level == "warning"
    many = only(environment.threads(run, {"OMP_NUM_THREADS": "16"}, cpus=16))
    assert many.remedy == "Type export OMP_NUM_THREADS=4."


def test_limits_of_the_groups_around_this_one_count(tmp_path):
    own, group = tmp_path / "self", tmp_path / "slurm" / "job_7" / "step_0" / "task_3"
    group.mkdir(parents=True)
    own.write_text("0::/slurm/job_7/step_0/task_3\n")
    (group / "memory.max").write_text("max\n")
    (group / "cpu.max").write_text("max 100000\n")
    (group.parents[1] / "memory.max").write_text(f"{2**30}\n")
    (group.parents[1] / "cpu.max").write_text("150000 100000\n")
    environ = {"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "4"}
    limits = environment.memory_limits(tmp_path, own, environ)
    assert limits.pop("the machine") > 2**30
    assert limits == {
        "the container's or job's cgroup": 2**30,
        "Slurm (--mem-per-cpu)": 400 * 2**20,
    }
    assert environment.cpu_quota(tmp_path, own) == 1.5
    assert environment.cpu_quota(tmp_path / "none", own) == float("inf")


def test_a_leftover_build_lock_is_named(run, tmp_path):
    lock = tmp_path / "py311_cpu" / "comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    old = time.time() - 3600
    for path in (lock, lock.parent):
        os.utime(path, (old, old))
    run.strategy = {"_target_": "armature.strategies.ddp.DDP"}
    run.model = run.task = {"_target_": "torch.nn.Linear"}
    assert only(environment.extension_locks(run, tmp_path)).remedy == f"Type rm {lock}"


# ------------------------------------------------------------ launch
def test_variables_of_a_job_that_has_ended_are_named():
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1000"}
    assert only(launch.leftovers(environ)).what.startswith(
        "SLURM_JOB_ID=7: this job should have ended already"
    )
    assert not list(
        launch.leftovers({**environ, "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)})
    )


def test_variables_of_another_job_are_named():
    found = only(launch.leftovers({"RANK": "0", "WORLD_SIZE": "8"}))
    assert "takes itself for rank 0" in found.what
    assert found.remedy.endswith("type unset RANK WORLD_SIZE")
    assert not list(
        launch.leftovers({"RANK": "0", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"})
    )
    assert (
        only(launch.leftovers({"ARMATURE_STORE": "/tmp/x"})).remedy == "Type unset ARMATURE_STORE"
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
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))  # not this machine's
    run.run.root, shown = str(tmp_path), []
    code = examine(run, deadlines={}, show=shown.extend)
    assert (code, bool(shown)) == ((2, True) if local == "0" else (0, False))
    if rank == "abc":
        assert any(each.what == "RANK=abc: no number." for each in shown)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ("2(x2)", "srun started 2 tasks per node, but trainer.devices=4"),
        ("4,3", "every node must have the same number"),
    ],
)
def test_tasks_of_slurm_that_disagree_with_devices_are_named(run, tasks, words):
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }
    assert words in only(launch.slurm_tasks(run, environ)).what


def test_gpus_and_nodes_of_slurm_that_disagree_are_named(run):
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "1"}
    nodes, gpus = launch.slurm_tasks(run, environ)
    assert nodes.what == "trainer.num_nodes=2, but the Slurm job has 4 nodes."
    assert gpus.what == "trainer.devices=4, but Slurm gave this job 1 GPUs on this node."


def test_an_interface_that_is_not_there_is_named():
    found = only(launch.interfaces({"GLOO_SOCKET_IFNAME": "ib7"}))
    assert found.what == "GLOO_SOCKET_IFNAME=ib7: this machine has no such network interface."
    assert not list(launch.interfaces({"NCCL_SOCKET_IFNAME": "l", "GLOO_SOCKET_IFNAME": "lo"}))


def test_a_machine_without_any_network_is_named(run, monkeypatch):
    run.trainer.num_nodes = 1
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert not list(launch.loopback(run, {}))
    monkeypatch.setattr(launch.psutil, "net_if_addrs", dict)
    assert (
        "is down: the ranks of a machine connect through it" in only(launch.loopback(run, {})).what
    )
    assert not list(launch.loopback(run, {"RANK": "0"}))


def test_an_address_that_does_not_resolve_is_named():
    assert only(launch.port_findings("no-such-host.invalid", 1)).what.startswith(
        "MASTER_ADDR=no-such-host.invalid"
    )
    assert "cannot resolve" in only(launch.answer_findings("no-such-host.invalid", 1, rank=3)).what


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


def test_machines_of_the_same_name_are_told_apart():
    places = {0: ("a", "1", 0), 1: ("a", "2", 1), 3: ("b", "3", 2)}
    present = {
        rank: dict(zip(("host", "machine", "node"), place, strict=True))
        for rank, place in places.items()
    }
    assert session.host_names(present, ranks=4) == ["a (node 0)", "a (node 1)", "", "b"]


def test_what_must_be_equal_on_all_ranks_is_named_with_its_ranks():
    everyones = [
        {"torch": "2.13.0" if rank < 4 else "2.12.1", "Python": "3.11"} for rank in range(8)
    ]
    found = only(session.differences(everyones, name=name))
    assert (
        found.what
        == "torch differs between the ranks: 2.13.0 on rank 0 on node0, 2.12.1 on rank 4 on node1."
    )


# ------------------------------------------------------------ communication
def test_a_rank_at_half_speed_is_named():
    found = only(communication.rank_findings([10.0, 9.5, 5.0, 10.2], name=name))
    assert (
        found.what
        == "rank 2 on node0 computes at 50% of the others' speed; every step waits for it."
    )
    assert only(communication.rank_findings([10.0, 9.0, 8.0, 10.0], name=name)).level == "ok"


def test_a_rank_of_half_the_speed_is_measured_as_slow(monkeypatch):
    """Each product is made twice.

    A machine that is busy with other things may disturb a few of the trials.
    """
    usual, product, found = communication.compute_rate, torch.mm, []
    for _ in range(5):
        monkeypatch.setattr(torch, "mm", product)
        whole = usual(torch.device("cpu"))
        monkeypatch.setattr(torch, "mm", lambda a, b: (product(a, b), product(a, b)))
        found = list(communication.rank_findings([whole, usual(torch.device("cpu"))], name=name))
        if found[0].level == "warning":
            break
    assert "rank 1 on" in found[0].what


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


def test_an_axis_is_compared_with_its_links_and_a_slow_group_is_named():
    def found(groups, **expected):
        measured = [AxisGroup("tensor", ranks, 1e-5, rate) for ranks, rate in groups.items()]
        return list(
            communication.axis_findings(measured, hosts=["a"] * 4 + ["b"] * 4, expected=expected)
        )

    within = {(0, 1): 3e11, (2, 3): 3e11, (4, 5): 3e11, (6, 7): 1e11}
    slow = only(found(within, within=4.5e11))
    assert slow.what == "axis tensor: ranks 6, 7 all-reduce at 33% of the other groups' speed."
    assert only(found(dict.fromkeys(within, 3e11), within=4.5e11)).level == "ok"
    assert (
        only(found(within)).what
        == "axis tensor, within a machine: 2 ranks all-reduce at 300 GB/s, 10 µs."
    )
    across = only(found({(0, 4): 5e9, (1, 5): 5e9}, within=4.5e11, between=5e10))
    assert across.what.endswith(
        "between machines: 2 ranks all-reduce at 5 GB/s, 10 µs; the hardware's links give 50 GB/s."
    )
    assert across.remedy.endswith("so that it stays within a machine.")


@pytest.mark.parametrize(
    ("gpu", "links"),
    [
        ("NVIDIA H100 80GB HBM3", {"within": 450e9, "between": 50e9}),
        ("NVIDIA H100 PCIe", {"within": 0, "between": 0}),
    ],
)
def test_a_card_without_nvlink_is_not_judged_by_the_links_of_its_namesake(monkeypatch, gpu, links):
    monkeypatch.setattr(devices.hardware, "gpu_count", lambda: 8)
    monkeypatch.setattr(devices.hardware, "gpu_name", lambda: gpu)
    assert communication.expected_links(torch.device("cuda")) == links


def test_clocks_that_differ_are_named():
    found = only(communication.clock_findings([100.0, 100.01, 160.0], hosts=["a", "b", "c"]))
    assert "c by +60.0 s" in found.what


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_pair_of_ranks_meets_once(ranks):
    rounds = communication.pairs(ranks)
    assert all(
        len({rank for pair in matches for rank in pair}) == 2 * len(matches) for matches in rounds
    )
    assert sorted(pair for matches in rounds for pair in matches) == [
        (a, b) for a in range(ranks) for b in range(a + 1, ranks)
    ]


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


# ------------------------------------------------------------ data
def test_samples_that_two_ranks_draw_and_samples_that_none_draws_are_named():
    import numpy as np

    assert only(order.coverage([np.array([0, 2]), np.array([1, 3])], size=4)).level == "ok"
    assert (
        "both train on sample 2"
        in only(order.coverage([np.array([0, 2]), np.array([2, 3])], size=4)).what
    )
    assert "draw 3" in only(order.coverage([np.array([0, 2]), np.array([1])], size=4)).what


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


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path):
    assert only(run_directory.folder(tmp_path / "a" / "b", key="run.root")).level == "ok"
    assert not list(tmp_path.iterdir())


def test_an_object_store_is_written_to(monkeypatch):
    upath = pytest.importorskip("upath")
    assert only(run_directory.store("memory://doctor/runs")).level == "ok"
    assert not list(upath.UPath("memory://doctor/runs").iterdir())
    monkeypatch.setattr(
        run_directory.resume,
        "to_path",
        lambda path: (_ for _ in ()).throw(KeyError("no credentials")),
    )
    assert (
        "memory://doctor: it cannot be written (KeyError: 'no credentials')"
        in only(run_directory.store("memory://doctor")).what
    )
    monkeypatch.setattr(run_directory.resume, "to_path", lambda path: time.sleep(0.5) or path)
    monkeypatch.setattr(run_directory, "STORE_SECONDS", 0.05)
    assert (
        "no file could be written within 0.05 s"
        in only(run_directory.store("memory://doctor")).what
    )


def test_a_rename_that_is_not_atomic_is_named(tmp_path, monkeypatch):
    def copies(new, final):
        final.write_bytes(new.read_bytes())

    monkeypatch.setattr(run_directory.os, "replace", copies)
    assert (
        "a killed save could leave a damaged checkpoint"
        in only(run_directory.folder(tmp_path, key="run.root")).what
    )


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


@pytest.mark.parametrize(
    ("batches", "said"), [(8, "4 steps ran;"), (4, "2 steps ran;"), (2, "1 step ran;")]
)
def test_the_steps_of_a_short_run_are_counted(batches, said):
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(data_wait=None))
    trainer: Any = SimpleNamespace(accumulate_grad_batches=2, global_step=0, fit_loop=loop)
    alone: Any = SimpleNamespace(rank=0, ranks=1)
    watch = training.Watch(alone)
    watch._began = 1.0  # the first step has been compared
    for batch in range(batches):
        watch.on_train_batch_end(trainer, None, None, None, batch)  # pyright: ignore[reportArgumentType]
    assert watch.findings(SimpleNamespace(trainer=trainer))[-1].what.startswith(said)  # pyright: ignore[reportArgumentType]
