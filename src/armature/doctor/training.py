"""A few steps of the user's own model, data and strategy: replicas stay equal, and the loader keeps
up.
"""

from __future__ import annotations

import math
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.types import STEP_OUTPUT
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.optim import Optimizer

from armature import worker
from armature.doctor import replicas, run_directory
from armature.doctor.finding import Finding, failure, ok, warning
from armature.doctor.finite import FiniteWatch
from armature.doctor.session import Session
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin
from armature.training import timings
from armature.training.same_everywhere import SameEverywhere
from armature.training.stop import StopOnSignal

GROUP = "gradients"
STEPS = 4  # the first is compared, the others are timed
MAX_DATA_WAIT = 0.2  # share of the time of so few steps; a run warns of less
MOST_NAMES = 3


def check(cfg: DictConfig, session: Session) -> None:
    """Train a few steps as the run would, without its loggers, callbacks, validation and
    checkpoints.
    """
    with tempfile.TemporaryDirectory(
        prefix="armature-doctor-", ignore_cleanup_errors=True
    ) as folder:
        session.folder = Path(folder)
        with session.limit(
            "building the model and the data", seconds=session.deadlines.building, group="data"
        ):
            run = worker.build(rehearsal(cfg, Path(folder)), StopOnSignal())
        watch = Watch(session)
        callbacks: list[Any] = run.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        callbacks.remove(run.display)
        # would end the run before `Watch` names the ranks
        callbacks[:] = [each for each in callbacks if not isinstance(each, SameEverywhere)]
        callbacks.insert(0, watch)
        with session.limit(
            "the first steps of training", seconds=session.deadlines.steps, group=GROUP
        ):
            run.trainer.fit(run.task, datamodule=run.feed.data)
            session.add(*watch.findings(run))
        if session.rank == 0:
            free = run_directory.free_bytes(cfg)
            if free is not None:
                strategy = StrategyMixin.of(run.trainer)
                trained, frozen = strategy.trained_count, strategy.frozen_bytes
                session.add(
                    *run_directory.room(cfg, free=free, trained=trained, frozen_bytes=frozen)
                )


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
    if "on_nan" in cfg.trainer:
        # the doctor's own report names the rank and the module
        changes["trainer.on_nan"] = "ignore"
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value, merge=False)
    return cfg


