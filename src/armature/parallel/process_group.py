"""The default process group and this process's rank in it, from the variables that the launcher
sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from armature.launcher import environment

T = TypeVar("T")
PATIENCE = timedelta(weeks=1)


class RankEnvironment(ClusterEnvironment):
    """RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK, MASTER_ADDR, MASTER_PORT; one process if they are
    not set.

    Every strategy gets it, so that Lightning neither guesses a scheduler nor starts processes
    itself.
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

    detect = staticmethod(environment.is_joined)

    def world_size(self) -> int:
        return environment.world_size()

    def global_rank(self) -> int:
        return environment.rank()

    def local_rank(self) -> int:
        return environment.local_rank()

    def node_rank(self) -> int:
        return environment.node_rank()

    def set_world_size(self, size: int) -> None:
        if size != self.world_size():
            raise RuntimeError(
                f"The Trainer counts {size} processes, but WORLD_SIZE={self.world_size()}"
            )

    def set_global_rank(self, rank: int) -> None:
        pass


def init(
    backend: str = "auto",
    accelerator: str = "cpu",
    *,
    timeout: timedelta | None = None,
    store: Any = None,
    alone: bool = False,
) -> None:
    """Join the default process group, unless the group exists already, or there is only one process
    and not `alone`.

    `auto` is gloo on CPU and NCCL on GPU. On a GPU, gloo is set up for CPU tensors too: checkpoints
    and objects use it.
    The timeout is that of a collective, in this group and in all groups that are created later;
    None: torch's. `store` is where the ranks meet; None: where the launcher's variables say.
    """
    if dist.is_initialized() or (environment.world_size() == 1 and not alone):
        return
    on_gpu = accelerator in ("gpu", "cuda")
    device = torch.device("cuda", environment.local_rank()) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    both = "cpu:gloo,cuda:nccl"
    backend = {"auto": both if on_gpu else "gloo", "nccl": both}.get(backend, backend)
    # for the groups that a mesh or DeepSpeed creates later: they do not inherit this timeout
    if timeout is not None:
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(dist.distributed_c10d, name, timeout)
    meeting_point = _meeting_point(store)
    if not meeting_point:
        environment.wait_for_main_address()
    dist.init_process_group(
        backend, timeout=timeout, device_id=device if "nccl" in backend else None, **meeting_point
    )


def _meeting_point(store: Any) -> dict[str, Any]:
    """Return where the ranks meet: in a file if they are on one machine, since a port would be open
    to everybody.
    """
    size, file = environment.world_size(), environment.store_file()
    if store is None and size == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    if store is None and file is not None:
        store = dist.FileStore(str(file), size)  # pyright: ignore[reportPrivateImportUsage]
    if store is None:
        return {}
    return {"store": store, "rank": environment.rank(), "world_size": size}


def broadcast_object(obj: T, *, source: int = 0) -> T:
    """Return rank `source`'s plain object on every rank."""
    if not dist.is_initialized():
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def all_gather_object(obj: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's plain object, in order of ranks, on every rank."""
    if not dist.is_initialized():
        return [obj]
    gathered: list[T] = [obj] * dist.get_world_size(group)
    dist.all_gather_object(gathered, obj, group=group)
    return gathered


def gather_object(obj: T) -> list[T]:
    """Return every rank's plain object, in order of ranks, on rank 0; nothing elsewhere.

    Called by all ranks.
    """
    if not dist.is_initialized():
        return [obj]
    gathered: list[T] | None = [obj] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(obj, gathered)
    return gathered or []


@contextmanager
def patient_group() -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of all ranks for a collective that may take hours, since one of them works
    alone meanwhile.
    """
    group: Any = dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield group
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all ranks, on every rank; it replaces the tensor's values."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def on_all_ranks(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's result of `work`, in order of ranks.

    An error of one rank is raised on all ranks.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    message = None if error is None else f"{type(error).__name__}: {error}"
    gathered = all_gather_object((message, result), group=group)
    if error is not None:
        raise error
    for other, (message, _) in enumerate(gathered):
        if message is not None:
            raise OSError(f"rank {other} failed: {message}")
    return [result for _, result in gathered]  # pyright: ignore[reportReturnType]


def on_rank_0(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Call `work` on rank 0 only, and return its result on all ranks.

    An error is raised on all ranks.
    """
    return on_all_ranks(lambda: work() if rank() == 0 else None, group=group)[0]  # pyright: ignore[reportReturnType]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_max(*numbers: int) -> list[int]:
    """Return the maximum of each number over all ranks. The CPUs communicate, on GPUs too."""
    if ranks() == 1:
        return [*numbers]
    box = torch.tensor(numbers)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return box.tolist()


class Vote:
    """The maximum over all ranks of several numbers, one call late, so that no rank waits for the
    others.

    All ranks must call it equally often. The CPUs communicate, on GPUs too: no rank waits for its
    device's queue.
    """

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, dist.Work] | None = None

    def __call__(self, *numbers: int) -> list[int]:
        """Submit this call's numbers and return the maximum of the previous call's; a single
        process gets its own.
        """
        if ranks() == 1:  # a strategy of several may have a group of one
            return [*numbers]
        result = self.finish() or [0] * len(numbers)
        box = torch.tensor(numbers)
        work = dist.all_reduce(box, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._pending = box, work
        return result

    def finish(self) -> list[int]:
        """Return the result of the previous call, or [] if there was none.

        No collective is pending afterwards.
        """
        if self._pending is None:
            return []
        box, work = self._pending
        self._pending = None
        work.wait()
        return box.tolist()


def destroying_waits() -> bool:
    """Return whether leaving the group waits for the other ranks, as NCCL's communicators do."""
    return dist.is_initialized() and "nccl" in dist.get_backend()


def destroy() -> None:
    """Leave the group.

    A rank that exits without this may abort, which an elastic agent takes for a failure.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
