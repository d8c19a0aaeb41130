"""What one rank of a run does with others, with files and with values, replaced for the rest of
this process.

Other ranks are taken to say what this one says. Data and checkpoints are real, and made outside of
the simulation.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch.trainer.connectors.data_connector as data_connector
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as pipeline_stage
from torch.nn.parallel import distributed as ddp
from torch.utils.data import dataloader

from armature.models.decoder import loss
from armature.models.decoder import model as decoder
from armature.models.mixture import experts as mixture
from armature.parallel import experts, initialization, mesh, process_group, randomness, scaler
from armature.parallel.pipeline import Runner
from armature.planning.devices import Device
from armature.planning.simulation.hooks import with_values, wrap
from armature.planning.simulation.meter import Meter
from armature.planning.simulation.processes import Boundary
from armature.strategies.ddp import DDP, OrderedDDP
from armature.training import same_everywhere


def install(device: Device) -> None:
    """Replace functions of ours, torch and Lightning: all that do not need to know the
    configuration.
    """
    _kernels(device)
    _objects()
    _data()
    for name in ("build", "context_group", "expert_mesh"):
        wrap(mesh, name, with_values)
    for name in ("capture", "restore"):
        wrap(randomness, name, with_values)
    wrap(process_group, "all_max", with_values)  # a number without a value would end the run
    process_group.Vote.__call__ = lambda self, *numbers, device=None: [0] * len(numbers)
    same_everywhere.digest = lambda batch: ""
    initialization.initialize_by_name = lambda *args, **kwargs: None  # weights have no values
    # a fake mode remembers its tensors by weak references, which swap_tensors (nn.Module._apply)
    # would refuse
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])
    # torch's would read its storage; torchmetrics copies the first state of a metric
    FakeTensor.__deepcopy__ = lambda self, memo: self.detach().clone()
    _ddp()


def _kernels(device: Device) -> None:
    """Let our code choose what it would on a GPU."""
    assert device.capability is not None  # a GPU's, since others are refused
    recent = device.capability >= (8, 0)
    decoder.takes_groups = lambda v, mask: (
        recent
        and mask is None
        and v.dtype in (torch.bfloat16, torch.float16)
        and v.shape[-1] <= 256
    )
    mixture.takes_groups = lambda x: recent and x.dtype == torch.bfloat16
    loss.CHUNK_LOGITS = {}
    shards_sequence = mesh.shards_sequence
    mesh.shards_sequence = lambda option, *, device, expert=1: shards_sequence(
        option, device="cuda", expert=expert
    )
    scaler.precision_arguments = lambda precision, *, mesh: (
        {"plugins": [MixedPrecision(precision, "cpu")]}
        if precision == "16-mixed"
        else {"precision": precision}
    )


def batches(mode: FakeTensorMode) -> None:
    """Let batches lose their values on the way to the device."""

    def to_fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    def moving(function: Any) -> Any:
        return lambda *args, **kwargs: apply_to_collection(
            function(*args, **kwargs), torch.Tensor, to_fake
        )

    wrap(Strategy, "batch_to_device", moving)


def experts_load(meter: Meter) -> None:
    """Let all experts get equally many rows; the host's waits for the real numbers are counted."""

    def row_lengths(x_MD: Any, leaving_RE: Any, arriving_RE: Any) -> tuple[list[int], list[int]]:
        meter.wait("item")
        lengths = _equal_parts(len(x_MD), len(leaving_RE))
        return lengths, lengths

    def row_counts(x_MI: Any, end_E: Any) -> list[int]:
        meter.wait("item")
        return _equal_parts(len(x_MI), len(end_E))

    experts.row_lengths, mixture.row_counts = row_lengths, row_counts


