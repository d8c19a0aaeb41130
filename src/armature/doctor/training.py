"""A few steps of the user's own model, data and strategy: replicas stay equal, and the loader keeps
up.
"""

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.types import STEP_OUTPUT
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.optim import Optimizer

from armature import worker
from armature.doctor import run_directory
from armature.doctor.finding import failure, listed, ok, warning
from armature.doctor.session import Session
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin
from armature.training import same_everywhere, timings
from armature.training.stop import StopOnSignal

GROUP = "gradients"
STEPS = 4  # the first is compared, the others are timed
MAX_DATA_WAIT = 0.2  # share of the time of so few steps; a run warns of less


def check(cfg: DictConfig, session: Session) -> None:
    """Train a few steps as the run would, without its loggers, callbacks, validation and
    checkpoints.
    """
    with tempfile.TemporaryDirectory(
        prefix="armature-doctor-", ignore_cleanup_errors=True
    ) as folder:
        session.folder = Path(folder)
        with session.limit(
            "building the model and the data", seconds=session.deadlines.steps, group="data"
        ):
            run = worker.build(rehearsal(cfg, Path(folder)), StopOnSignal())
        watch = Watch(session)
        callbacks: list[Any] = run.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        callbacks.remove(run.display)
        callbacks.insert(0, watch)
        run.task.configure_callbacks = list  # the module's own are left out, too
        with session.limit(
            "the first steps of training", seconds=session.deadlines.steps, group=GROUP
        ):
            run.trainer.fit(run.task, datamodule=run.feed.data)
            watch.add_findings(run.trainer)
        free = run_directory.free_bytes(cfg)
        if session.rank == 0 and free is not None:
            strategy = StrategyMixin.of(run.trainer)
            room = run_directory.room(
                cfg, free=free, trained=strategy.trained_count, frozen_bytes=strategy.frozen_bytes
            )
            session.add(room)


def rehearsal(cfg: DictConfig, folder: Path) -> DictConfig:
    """Return the configuration of the steps: the run's own model, data, optimizer and strategy, and
    nothing written.
    """
    cfg = cfg.copy()
    OmegaConf.set_struct(cfg, False)
    changes = {
        "run.dir": str(folder),
        "run.root": str(folder),
        "run.name": "doctor",
        "run.report": False,
        "resume": "never",
        "trainer.max_time": None,
        "trainer.limit_val_batches": 0,
        "trainer.val_every_n_steps": None,
        "trainer.test_at_end": False,
        "trainer.profile": False,
        "trainer.log_every_n_steps": STEPS + 1,
        "trainer.on_nan": "ignore",  # the report names the rank
        "checkpoint.every_n_steps": None,
        "checkpoint.every_n_minutes": None,
        "checkpoint.keep_every_n_steps": None,
        "checkpoint.at_end": False,
        "checkpoint.keep_best": 0,
        "checkpoint.root": None,
        "checkpoint.background": False,
        "callbacks": None,
        "logger": None,
        "launch.hang_timeout": None,
    }
    steps, epochs = cfg.trainer.max_steps, cfg.trainer.max_epochs
    # else they stay, since schedules are as long as the run
    if steps < STEPS if steps else not epochs:
        changes |= {"trainer.max_steps": STEPS, "trainer.max_epochs": None}
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, merge=False)
    return cfg


