"""The default process group and where this process stands in it, from the variables that the launcher sets."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from armature.launcher import environment

T = TypeVar("T")


class RankEnvironment(ClusterEnvironment):
    """RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK, MASTER_ADDR, MASTER_PORT; one process where they are not set.

    Given to every strategy, so that Lightning neither guesses a scheduler nor starts processes of its own.
    """

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return environment.main_address()

    @property
    def main_port(self) -> int:
        return environment.main_port()

    @staticmethod
    def detect() -> bool:
        return environment.is_joined()

    def world_size(self) -> int:
        return environment.world_size()

    def set_world_size(self, size: int) -> None:
        if size != self.world_size():
            raise RuntimeError(f"The Trainer counts {size} processes, but WORLD_SIZE={self.world_size()}")

    def global_rank(self) -> int:
        return environment.rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return environment.local_rank()

    def node_rank(self) -> int:
        return environment.node_rank()


def init(backend: str = "auto", accelerator: str = "cpu", *, timeout: timedelta | None = None) -> None:
    """Join the default process group; nothing to do for one process, or where it exists already.

    Args:
        backend: `auto` (gloo on CPU, NCCL on GPU) or a backend's name.
        accelerator: `cpu` or `gpu`. On a GPU, gloo is set up for CPU tensors too: checkpoints and objects use it.
        timeout: of a collective, in this group and in all that are made after it; None: torch's.
    """
    if dist.is_initialized() or environment.world_size() == 1:
        return
    on_gpu = accelerator in ("gpu", "cuda")
    device = torch.device("cuda", environment.local_rank()) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    elif backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"
    if timeout is not None:  # for the groups that a mesh or DeepSpeed make later: they do not take the first one's
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(dist.distributed_c10d, name, timeout)
    dist.init_process_group(backend, timeout=timeout, device_id=device if "nccl" in backend else None)


def broadcast_object(obj: T, *, source: int = 0) -> T:
    """Rank `source`'s plain object on every rank."""
    if not dist.is_initialized():
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def all_gather_object(obj: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's plain object, in order of ranks, on every rank."""
    if not dist.is_initialized():
        return [obj]
    gathered: list[T] = [obj] * dist.get_world_size()
    dist.all_gather_object(gathered, obj, group=group)
    return gathered


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Vote:
    """The largest of all ranks' numbers, of each kind, told one call late, so that no rank waits for the others.

    All ranks call it equally often. On GPUs too it is the CPUs that talk: the devices' queues are not waited for.
    """

    def __init__(self) -> None:
        self._under_way: tuple[torch.Tensor, dist.Work] | None = None

    def __call__(self, *numbers: int) -> list[int]:
        """This call's numbers take part in the next call's result; one process gets its own at once."""
        if not dist.is_initialized():
            return [*numbers]
        result = self.finish() or [0] * len(numbers)
        box = torch.tensor(numbers)
        work = dist.all_reduce(box, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._under_way = box, work
        return result

    def finish(self) -> list[int]:
        """The result of the call before, if there was one. Afterwards nothing is under way."""
        if self._under_way is None:
            return []
        box, work = self._under_way
        self._under_way = None
        work.wait()
        return box.tolist()


def destroy() -> None:
    """Leave the group. A rank that ends without this may abort at exit, which an elastic agent takes for a failure."""
    if dist.is_initialized():
        dist.destroy_process_group()
