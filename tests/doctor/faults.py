"""Break one rank of an examination in a given way.

Imported by the ranks, which are forks of one server.
"""

import contextlib
import os
import queue
import time
from collections.abc import Callable
from typing import Any

from tests import forked
from tests.support.parity import harness

PRELOAD = [
    "armature.worker",
    "armature.doctor.rank",
    "armature.doctor.training",
    "armature.strategies.ddp",
]
RANKS = 2
DEADLINES = {"collective": 4.0, "steps": 12.0}  # only a fault's own is waited for to its end


def examined(
    cfg: Any, *, fault: str = "", absent: int | None = None, **deadlines: float
) -> list[Any]:
    """Run an examination's ranks with a fault in the last one.

    Return the findings of the rank that reports.

    Args:
        absent: a rank that is never started.
        deadlines: seconds, others than DEADLINES.
    """
    harness.PRELOAD += [name for name in PRELOAD if name not in harness.PRELOAD]
    context = harness._server()
    results, seconds = context.Queue(), DEADLINES | deadlines
    arguments = (cfg, fault, forked.free_port(), seconds, results)
    processes = [
        context.Process(target=_rank, args=(rank, *arguments), daemon=True)
        for rank in range(RANKS)
        if rank != absent
    ]
    for process in processes:
        process.start()
    try:
        return results.get(timeout=sum(seconds.values()) * 4)
    except queue.Empty:
        raise AssertionError(f"{fault}: no report") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    rank: int, cfg: Any, fault: str, port: int, deadlines: dict[str, float], results: Any
) -> None:
    os.environ.update(forked.joined(rank, RANKS, port))
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    from armature.doctor import rank as entry

    if fault and rank == RANKS - 1:
        for name in fault.split("+"):
            globals()[name]()

    def report(found: list[Any]) -> None:
        results.put(found)
        time.sleep(0.5)  # the queue writes in a thread, and the process may end after this

    with contextlib.suppress(BaseException):
        entry.run(cfg, deadlines=deadlines, own=[], report=report)
    os._exit(0)


# ------------------------------------------------------------ faults
def before(hook: str, change: Callable[..., None]) -> None:
    """Let a hook of the examination begin with `change(trainer, module, …)`."""
    from armature.doctor.training import Watch

    usual = getattr(Watch, hook)

    def changed(self: Any, *args: Any) -> None:
        change(*args)
        usual(self, *args)

    setattr(Watch, hook, changed)


def sleeps() -> None:
    """Never come to the first collective."""
    from armature.doctor import communication

    usual = communication._init

    def init(*args: Any) -> Any:
        usual(*args)
        time.sleep(600)

    communication._init = init


def skips_a_collective() -> None:
    """Leave a gradient's all-reduce out, as code under `if rank == 0` does."""

    def skip(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.strategy.model.require_backward_grad_sync = False

    before("on_train_batch_start", skip)


def parameter_left_out() -> None:
    """Change a gradient on this rank only, as a parameter does that DDP ignores."""

    def change(trainer: Any, module: Any, optimizer: Any) -> None:
        param = next(param for name, param in module.named_parameters() if ".1." in name)
        param.grad *= 1.1

    before("on_before_optimizer_step", change)


def a_tenth_of_the_speed() -> None:
    import torch

    usual = torch.mm

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)  # a product takes a millisecond
        return usual(*args, **kwargs)

    torch.mm = slow


def early_stopping() -> None:
    """Let the task ask for a callback that needs the validation, which is left out."""
    from lightning.pytorch.callbacks import EarlyStopping

    from armature.tasks.base import Task

    Task.configure_callbacks = lambda self: EarlyStopping("val/loss")


def wrong_address() -> None:
    """Be told another address than the others, as by a script that runs on each node."""
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"


def another_torch() -> None:
    """Run in another environment than the others."""
    import torch

    torch.__version__ = "2.12.1"


def other_data() -> None:
    """Draw other samples than the ranks of the same place on the data axis."""

    def flip(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for tensor in batch.values() if isinstance(batch, dict) else batch:
            tensor.copy_(tensor.flip(0))

    before("on_train_batch_start", flip)


def nan_in_a_layer() -> None:
    """Let a layer return NaN on this rank, as an overflow or a broken device does."""

    def spoil(trainer: Any, module: Any) -> None:
        layer = next(part for name, part in module.named_modules() if name.endswith(".1.attention"))
        layer.register_forward_hook(lambda layer, inputs, output: output * float("nan"))

    before("on_train_start", spoil)


def raises() -> None:
    from armature.doctor import training

    def check(*args: Any) -> None:
        raise ArithmeticError("the deliberate mistake")

    training.check = check
