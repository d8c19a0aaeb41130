"""Restore Lightning's counters after a resume at any step, also on other ranks or with another
micro-batch size.
"""

import inspect
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from armature.checkpoint import changes, plain, schedules
from armature.errors import ConfigError
from armature.parallel import process_group, randomness
from armature.strategies.base import StrategyMixin
from armature.training import epoch_metrics, epoch_start, user_state
from armature.training.progress import completed_batches, feed_of
from armature.training.run_hooks import RunHooks
from armature.training.trainer import Trainer as OurTrainer

log = logging.getLogger(__name__)
LENGTHS = ("T_max", "T_0", "total_steps", "total_iters", "step_size", "milestones", "_milestones")
# of a schedule's state at a resume: where it is, and its lengths, which torch's own keep
KEPT = ("last_epoch", "_step_count", "_last_lr", "_schedule_phases", *LENGTHS)
_ANOTHER_RUN = (
    "Resume with what the run began with, or begin another run with its weights: python "
    "scripts/convert.py RUN x.ckpt, then run.name=NEW resume=x.ckpt."
)
# the trainer's newest values
OF_TRAINER = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class RestoreProgress(RunHooks, Callback):
    """Set Lightning's counters from the optimizer steps and samples seen, instead of from its
    checkpoint.

    Lightning's checkpoint counts micro-batches, whose size depends on the layout, and its loops
    guess from half-updated counts where the checkpoint was saved. After a stop at an epoch's end
    they guess wrong: hooks are skipped, and later stops are counted in the wrong epoch.

    A checkpoint always holds whole steps. If it was saved at an epoch's last step, the end-of-epoch
    hooks and schedulers run after the resume. Values that `self.log` and metric objects have
    collected so far are restored, too.

    Args:
        settings: tells this run and its settings from others: with the same ones a resume goes no
            further than the step at which a callback has ended the run.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings
        self._saved: Mapping[str, Any] = {}  # `state_dict` of the checkpoint
        # of this rank, when its epoch began; None: no hook can draw
        self._random: dict[str, Any] | None = None
        self._user_state: user_state.UserState | None = None  # None: training has not begun
        self._checkpoint: Mapping[str, Any] = {}  # that is loaded
        self._trainer: OurTrainer | None = None
        self._built: dict[str, Any] = {"schedules": [], "callbacks": {}}  # states before training
        self._then: Mapping[str, Any] = {}  # the same of the start that saved the checkpoint
        # as built, of attributes that the module's own hook takes from the checkpoint
        self._loaded: user_state.Marks = user_state.NONE

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        if stage == "fit":
            self._built = {"schedules": [], "callbacks": _states(trainer)}
        strategy = StrategyMixin.of(trainer)
        strategy.before_loading = partial(self.loading, trainer)
        # hooks of the start see optimizers as in a first start, and what they change is undone
        strategy.loads_optimizers_last = bool(epoch_start.users_hooks(trainer))

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        if trainer is None:  # an error before `setup`, after which a callback saves
            return {}
        strategy, module = StrategyMixin.of(trainer), trainer.lightning_module
        loop = trainer.fit_loop.epoch_loop
        before = loop.val_loop.before.attributes if loop.val_loop.before else {}
        own = (
            epoch_metrics.collect(loop._results),
            epoch_metrics.metric_states(module, evaluated=loop.val_loop._results),
            strategy.data_rank,
            self._random,
            self._user_state.changed(before) if self._user_state else {},
        )
        logged, states, data_ranks, random, attributes = zip(
            *process_group.all_gather_object(own), strict=True
        )
        return {
            "epoch": trainer.current_epoch,
            "metrics": {each: epoch_metrics.copied(getattr(trainer, each)) for each in OF_TRAINER},
            "step_values": sorted(trainer.step_metrics.step_values),
            "data_ranks": list(data_ranks),
            "logged": list(logged),
            "states": list(states),
            "random": {"layout": strategy.layout, "ranks": list(random)},
            "attributes": user_state.of_ranks(attributes),
            "built": self._built,
            "closed": trainer.fit_loop.closed,
            # with min_steps a run goes on after it was to stop
            "ended": trainer.should_stop and not loop.min_steps and self._settings,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict
        assert self._trainer is not None
        now = user_state.marks(self._trainer)
        self._loaded = {path: mark for path, mark in self._loaded.items() if now.get(path) != mark}
        layout = StrategyMixin.of(self._trainer).layout
        self._random = randomness.of_this_rank(state_dict["random"], layout) or self._random

    def loading(self, trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
        """Before modules and callbacks load their own state."""
        self._loaded = user_state.marks(trainer)
        states = checkpoint.get("callbacks", {})
        self._then = states.get(self.state_key, {}).get("built", {})
        now = plain.restored(self._built["callbacks"])
        for key, then in self._then.get("callbacks", {}).items():
            if key in states and key in now:
                states[key] = changes.merge(states[key], then=then, now=now[key])
        feed = feed_of(trainer)
        if feed.state_key in states:  # Lightning compares it with max_epochs: data may have grown
            epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
            epochs["completed"] = min(
                epochs["completed"], states[feed.state_key]["samples_seen"] // feed.train_size
            )
        self._checkpoint = checkpoint
        if trainer.lr_scheduler_configs:  # strategies that load after on_fit_start
            self._find_schedules(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._marks = {**user_state.marks(trainer), **self._loaded}
        self._find_schedules(trainer)

    def _find_schedules(self, trainer: Trainer) -> None:
        """Put the schedules that others hold back into the checkpoint, which Lightning loads
        then.
        """
        checkpoint, self._checkpoint = self._checkpoint, {}
        found = [config.scheduler for config in trainer.lr_scheduler_configs]
        kinds = [type(each).__name__ for each in found]
        if not self._built["schedules"]:  # before their state is loaded
            self._built |= plain.plain_checkpoint(
                {"schedules": [*map(schedules.state_of, found)]}
            ) | {"kinds": kinds}
        for then, now in zip(self._then.get("kinds", ()), kinds, strict=False):
            if then != now:
                raise ConfigError(
                    f"The learning rate's schedule was {then}, and {now} cannot continue from its "
                    f"state. {_ANOTHER_RUN}"
                )
        saved = checkpoint.get("lr_schedulers", ())
        built = self._then.get("schedules", ()), plain.restored(self._built["schedules"])
        for number, (state, then, now) in enumerate(zip(saved, *built, strict=False)):
            saved[number] = changes.merge(state, then=then, now=now, keep=KEPT)
            if _lengths(then) != _lengths(now) and process_group.rank() == 0:
                log.warning(
                    "%s was built with %s, and keeps %s of the run's first start: the learning "
                    "rates are not those of the new length. %s",
                    kinds[number],
                    _lengths(now),
                    _lengths(then),
                    _ANOTHER_RUN,
                )
        for number, (schedule, state) in enumerate(zip(found, [*saved], strict=False)):
            saved[number] = schedules.with_objects(schedule, state)

    def training_begins(self, trainer: OurTrainer) -> None:
        """Note that a run goes no further which a callback had ended, and that one which was
        stopped after its last step still has to end its epoch. Load again what waits for a batch.
        """
        step, loop = completed_batches(trainer), trainer.fit_loop
        progress: Any = loop.epoch_progress.current
        if self._saved.get("ended") == self._settings:
            loop.epoch_loop.max_global_batches = step
        done = loop.epoch_loop.last_batch_is_done
        if loop.restarting and not done:
            progress.processed = 0  # the end of a shorter run had ended its epoch, too
        loop.owes_epoch_end = bool(step) and done and progress.ready > progress.completed
        loop.closed = loop.done and self._saved.get("closed", True)
        if loop.closed:  # no hook follows, but perhaps a test
            self.training_ends(trainer)

    def training_ends(self, trainer: OurTrainer) -> None:
        if self._user_state is None:  # a resume without a step left
            self.first_batch_follows(trainer)
            StrategyMixin.of(trainer).random_state.restore()

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        step = completed_batches(trainer)
        if not step:
            return
        feed = feed_of(trainer)
        epoch, position = divmod(feed.samples_seen, feed.train_size)
        batches = position // feed.global_batch_size * trainer.accumulate_grad_batches
        closing = not batches and self._saved["epoch"] < epoch
        if closing:
            epoch, batches = epoch - 1, int(trainer.num_training_batches)
        trainer.fit_loop.restore_progress(epoch=epoch, step=step, batches=batches, closing=closing)
        trainer.fit_loop.owes_schedules = bool(batches)

    def first_batch_follows(self, trainer: OurTrainer) -> None:
        self._user_state = user_state.UserState(trainer, self._marks)
        if completed_batches(trainer):
            self._take_up(trainer)

    def _take_up(self, trainer: OurTrainer) -> None:
        """Let the checkpoint have the last word, after all hooks of the start; replace what they
        have logged, which an undisturbed run logs once, by what was collected.
        """
        strategy, module = StrategyMixin.of(trainer), trainer.lightning_module
        # the resume is, or at its end with hooks that are due
        if within_epoch := trainer.fit_loop.owes_schedules:
            self._random = self._random or epoch_start.random_state(trainer)
            epoch_start.repeat(trainer, self._random)
        epoch_start.load_again(trainer)
        user_state.put_back(trainer, user_state.of_rank(self._saved["attributes"]), self._marks)
        ranks = {
            "rank": trainer.global_rank,
            "saved_data_ranks": self._saved["data_ranks"],
            "data_ranks": process_group.all_gather_object(strategy.data_rank),
        }
        epoch_metrics.restore_states(module, self._saved["states"], **ranks)
        for each, values in self._saved["metrics"].items():
            getattr(trainer, each).update(values)
        trainer.step_metrics.step_values.update(self._saved["step_values"])
        epoch_metrics.restore(
            trainer.fit_loop.epoch_loop._results,
            self._saved["logged"] if within_epoch else [{} for _ in self._saved["logged"]],
            module,
            strategy,
            **ranks,
        )

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        trainer.fit_loop.epoch_loop.on_iteration_done()  # it is no resumed epoch any more

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._random = epoch_start.random_state(trainer)


def _states(trainer: Trainer) -> dict[str, Any]:
    """Return what users' callbacks save of their constructors' arguments, before they train."""
    found = {}
    for each in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if not type(each).__module__.startswith("armature."):
            with suppress(Exception):  # its state may need more than its constructor
                arguments = inspect.signature(type(each)).parameters
                found[each.state_key] = plain.plain(
                    {key: value for key, value in each.state_dict().items() if key in arguments}
                )
    return found


def _lengths(state: Any) -> dict[str, Any]:
    """Return the lengths in a schedule's state, and in those of the schedules that it consists of.

    By place, as in `1.T_max`.
    """
    if not isinstance(state, Mapping):
        return {}
    found = {name.lstrip("_"): state[name] for name in LENGTHS if name in state}
    for place, inner in enumerate(state.get("_schedulers") or ()):
        found |= {f"{place}.{name}": value for name, value in _lengths(inner).items()}
    return found
