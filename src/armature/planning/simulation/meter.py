"""Counts what passes through torch's dispatcher: live memory, FLOPs, seconds, collectives, host
waits.
"""

# pyright: reportPrivateImportUsage=false
import sysconfig
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# gives c10d's operators a form without values
from torch.distributed._tools import fake_collectives  # noqa: F401
from torch.distributed.tensor import DTensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

from armature.parallel import mesh
from armature.planning.roofline import Roofline

KINDS = {  # by the start of an operator's name
    "reduce_scatter": "reduce_scatter",
    "reduce": "reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "send": "send",
    "isend": "send",
}
aten = torch.ops.aten
ROUNDING = 512  # bytes; the caching allocator rounds up to it
LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")}
)


def _grouped_flops(a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped product: each row (or, of two matrices, each inner index) is in
    one group.
    """
    groups = a_shape[0] if len(a_shape) == len(b_shape) == 3 else 1
    return 2 * groups * a_shape[-2] * a_shape[-1] * b_shape[-1]


if aten._grouped_mm not in flop_registry:  # torch 2.13 has no formula
    register_flop_formula(aten._grouped_mm)(_grouped_flops)
# attention on a CPU, whose arguments are as CUDA's: before torch 2.15, it counts CUDA's alone
flop_registry.setdefault(aten._scaled_dot_product_flash_attention_for_cpu, flop_counter.sdpa_flop)
flop_registry.setdefault(
    aten._scaled_dot_product_flash_attention_for_cpu_backward, flop_counter.sdpa_backward_flop
)


def kind_of(func: Any) -> str | None:
    """Return the kind of an operator of torch.distributed; None if it sends nothing."""
    name = func.__name__.lstrip("_")
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), None)


def group_of(args: Any) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of an operator of torch.distributed."""
    for arg in reversed(args):
        if isinstance(arg, dist.ProcessGroup):
            return arg
        if isinstance(arg, str):  # its name
            return dist.distributed_c10d._resolve_process_group(arg)  # pyright: ignore[reportArgumentType]
        if isinstance(arg, torch.ScriptObject):
            with suppress(RuntimeError, TypeError):  # a reduction's operator
                return dist.ProcessGroup.unbox(arg)
    return None


class Meter(TorchDispatchMode):
    """Count memory, FLOPs, seconds, collectives and synchronizations of fake tensors on a GPU.

    Attributes:
        sizes: of the mesh's axes; a group is named after the axes along which its ranks differ.
        volumes: calls, bytes and seconds of collectives by (axis, kind, ranks): bytes of the
            reduced tensor, or the gathered one.
        kind, phase: of tensors that are made now.
        paused: count nothing, such as while DTensor rehearses an operator on tensors of global
            size.
        logits: sizes of a last dimension that make a tensor logits.
        total: live bytes by kind.
        syncs: how often the host waits for the device, by the line of code.
        assumed: lines at which the size of a result depends on values: the largest is taken.
        shares: of each kind's bytes, what this rank would hold of them; 1 for kinds that are not
            named.
        tell: called with the name, ranks, bytes and arguments of each operator among several ranks.
    """

    def __init__(self, sizes: Mapping[str, int], roofline: Roofline) -> None:
        super().__init__()
        self.sizes, self.roofline = sizes, roofline
        self.volumes: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._groups: dict[str, tuple[str, list[int]]] = {}
        self.kind, self.phase, self.paused = "others", "setup", False
        self.logits: frozenset[int] = frozenset()
        self.total: Counter[str] = Counter()
        self._live: dict[int, list[Any]] = {}  # storage → [weak reference, bytes, kind]
        self._operator: Any = None
        self.now = 0
        self.assumed: dict[str, None] = {}
        self.shares: Mapping[str, float] = {}
        self.tell: Callable[[str, list[int], int, Any], object] = lambda *operation: None
        self.restart()

    # ------------------------------------------------------------ collectives
    def _collective(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
        if (group := group_of(args)) is None:  # a wait
            return
        axis, members = self.group(group)
        size = max((t.numel() * t.element_size() for t in tensors), default=0)
        if len(members) > 1:
            self.tell(func.__name__.split(".")[0].strip("_"), members, size, args)
        if (kind := kind_of(func)) is None:
            return
        entry = self.volumes[axis, kind, len(members)]
        entry[0] += 1
        entry[1] += size
        entry[2] += self.roofline.collective(kind, size, members)

    def group(self, group: dist.ProcessGroup) -> tuple[str, list[int]]:
        """Return the axis of a group, such as "shard", "replicate+shard" or "world", and its
        ranks.
        """
        if group.group_name not in self._groups:
            members = dist.get_process_group_ranks(group)
            different = [
                axis for axis in mesh.AXES if len({self._place(rank, axis) for rank in members}) > 1
            ]
            axis = "+".join(different) if any(size > 1 for size in self.sizes.values()) else "world"
            self._groups[group.group_name] = axis or "self", members
        return self._groups[group.group_name]

    def _place(self, rank: int, axis: str) -> int:
        for name in reversed(mesh.AXES):  # the last axis is the innermost
            rank, place = divmod(rank, self.sizes.get(name, 1))
            if name == axis:
                return place
        raise KeyError(axis)

    def restart(self) -> None:
        """Count anew; what is alive stays."""
        self.peak, self.peak_by_kind, self.peak_at = self.now, dict(self.total), self.phase
        self.peak_by_phase: dict[str, int] = {}
        self.flops: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.syncs: Counter[str] = Counter()
        self.operators = 0
        self.volumes.clear()

    @contextmanager
    def during(self, phase: str | None, kind: str) -> Iterator[None]:
        before = self.phase, self.kind
        self.phase, self.kind = phase or self.phase, kind
        try:
            yield
        finally:
            self.phase, self.kind = before

    @contextmanager
    def pausing(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    # ------------------------------------------------------------ memory
    def own(self, tensor: Any, kind: str) -> None:
        """Note a storage, or what a known one is for."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._live.get(key)
        if entry is None:
            self._live[key] = [weakref.ref(storage, lambda _: self._gone(key)), 0, kind]
            self.resize(storage)
        elif kind != entry[2]:
            self.total[entry[2]] -= entry[1]
            self.now -= entry[1]
            entry[1:] = 0, kind
            self.resize(storage)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Read the size of a known storage again."""
        if (entry := self._live.get(storage._cdata)) is None:
            return
        rounded = int(-(-storage.nbytes() // ROUNDING) * ROUNDING * self.shares.get(entry[2], 1))
        change, entry[1] = rounded - entry[1], rounded
        self.total[entry[2]] += change
        self.now += change
        if self.now > self.peak:
            self.peak, self.peak_by_kind = self.now, dict(self.total)
            self.peak_at = f"{self.phase}: {self._operator}"
        if self.now > self.peak_by_phase.get(self.phase, 0):
            self.peak_by_phase[self.phase] = self.now

    def _gone(self, key: int) -> None:
        _, size, kind = self._live.pop(key)
        self.total[kind] -= size
        self.now -= size

    def _own_new(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "meta" and tensor.untyped_storage()._cdata not in self._live:
            computed = self.kind in ("activations", "temporary") and tensor.dim() > 1
            self.own(
                tensor, "logits" if computed and tensor.shape[-1] in self.logits else self.kind
            )

    # ------------------------------------------------------------ operators
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self.paused:
            return func(*args, **kwargs)
        if func.name() == "aten::_local_scalar_dense":
            (tensor,) = args
            if getattr(tensor, "constant", None) is not None or not isinstance(
                tensor, torch._subclasses.FakeTensor
            ):
                return func(*args, **kwargs)
            self.wait("item")
            return 1.0 if tensor.is_floating_point() else tensor.dtype != torch.bool and 0
        self._operator = func
        out = func(*args, **kwargs)
        ins = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        for tensor in outs:
            self._own_new(tensor)
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._collective(func, args, ins + outs)
        elif not func.is_view and outs and outs[0].device.type != "meta":
            self._worked(func, args, kwargs, out, ins, outs)
        return out

    def _worked(
        self, func: Any, args: Any, kwargs: Any, out: Any, ins: list[Any], outs: list[Any]
    ) -> None:
        packet, flops = func._overloadpacket, 0
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            self.flops[self.phase] += flops
        self.operators += 1
        moved = sum(t.numel() * t.element_size() for t in ins + outs)
        self.seconds[self.phase] += self.roofline.operator(
            flops, moved, str(ins[0].dtype if ins else torch.float32).removeprefix("torch.")
        )

    def wait(self, why: str, *, assumed: bool = False) -> None:
        """Count a wait of the host for the device.

        `assumed`: the size of its result depends on values.
        """
        if self.paused:
            return
        line = where()
        self.syncs[f"{why}: {line}"] += 1
        if assumed:
            self.assumed[f"{why} at {line}"] = None


def where() -> str:
    """Return the innermost line that is neither a library's nor the simulator's, as
    folder/file.py:line; else a library's.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    own = str(Path(__file__).parent)
    outside = [place for place in places if not place[0].startswith((own, "<"))]
    users = [place for place in outside if not place[0].startswith(LIBRARIES)]
    file, line = (users or outside or [("?", 0)])[0]
    return f"{'/'.join(Path(file).parts[-2:])}:{line}"
