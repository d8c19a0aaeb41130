"""A strategy of several ranks on one device."""

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator

from armature.parallel import process_group
from armature.strategies.ddp import DDP
from armature.strategies.deepspeed import DeepSpeed
from armature.strategies.mesh import MeshStrategy
from armature.strategies.single import SingleDevice


@pytest.fixture
def joined(monkeypatch):
    """What `init_process_group` was called with."""
    calls = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **named: calls.append((backend, named))
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return calls


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(DDP(), "nccl"), (DeepSpeed(stage=1), "nccl"), (MeshStrategy(), "nccl"),
     (MeshStrategy(cpu_offload=True), "cpu:gloo,cuda:nccl")],
)  # fmt: skip
def test_only_offloaded_weights_need_gloo_in_every_group_of_a_gpu(strategy, expected, joined):
    strategy.parallel_devices = [torch.device("cuda", 0)]
    strategy.join_group()
    [(backend, named)] = joined
    assert backend == expected
    assert (named["rank"], named["world_size"]) == (0, 1)
    assert named["device_id"] == torch.device("cuda", 0)


def test_objects_have_one_group_of_gloo_beside_nccl(monkeypatch):
    process_group.init(alone=True)
    try:
        assert process_group.cpu_group() is dist.group.WORLD
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
        beside = process_group.cpu_group()
        assert beside is process_group.cpu_group() is not dist.group.WORLD
        assert process_group.group_for(torch.ones(1)) is beside
        assert process_group.group_for(torch.ones(1, device="meta")) is dist.group.WORLD
        assert process_group.broadcast_object("name") == "name"
    finally:
        process_group.destroy()


def test_a_test_after_fit_makes_no_further_groups():
    """NCCL takes memory of the GPU for each of them, and seconds on many ranks."""
    made = MeshStrategy(shard="auto")
    made.parallel_devices = [torch.device("cpu")]
    made.accelerator = CPUAccelerator()
    made.connect(L.LightningModule())
    try:
        made.setup_environment()
        first = made.device_mesh
        made.setup_environment()
        assert made.device_mesh is first
    finally:
        process_group.destroy()


@pytest.mark.parametrize("strategy", [SingleDevice, DDP, DeepSpeed, MeshStrategy])
def test_what_configure_model_makes_has_the_random_numbers_of_the_cpu(strategy):
    """Else initial weights would depend on the strategy.

    Lightning's ddp draws them on the GPU, FSDP2 on the CPU.
    """
    made = strategy()
    made.parallel_devices = [torch.device("meta")]
    with made.tensor_init_context():
        assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


def test_one_rank_of_a_group_votes_alone(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_reduce", None)
    vote = process_group.Vote()
    assert vote(0, 7) == [0, 0]
    assert vote.finish() == [0, 7]
    assert vote.finish() == []