class Watch(L.Callback):
    """Compare the ranks in the first optimizer step, and time the following ones."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.found: list[Finding] = []
        self.losses: list[Tensor] = []
        self.compared_gradients = self.compared_weights = 0
        self.without_gradient: list[str] = []
        self.modules = FiniteWatch()
        self._first_batch = ExitStack()
        self._began = 0.0
        self.steps = 0  # fewer than STEPS if the run is shorter
        self.seconds = self.waited = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        # schedules have the run's length by now
        loop.max_global_batches = min(STEPS, loop.max_global_batches or STEPS)
        self._compare("initial weight", self._weights(trainer, pl_module))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0 and trainer.current_epoch == 0:
            place = StrategyMixin.of(trainer).data_rank
            everyones = process_group.all_gather_object((place, replicas.batch_print(batch)))
            self._add(list(replicas.batch_findings(everyones)))
            count = len({place for place, _ in everyones})
            if not self.found and count > 1:
                self._add(
                    [
                        ok(
                            "data",
                            f"The first batches of the {count} data ranks differ, as they must.",
                        )
                    ]
                )
            self._first_batch.enter_context(self.modules.in_forward(pl_module))

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        strategy = StrategyMixin.of(trainer)
        if (
            self.compared_gradients
            or not pl_module.automatic_optimization
            or _keeps_gradients(strategy)
        ):
            return
        params = self._weights(trainer, pl_module)
        gradients = {name: param.grad for name, param in params.items() if param.requires_grad}
        self.without_gradient = [name for name, gradient in gradients.items() if gradient is None]
        self.compared_gradients = self._compare("gradient", gradients)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._first_batch.close()
        if isinstance(outputs, dict) and "loss" in outputs:
            self.losses.append(outputs["loss"].detach().mean())  # of several numbers, too
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.steps += 1
        wait: timings.DataWait = trainer.fit_loop.epoch_loop.data_wait  # pyright: ignore[reportAttributeAccessIssue]
        if not self._began:
            self.compared_weights = self._compare(
                "weight after a step", self._weights(trainer, pl_module)
            )
            wait.clear()
            self._began = time.perf_counter()
        elif trainer.global_step >= STEPS:
            self.waited += wait.read()
            self.seconds = time.perf_counter() - self._began

    def _weights(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        strategy = StrategyMixin.of(trainer)
        return dict(strategy.weights()) if strategy.can_read_weights else {}

    def _compare(self, what: str, tensors: dict[str, Any]) -> int:
        """Compare this rank's tensors with the others'. Return how many tensors were compared."""
        everyones = process_group.all_gather_object(replicas.prints(tensors))
        self._add(list(replicas.difference(what, everyones, name=self.session.name)))
        return len(tensors)

    def _add(self, found: list[Finding]) -> None:
        if self.session.rank == 0:  # every rank has found the same
            self.found += found

    def findings(self, run: worker.Run) -> list[Finding]:
        """Return what was found, with the loss, the parameters without a gradient and the loader's
        speed.
        """
        ranks, found = self.session.ranks, list(self.found)
        if (bad := self._bad_loss()) is not None:
            found.append(bad)
        if self.without_gradient:
            names = ", ".join(self.without_gradient[:MOST_NAMES])
            more = f" and {len(self.without_gradient) - MOST_NAMES} more" * (
                len(self.without_gradient) > MOST_NAMES
            )
            what = f"{names}{more}: no gradient in the first step, so they do not train."
            remedy = (
                "Remove them, set requires_grad=False, or use them in the loss (ddp waits "
                "for each parameter)."
            )
            found.append(warning(GROUP, what, remedy=remedy))
        if self.session.rank == 0:
            if ranks > 1 and not any(
                each.group == GROUP and each.level == "failure" for each in found
            ):
                found.append(ok(GROUP, self._equal(ranks)))
            elif ranks == 1:
                found.append(
                    ok(
                        GROUP,
                        f"{self._ran()}; the loss is finite. One rank has no replicas to compare.",
                    )
                )
        found += self._loader(run)
        return found

    def _bad_loss(self) -> Finding | None:
        """Return the finding of a rank on which a loss was not finite before it was on others."""
        losses = [float(loss) for loss in self.losses]
        bad = next(
            (index for index, loss in enumerate(losses) if not math.isfinite(loss)), math.inf
        )
        if bad > min(process_group.all_gather_object(bad)) or bad == math.inf:  # all ranks gather
            return None
        what = f"The loss of batch {bad + 1} is {losses[int(bad)]}. {self._first_module()}".rstrip()
        remedy = (
            "Type debug=nan to see the operation that made it; look at the data and the "
            "learning rate."
        )
        return failure(GROUP, what, remedy=remedy, where=self.session.name())

    def _first_module(self) -> str:
        if (first := self.modules.first()) is None:
            return ""
        inputs = "its input is finite" if first.clean else "its input is not finite either"
        return f"The first module whose output is not finite is {first.name}; {inputs}."

    def _ran(self) -> str:
        return f"{self.steps} step{'s' * (self.steps != 1)} ran"

    def _equal(self, ranks: int) -> str:
        if not self.compared_weights:
            return (
                f"{self._ran()} on {ranks} ranks. This strategy keeps no readable weights, so "
                "none were compared."
            )
        gradients = f"{self.compared_gradients} gradients and " if self.compared_gradients else ""
        return (
            f"After a step of the run's own model on {ranks} ranks, "
            f"{gradients}{self.compared_weights} weights are "
            "equal to the bit wherever ranks hold the same part."
        )

    def _loader(self, run: worker.Run) -> list[Finding]:
        batches = (STEPS - 1) * run.trainer.accumulate_grad_batches
        if not self.seconds:
            return []
        share, each = self.waited / self.seconds, self.waited / batches
        if share > MAX_DATA_WAIT and each > timings.UNAVOIDABLE_SECONDS:
            work = (self.seconds - self.waited) / batches
            what = (
                f"The loader needs {each * 1e3:.3g} ms per batch and the step {work * 1e3:.3g} "
                "ms: the model waits."
            )
            return [warning("data", what, remedy=timings.REMEDY, where=self.session.name())]
        if self.session.rank:
            return []
        return [
            ok(
                "data",
                f"The loader keeps up: the model waits {share:.0%} of the time for its batches.",
            )
        ]


def _keeps_gradients(strategy: Any) -> bool:
    """Return whether gradients are the engine's, and not in `param.grad` (DeepSpeed)."""
    return hasattr(strategy, "deepspeed_engine")