class Watch(L.Callback):
    """Compare the ranks' first gradients, and time the steps after the first.

    The run's own check (`training.same_everywhere`) compares weights, rates and batches at the end.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.losses: list[Tensor] = []
        self.batches: list[dict[str, Any]] = []  # the first of each rank, by its digest
        self.compared = False
        self._began = 0.0
        self.steps = 0  # fewer than STEPS if the run is shorter
        self.seconds = self.waited = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        # schedules have the run's length by now
        loop.max_global_batches = min(STEPS, loop.max_global_batches or STEPS)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.batches:
            place = StrategyMixin.of(trainer).data_rank
            own = {"data rank": place, "batch": same_everywhere.digest(batch)}
            self.batches = process_group.all_gather_object(own)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        strategy = StrategyMixin.of(trainer)
        if self.compared or hasattr(strategy, "deepspeed_engine"):
            return  # DeepSpeed's gradients are its engine's
        self.compared = True
        if names := [
            n for n, p in pl_module.named_parameters() if p.requires_grad and p.grad is None
        ]:
            what = f"{listed(names)}: no gradient in the first step, so they do not train."
            remedy = "Remove them, set requires_grad=False, or use them in the loss."
            self.session.add(warning(GROUP, what, remedy=remedy))
        if not pl_module.automatic_optimization or not strategy.replicates_weights:
            return
        weights = strategy.replicated_weights().items()
        gradients = {name: param.grad for name, param in weights if param.grad is not None}
        own = {"gradients": same_everywhere.sums(gradients)}
        everyones = process_group.all_gather_object(own)
        if self.session.rank == 0 and (found := [*same_everywhere.unlike(everyones, "gradients")]):
            more = f" {len(found) - 1} more differ." if len(found) > 1 else ""
            what = f"The gradient differs between replicas: {found[0][1]}.{more}"
            remedy = (
                "It is left out of the synchronization of gradients, or computed by rank-dependent "
                "code: look for parameters not registered in the module, for no_sync, and for "
                "random numbers outside of torch's generators."
            )
            self.session.add(failure(GROUP, what, remedy=remedy))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.losses.append(outputs["loss"].detach().mean())  # of several numbers, too
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.steps += 1
        wait: timings.DataWait = trainer.fit_loop.epoch_loop.data_wait  # pyright: ignore[reportAttributeAccessIssue]
        if not self._began:
            wait.clear()
            self._began = time.perf_counter()
        elif trainer.global_step >= STEPS:
            self.waited += wait.read()
            self.seconds = time.perf_counter() - self._began

    def add_findings(self, trainer: L.Trainer) -> None:
        """Add what is known at the end: the loss, the batches and the loader's speed."""
        session = self.session
        losses = enumerate(map(float, self.losses))
        bad = next((index for index, loss in losses if not math.isfinite(loss)), math.inf)
        first = min(process_group.all_gather_object(bad))
        if bad == first < math.inf:  # on other ranks it follows
            what = f"The loss of batch {bad + 1} is {float(self.losses[int(bad)])}."
            remedy = "Type debug=nan to see the operation; look at the data and the learning rate."
            session.add(failure(GROUP, what, remedy=remedy, where=session.name()))
        if session.rank == 0:
            if first == math.inf:
                what = f"Steps: {self.steps}, ranks: {session.ranks}. The loss is finite"
                same = ", and the weights that ranks share are the same" * (session.ranks > 1)
                session.add(ok(GROUP, f"{what}{same}."))
            self._add_batches()
        self._add_loader((STEPS - 1) * trainer.accumulate_grad_batches)

    def _add_batches(self) -> None:
        count = len({each["data rank"] for each in self.batches})
        if found := same_everywhere.repeated(self.batches):
            what = f"{found}: each must have its own part of the batch."
            remedy = (
                "The data module serves the same batches on every rank: leave the sampler to "
                "armature, and let no IterableDataset ignore the rank."
            )
            self.session.add(failure("data", what, remedy=remedy))
        elif count > 1:
            what = f"The first batches of the {count} data ranks differ, as they must."
            self.session.add(ok("data", what))

    def _add_loader(self, batches: int) -> None:
        if not self.seconds:
            return
        share, each = self.waited / self.seconds, self.waited / batches
        if share > MAX_DATA_WAIT and each > timings.UNAVOIDABLE_SECONDS:
            work = (self.seconds - self.waited) / batches
            what = f"The loader needs {each:.3g} s per batch and the step {work:.3g} s."
            found = warning("data", what, remedy=timings.REMEDY, where=self.session.name())
            self.session.add(found)
        elif self.session.rank == 0:
            what = f"The loader keeps up: the model waits {share:.0%} of the time for its batches."
            self.session.add(ok("data", what))