def _equal_parts(total: int, count: int) -> list[int]:
    return [total * (i + 1) // count - total * i // count for i in range(count)]


def _objects() -> None:
    """Plain objects travel as bytes, which fake tensors do not have. A byte travels in their place,
    so that the order of communication is known.
    """

    def byte() -> torch.Tensor:
        return torch.empty(1, dtype=torch.uint8)

    def all_gather_object(gathered: list[Any], obj: Any, group: Any = None) -> None:
        dist.all_reduce(byte(), group=group)
        gathered[:] = [obj] * len(gathered)

    def broadcast(objects: Any, src: int | None = None, group: Any = None, **others: Any) -> None:
        first = 0 if others.get("group_src") is None else None
        source = first if src is None else src
        dist.broadcast(byte(), source, group=group, group_src=others.get("group_src"))

    def send(objects: Any, dst: int | None = None, group: Any = None, **others: Any) -> None:
        dist.send(byte(), dst, group=group, group_dst=others.get("group_dst"))

    def receive(objects: Any, src: int | None = None, group: Any = None, **others: Any) -> None:
        dist.recv(byte(), src, group=group, group_src=others.get("group_src"))

    process_group.gather_object = lambda obj: [obj] * process_group.ranks()
    for owner in (dist, dist.distributed_c10d):
        owner.all_gather_object, owner.broadcast_object_list = all_gather_object, broadcast
        owner.send_object_list, owner.recv_object_list = send, receive


def _data() -> None:
    for kind in (dataloader._SingleProcessDataLoaderIter, dataloader._BaseDataLoaderIter):
        if "__next__" in vars(kind):
            wrap(kind, "__next__", with_values)
    wrap(dataloader.DataLoader, "__iter__", with_values)
    data_connector._InfiniteBarrier = MagicMock  # it makes a group of gloo


def feed(feed: Any) -> None:
    """Let a feed, and the hooks of its data module, work with values."""
    hooks = [(feed.data, name) for name, own in vars(feed.data).items() if callable(own)]
    for owner, name in [*hooks, (feed, "set_up"), (feed, "replace"), (feed.assets, "save_assets")]:
        vars(owner)[name] = with_values(getattr(owner, name))


def _ddp() -> None:
    # read values
    ddp._verify_param_shape_across_processes = ddp._sync_module_states = lambda *args, **kwargs: (
        None
    )

    def reduce(state: Any, bucket: Any) -> Any:
        # the fake group's own future holds no tensors, for which DDP asks it
        dist.all_reduce(bucket.buffer())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    reduce.__annotations__ = {}  # DDP refuses strings, as `from __future__` makes them

    def register(self: Any) -> None:
        self.model.register_comm_hook(None, reduce)

    DDP._register_ddp_hooks = register
    OrderedDDP.keep_buckets = lambda self: None  # it reads values of tensors


class BoundaryFound(BaseException):
    """Ends a simulation of the first stage once it is known what it sends."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__(boundary)
        self.boundary = boundary


def pipeline(boundary: Boundary | None) -> None:
    """Let the neighbors of a stage send what the first stage sends; None: raise BoundaryFound as
    soon as that is known.

    All stages are taken to send the same shape, as those of equal blocks do.
    """

    def send(objects: list[Any], **others: Any) -> None:
        if boundary is None:
            (sent,) = getattr(objects[0], "forward_metas", objects[0])
            raise BoundaryFound(Boundary(tuple(sent.shape), sent.dtype))

    def receive_tensors(objects: list[Any], **others: Any) -> None:
        assert boundary is not None
        shape = (samples, *boundary.shape[1:])
        objects[0] = (torch.empty(shape, dtype=boundary.dtype, device="meta"),)

    def receive(self: Any, source: int) -> Any:
        objects: list[Any] = [None]
        receive_tensors(objects)
        ((x,),) = objects
        forward = source < self.stage_index
        meta = pipeline_stage._TensorMeta(
            shape=x.shape, stride=x.stride(), dtype=x.dtype, requires_grad=forward
        )
        if forward:
            return pipeline_stage._StageForwardMeta(forward_metas=(meta,))
        return pipeline_stage._StageBackwardMeta(backward_metas=(meta,))

    def find_shapes(self: Any, stages: list[Any], *others: Any) -> None:
        for stage in stages:
            stage._inference_mode = pipeline_stage.InferenceMode.DYNAMIC

    samples = 0  # of a micro-batch of the newest schedule
    choose = Runner._schedule

    def schedule(self: Runner, inputs: Any, loss: Any) -> Any:
        nonlocal samples
        samples = len(inputs) // self.microbatches
        return choose(self, inputs, loss)

    Runner._schedule = schedule
    # torch 2.15 would ask no neighbor of a fake group about shapes; others call no such method
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        kind._initialize_pipeline_distributed_state = find_shapes
    # torch 2.11 sends tensors without values, and forward only; newer torch sends descriptions
    dist.send_object_list, dist.recv_object_list = send, receive_tensors
    pipeline_stage.PipelineStage._recv_meta = receive
