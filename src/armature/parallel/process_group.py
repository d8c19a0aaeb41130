"""The default process group and this process's rank in it, from the variables that the launcher
sets.
"""

import math
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch import nn

from armature.errors import ConfigError, error_line
from armature.launcher import environment

T = TypeVar("T")


class RankEnvironment(TorchElasticEnvironment):
    """RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK, MASTER_ADDR, MASTER_PORT; one process if they are
    not set.

    Every strategy gets it, so that Lightning neither guesses a scheduler nor starts processes
    itself.
    """

    @property
    def main_address(self) -> str:
        return environment.main_address()

    @property
    def main_port(self) -> int:
        return environment.main_port()

    def world_size(self) -> int:
        return environment.world_size()

    def global_rank(self) -> int:
        return environment.rank()

    def local_rank(self) -> int:
        return environment.local_rank()

    def node_rank(self) -> int:
        return environment.node_rank()


def init(
    backend: str = "auto",
    accelerator: str = "cpu",
    *,
    timeout: timedelta | None = None,
    store: Any = None,
    alone: bool = False,
    offloads: bool = False,
) -> None:
    """Join the default process group, unless the group exists already, or there is only one process
    and not `alone`.

    `auto` is gloo on CPU and NCCL on GPU, beside which `cpu_group` is made. `offloads`: weights lie
    in the CPU's memory, so that each group of a GPU has gloo too.
    The timeout is that of a collective, in this group and in all groups that are created later;
    None: torch's. `store` is where the ranks meet; None: where the launcher's variables say.
    """
    if dist.is_initialized() or (environment.world_size() == 1 and not alone):
        return
    environment.prepare_collectives()
    on_gpu = accelerator in ("gpu", "cuda")
    device = torch.device("cuda", environment.local_rank()) if on_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    backend = {"auto": "nccl" if on_gpu else "gloo"}.get(backend, backend)
    if backend == "nccl" and offloads:
        backend = "cpu:gloo,cuda:nccl"
    # for the groups that a mesh or DeepSpeed creates later: they do not inherit this timeout
    if timeout is not None:
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            setattr(dist.distributed_c10d, name, timeout)
    meeting_point = _meeting_point(store)
    if not meeting_point:
        environment.wait_for_main_address()
    try:
        dist.init_process_group(
            backend,
            timeout=timeout,
            device_id=device if "nccl" in backend else None,
            **meeting_point,
        )
    # no port, a taken one, or nobody there
    except (ValueError, dist.DistNetworkError, dist.DistStoreError) as error:
        if meeting_point:  # a store, without a port
            raise
        raise ConfigError(
            f"MASTER_PORT={environment.main_port()}: ranks cannot meet ({error_line(error)}). "
            f"Start all, with a port that is free on {environment.main_address()} (under srun, "
            "type unset MASTER_PORT)."
        ) from error
    cpu_group()  # all ranks make it together


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


def cpu_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks for objects and tensors in the CPU's memory, None without one.

    NCCL has no such tensors: the first call makes one group of gloo beside it, for all that the
    main thread sends. More would cost each rank connections to all others.
    """
    if not dist.is_initialized():
        return None
    return _gloo_beside(dist.group.WORLD) if dist.get_backend() == "nccl" else dist.group.WORLD


@cache
def _gloo_beside(world: Any) -> Any:
    return dist.new_group(backend="gloo")


def group_for(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the group of all ranks that sends a tensor from where it lies."""
    return cpu_group() if tensor.device.type == "cpu" else dist.group.WORLD


def broadcast_object(obj: T, *, source: int = 0) -> T:
    """Return rank `source`'s plain object on every rank."""
    if not dist.is_initialized():
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=source, group=cpu_group())
    return box[0]


def all_gather_object(obj: T) -> list[T]:
    """Return every rank's plain object, in order of ranks, on every rank."""
    if not dist.is_initialized():
        return [obj]
    gathered: list[T] = [obj] * ranks()
    dist.all_gather_object(gathered, obj, group=cpu_group())
    return gathered


