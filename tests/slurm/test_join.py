"""What a process takes from Slurm's variables, without a Slurm."""

import os

import pytest
from omegaconf import OmegaConf

from armature.errors import ConfigError
from armature.launcher import slurm

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def step(monkeypatch):
    """Sets Slurm's variables; what `join` adds is undone."""
    monkeypatch.setattr(
        os, "environ", {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK"))}
    )

    def set_(**changes: str) -> None:
        os.environ.update({**STEP, **changes})

    return set_


def config(devices: int, nodes: int = 2):
    return OmegaConf.create(
        {"trainer": {"devices": devices, "num_nodes": nodes}, "launch": {"rdzv_endpoint": None}}
    )


def test_a_rank_that_srun_started(step):
    step()
    slurm.join(config(2))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [os.environ[name] for name in names] == ["3", "4", "1", "1", "2", "localhost"]


def test_one_task_a_node_has_the_agent_beneath_it_and_of_one_device_is_a_rank(step):
    step(
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_TASKS_PER_NODE="1(x2)",
        SLURM_PROCID="1",
        SLURM_LOCALID="0",
    )
    cfg = config(2)
    slurm.join(cfg)
    assert "RANK" not in os.environ
    assert cfg.launch.rdzv_endpoint == f"localhost:{20000 + 41 * 7}"
    slurm.join(config(1))
    assert os.environ["WORLD_SIZE"] == "2"


def test_a_restarted_job_meets_at_another_port(step):
    step(SLURM_RESTART_COUNT="2")
    slurm.join(config(2))
    assert os.environ["MASTER_PORT"] == str(20000 + 41 * 7 + 6)


def test_agents_of_other_nodes_than_asked_for_are_refused(step):
    step(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)")
    with pytest.raises(
        ConfigError, match=r"trainer.num_nodes=3.*2 nodes. Type trainer.num_nodes=2"
    ):
        slurm.join(config(2, nodes=3))


ODD = {
    "no task": (
        {"SLURM_PROCID": ""},
        r"SLURM_STEP_ID=0, but SLURM_PROCID without a value.* Type unset SLURM_STEP_ID",
    ),
    "no nodes": (
        {"SLURM_STEP_NODELIST": "", "SLURM_NODEID": ""},
        r"but SLURM_NODEID, SLURM_STEP_NODELIST without",
    ),
    "words": (
        {"SLURM_PROCID": "x"},
        r"SLURM_PROCID=x: must be a number; a launcher sets it. Type unset SLURM_PROCID",
    ),
    "tasks": ({"SLURM_STEP_NUM_TASKS": "x"}, r"SLURM_STEP_NUM_TASKS=x: must be a number"),
    "restarts": ({"SLURM_RESTART_COUNT": "x"}, r"SLURM_RESTART_COUNT=x: must be a number"),
}


@pytest.mark.parametrize(("changes", "message"), ODD.values(), ids=ODD)
def test_variables_that_srun_cannot_have_set_are_named(changes, message, step):
    step(**changes)
    with pytest.raises(ConfigError, match=message):
        slurm.join(config(2))


def test_a_name_that_does_not_resolve_gives_way_to_slurms_address(step, monkeypatch):
    monkeypatch.setattr(
        slurm, "_scontrol", lambda *what: "NodeName=node NodeAddr=10.1.2.3 Port=6818\n"
    )
    step(SLURM_STEP_NODELIST="node-not-in-any-dns[1-2].invalid")
    slurm.join(config(2))
    assert os.environ["MASTER_ADDR"] == "10.1.2.3"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"),
        ("n[07-12,15]", "n07"),
        ("n[3]-ib,m", "n3-ib"),
        ("r[1-2]n[01-4],x", "r1n01"),
    ],
)
def test_in_a_container_without_slurms_programs_the_first_node_is_read_from_the_list(
    step, monkeypatch, nodes, first
):
    monkeypatch.setattr(
        slurm, "_scontrol", lambda *what: (_ for _ in ()).throw(FileNotFoundError("scontrol"))
    )
    step(SLURM_STEP_NODELIST=nodes)
    slurm.join(config(2))
    assert os.environ["MASTER_ADDR"] == first


def test_a_task_of_another_component_of_a_heterogeneous_job_is_refused(step):
    step(SLURM_PROCID="5")
    with pytest.raises(
        ConfigError, match=r"SLURM_PROCID=5 of SLURM_STEP_NUM_TASKS=4.*--het-group=0"
    ):
        slurm.join(config(2))


def test_the_batch_script_itself_is_no_step(step):
    step()
    del os.environ["SLURM_STEP_ID"]
    slurm.join(config(2))
    assert "RANK" not in os.environ