def gather_object(obj: T) -> list[T]:
    """Return every rank's plain object, in order of ranks, on rank 0; nothing elsewhere.

    Called by all ranks. torch's function gathers the sizes on all ranks: N² messages.
    """
    if not dist.is_initialized():
        return [obj]
    own = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    (size,) = all_max(len(own))
    sent = nn.functional.pad(own, (0, size - len(own)))
    pieces = [torch.empty_like(sent) for _ in range(ranks() if rank() == 0 else 0)]
    dist.gather(sent, pieces or None, group=cpu_group())
    return [pickle.loads(piece.numpy().tobytes()) for piece in pieces]


def barrier() -> None:
    """Wait until all ranks have called this."""
    if ranks() > 1:
        dist.barrier(group=cpu_group())


def patient_barrier() -> None:
    """Wait until all ranks have called this, for hours if one of them works alone meanwhile.

    The ranks count themselves where they have met: every collective has a timeout.
    """
    if ranks() == 1:
        return
    store, key = dist.distributed_c10d._get_default_store(), "armature/patient_barrier"
    expected = math.ceil(store.add(key, 1) / ranks()) * ranks()
    while store.add(key, 0) < expected:
        time.sleep(ranks() / 1000)  # rank 0's process answers all of them


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all ranks, on every rank; it replaces the tensor's values."""
    if dist.is_initialized():
        dist.all_reduce(tensor, group=group_for(tensor))
    return tensor


def on_all_ranks(work: Callable[[], object]) -> None:
    """Call `work` on every rank. An error of one rank is raised on all ranks."""
    _, error, problem = _attempt(work)
    problems = gather_object(problem)  # on rank 0
    problem = broadcast_object(next(filter(None, problems), None))
    _raise(error, problem)


def on_rank_0(work: Callable[[], T]) -> T:
    """Call `work` on rank 0 only, and return its result on all ranks.

    An error is raised on all ranks.
    """
    result, error, problem = _attempt(work) if rank() == 0 else (None, None, None)
    result, problem = broadcast_object((result, problem))
    _raise(error, problem)
    return result  # pyright: ignore[reportReturnType]


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None, str | None]:
    """Return a result, or an error and what the other ranks say of it."""
    try:
        return work(), None, None
    except Exception as error:
        return None, error, f"rank {rank()} failed: {type(error).__name__}: {error}"


def _raise(error: Exception | None, problem: str | None) -> None:
    if error is not None:
        raise error
    if problem is not None:
        raise OSError(problem)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_max(*numbers: int) -> list[int]:
    """Return the maximum of each number over all ranks. The CPUs communicate, on GPUs too."""
    if ranks() == 1:
        return [*numbers]
    box = torch.tensor(numbers)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=cpu_group())
    return box.tolist()


class Vote:
    """The maximum over all ranks of several numbers, one call late, so that no rank waits for the
    others.

    All ranks must call it equally often. On a GPU the numbers travel between the step's own
    collectives, and are read when the device has come so far: no rank waits for its device's queue.
    """

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, Callable[[], Any]] | None = None

    def __call__(self, *numbers: int, device: torch.device | None = None) -> list[int]:
        """Submit this call's numbers and return the maximum of the previous call's, 0 at first."""
        result = self.finish() or [0] * len(numbers)
        box, on_gpu = torch.tensor(numbers), device is not None and device.type == "cuda"
        box = box.pin_memory().to(device, non_blocking=True) if on_gpu else box
        work: Any = None
        if ranks() > 1:
            work = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group_for(box), async_op=True)
        wait = work.wait if work is not None else lambda: None
        if on_gpu:
            wait()  # the device's queue, not this thread
            box, arrived = box.to("cpu", non_blocking=True), torch.cuda.Event()
            arrived.record()
            wait = arrived.synchronize
        self._pending = box, wait
        return result

    def finish(self) -> list[int]:
        """Return the result of the previous call, or [] if there was none.

        No collective is pending afterwards.
        """
        if self._pending is None:
            return []
        (box, wait), self._pending = self._pending, None
        wait()
        return box.tolist()


def destroying_waits() -> bool:
    """Return whether leaving the group waits for the other ranks, as NCCL's communicators do."""
    return dist.is_initialized() and "nccl" in dist.get_backend()


def destroy() -> None:
    """Leave the group.

    A rank that exits without this may abort, which an elastic agent takes for a failure.
    """
    if dist.is_initialized():
        _gloo_beside.cache_clear()
        dist.destroy_process_group()
