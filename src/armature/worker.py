"""One rank of a run: build data, task, strategy, callbacks, loggers and Trainer; fit, test, report.

A rank of the elastic agent enters at `main` (`armature.launcher.rank`), a run of one process at
`run`.
"""

import atexit
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from armature import config, loggers, run_dir
from armature.checkpoint import directory as checkpoint_directory
from armature.checkpoint import resume, storage
from armature.checkpoint.state import holds, is_weights_only
from armature.data import batching, feed
from armature.data.hf import HFData
from armature.data.labels import LabeledData
from armature.errors import EXIT_CONFIG, ConfigError, EndedByCode
from armature.finetune import check as pretrained
from armature.launcher import environment, lock
from armature.launcher.rank import leave, leave_at_exit
from armature.layout import Layout
from armature.loading import build_task, constructors
from armature.parallel import process_group, scaler
from armature.strategies.base import StrategyMixin
from armature.training import process, report
from armature.training.checkpointing import Checkpointing
from armature.training.display import Bar, Display
from armature.training.errors import RecordError, record, refusal_of
from armature.training.limits import Limits
from armature.training.metrics_csv import MetricsCSV
from armature.training.micro_batch import agree
from armature.training.not_finite import NotFiniteGuard
from armature.training.restore_progress import RestoreProgress
from armature.training.run_hooks import RunHooks
from armature.training.same_everywhere import SameEverywhere
from armature.training.samples import Samples, preview_of
from armature.training.step_log import StepLog
from armature.training.stop import StopOnSignal, StoppedBySignal, seconds_of
from armature.training.trainer import Trainer
from armature.training.users_callbacks import BeginAverages, CheckCallbacks
from armature.training.watchdog import Watchdog
from armature.validation import combinations, micro_batch, relations, resize
from armature.validation.composing import instantiate

log = logging.getLogger(__name__)

COLLECTIVE_SECONDS = 1800.0  # after which a collective fails with launch.hang_timeout=auto
AUTO_CLIP = 1.0  # gradient norm to clip to with trainer.gradient_clip_val=auto


@dataclass(frozen=True, kw_only=True)
class Run:
    """The objects that a run is made of."""

    cfg: DictConfig
    feed: feed.Feed
    task: L.LightningModule
    trainer: Trainer
    checkpoint: Path | None  # to resume from
    step_log: StepLog
    guard: NotFiniteGuard
    checkpointing: Checkpointing
    stop: StopOnSignal
    display: Display
    limits: Limits
    samples: Samples


def run(cfg: DictConfig) -> None:
    """Train, test and write summary.json.

    Called on every rank, after its process group was made.
    """
    stop = StopOnSignal(
        max_seconds=seconds_of(cfg.trainer.max_time), deadline=environment.deadline()
    )
    stop.install()
    log_file = process.prepare(cfg, Path(cfg.run.dir))
    try:
        L.seed_everything(cfg.seed, workers=True, verbose=False)
        with constructors():
            built = build(cfg, stop)
        fit_and_test(built)
    except (SystemExit, KeyboardInterrupt) as error:  # of code: signals have handlers
        raise EndedByCode.by(error) from error
    except Exception as error:
        process.keep_traceback(error, log_file)
        raise
    finally:
        stop.restore()
        process.close(log_file)


def build(cfg: DictConfig, stop: StopOnSignal) -> Run:
    """Build the objects that a configuration names."""
    directory = Path(cfg.run.dir)
    layout = Layout.of(cfg)
    fed, batches, checkpoint = _build_feed(cfg, layout)
    log_file = directory / "logs" / f"rank_{environment.rank():04d}.log"
    watchdog = Watchdog(cfg.launch.hang_timeout, log=log_file)  # preparing data may take any time
    task, strategy, checkpoint = _build_task(cfg, checkpoint)
    saved = (checkpoint and checkpoint_directory.read_manifest(checkpoint)) or {}
    step = saved.get("step")
    limits = Limits.of(
        cfg,
        samples_per_epoch=fed.train_size,
        global_batch_size=fed.global_batch_size,
        step=step or 0,
        seen=saved.get("samples", 0),
    )

    csv, guard = MetricsCSV(directory), NotFiniteGuard(cfg.trainer.on_nan, directory)
    same, samples = SameEverywhere(), Samples(cfg, planned_steps=limits.global_batches)
    step_log = StepLog(
        csv, fed, every_n_steps=cfg.trainer.log_every_n_steps, rows_read=guard.rows_read
    )
    checkpointing = Checkpointing(
        resume.folder(directory, cfg),
        step_log,
        cfg.checkpoint,
        manifest_entries={"config_hash": run_dir.fingerprint(cfg)},
        before_save=[watchdog.rest, same.check],
    )
    start_line = partial(report.start_line, cfg, batches, checkpoint)
    chosen = [instantiate(each, _convert_="all") for each in (cfg.callbacks or {}).values()]
    display = (
        Display(start_line)
        if any(isinstance(callback, ProgressBar) for callback in chosen)
        else Bar(start_line, step_log=step_log, total_steps=limits.global_batches)
    )
    callbacks = [
        RecordError(cfg),  # first: it records what any other raises
        CheckCallbacks(cfg, task.automatic_optimization, batches.accumulate),
        watchdog,
        fed,
        SaveAssets(fed.assets, directory),
        # before those whose counters it restores
        RestoreProgress(
            [  # without the group `trainer`, which says on how many devices, too
                cfg.run.id,
                limits.global_batches,
                cfg.trainer.max_time,
                *map(config.without_secrets(cfg).get, resume.GROUPS[:-1]),
            ]
        ),
        guard,
        step_log,  # before monitors, which add columns to it
        same,
        BeginAverages(),
        *chosen,
        stop,  # before a save, which it may make the last one
        display,
        samples,
        checkpointing,  # last, as Lightning orders them: it saves what all others have changed
    ]
    trainer = Trainer(
        strategy=strategy,
        callbacks=callbacks,
        logger=[*loggers.build(cfg, step=step), csv],  # a module's self.logger is the first
        profiler=_profiler(cfg, directory),
        max_global_batches=limits.global_batches,
        max_steps=limits.global_batches
        if task.automatic_optimization
        else -1,  # manual: any number of steps per batch
        max_epochs=limits.epochs,
        default_root_dir=directory,
        **_trainer_arguments(cfg, layout, batches, task),
    )
    trainer.fit_loop.epochs_follow = cfg.trainer.max_epochs is None
    return Run(
        cfg=cfg, feed=fed, task=task, trainer=trainer, checkpoint=checkpoint, step_log=step_log,
        guard=guard, checkpointing=checkpointing, stop=stop, display=display, limits=limits,
        samples=samples,
    )  # fmt: skip


def _build_feed(cfg: DictConfig, layout: Layout) -> tuple[feed.Feed, batching.Batches, Path | None]:
    """Return the prepared data, how steps divide them, and the checkpoint to resume from."""
    directory = Path(cfg.run.dir)
    fed = feed.build(micro_batch.decided(cfg))
    checkpoint = _checkpoint_to_resume(cfg, directory)
    _prepare(fed)
    fed.data.setup(stage="fit")
    _number_classes(cfg, fed, checkpoint)  # before the training samples get their numbers
    fed.set_up()
    relations.check_found_sizes(cfg.model, fed.assets.found_sizes)
    fed.limits = {
        split: cfg.trainer[f"limit_{split}_batches"] for split in ("train", "val", "test")
    }
    batches = _plan_batches(fed, layout.data_ranks)
    combinations.check_graphs(layout.options["compile_mode"], batches.accumulate)
    return fed, batches, checkpoint


def _build_task(
    cfg: DictConfig, checkpoint: Path | None
) -> tuple[L.LightningModule, Any, Path | None]:
    """Return the task, the strategy, and the checkpoint, unless that holds initial weights only."""
    task, strategy = build_task(cfg), instantiate(cfg.strategy)
    strategy.held = holds(checkpoint)
    # a file of Lightning's may lack weights
    strategy.draws_all = checkpoint is None or checkpoint_directory.is_file(checkpoint)
    strategy.base = process_group.on_rank_0(partial(pretrained.left_out, cfg, checkpoint))
    strategy.on_nan = cfg.trainer.on_nan
    if checkpoint is not None and is_weights_only(checkpoint):
        strategy.initial_weights, checkpoint = checkpoint, None
    return task, strategy, checkpoint


def _plan_batches(fed: feed.Feed, data_ranks: int) -> batching.Batches:
    """Plan the batches. A step takes at most one epoch, so that each epoch has its own end."""
    typed, size, micro = fed.global_batch_size, fed.train_size, fed.micro_batch_size
    if size < typed:
        unit = data_ranks * (micro if isinstance(micro, int) else 1)
        note = f"data.global_batch_size={typed}, but an epoch has {size} samples"
        if size % unit:
            most = size - size % (unit if size > unit else data_ranks)
            remedy = f"Type data.global_batch_size={most} data.micro_batch_size=auto"
            raise ConfigError(
                f"{note}, which do not divide among {data_ranks} data ranks with "
                f"data.micro_batch_size={micro}. {remedy if most else 'Train on fewer ranks'}."
            )
        if process_group.rank() == 0:
            log.info("%s: each step takes them all.", note)
        fed.global_batch_size = size
    return batching.plan_batches(fed.global_batch_size, micro, data_ranks)


def _prepare(fed: feed.Feed) -> None:
    """Prepare the data: on all ranks at once if they lock what they write, else on one, as
    Lightning does.
    """
    data = fed.data
    if fed.assets.prepares_on_every_rank:
        data.prepare_data()
        return
    chosen = environment.local_rank() == 0 and (
        data.prepare_data_per_node or process_group.rank() == 0
    )

    def prepare() -> None:
        try:
            if chosen:
                data.prepare_data()
        finally:  # a download may take longer than any collective of training
            process_group.patient_barrier()

    process_group.on_all_ranks(prepare)


def _number_classes(cfg: DictConfig, fed: feed.Feed, checkpoint: Path | None) -> None:
    """Let classes have the numbers that the weights know them by. Raises ConfigError."""
    if checkpoint is not None:
        if isinstance(fed.data, LabeledData):  # under checkpoint.root there is no run directory
            fed.data.load_assets(resume.run_of(checkpoint) or Path(cfg.run.dir))
    elif found := pretrained.number_classes(cfg, fed.assets):
        raise ConfigError(found)


class SaveAssets(RunHooks, L.Callback):
    """Save what using the model needs: once a checkpoint that does not fit the data is refused."""

    def __init__(self, assets: Any, directory: Path) -> None:
        self._assets, self._directory = assets, directory

    def training_begins(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero:
            self._assets.save_assets(self._directory)


def fit_and_test(run: Run) -> None:
    """Train until the last step or a signal, test, and report."""
    trainer, step_log, data = run.trainer, run.step_log, run.feed.data
    # a service that fails ends a first start; a resume continues without it
    trainer.loggers = loggers.without_failed(
        trainer.loggers,
        process_group.on_rank_0(partial(loggers.open_problems, trainer.loggers)),
        resumes=run.checkpoint is not None,
    )
    for logger in trainer.loggers if process_group.rank() == 0 else ():
        logger.log_hyperparams(config.without_secrets(run.cfg))
    tests = (
        run.cfg.trainer.test_at_end
        and run.cfg.trainer.limit_test_batches != 0
        and is_overridden("test_step", run.task)
        and is_overridden("test_dataloader", data, L.LightningDataModule)
    )
    if tests and type(data) is HFData:
        data.test_dataloader()  # a split that is not there is reported before the training
    started = time.monotonic()
    _collect_garbage_again()
    try:
        trainer.fit(run.task, datamodule=data, ckpt_path=run.checkpoint)
        # the last step's loss is the mean over all ranks; a module logs its own rank's
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name not in trainer.step_metrics.step_values and not name.endswith("_step")
            if torch.as_tensor(value).numel() == 1
        } | _last_row(step_log)
        # at the last step, or earlier by a callback such as EarlyStopping
        reason = run.stop.received or "finished"
        if reason == "finished" and tests:
            step_log.csv.trained = {*metrics}
            # one for each loader
            for tested in trainer.test(run.task, datamodule=data, verbose=False):
                metrics.update(step_log.csv.beside_trained(tested))
    except StoppedBySignal:
        reason, metrics = str(run.stop.received), _last_row(step_log)
    except Exception as error:
        if (refused := refusal_of(error, run.task)) is None:
            raise
        raise refused from error
    step_log.csv.flush()
    strategy = StrategyMixin.of(trainer)
    seconds = time.monotonic() - started
    shown = None
    if reason == "finished" and strategy.can_generate and (preview := preview_of(run.task)):
        strategy.return_to_device()
        shown = preview()
    report.finish(run, reason=reason, metrics=metrics, seconds=seconds, preview=shown)


def _trainer_arguments(
    cfg: DictConfig, layout: Layout, batches: batching.Batches, task: L.LightningModule
) -> dict[str, Any]:
    """Return Lightning's arguments that follow from the `trainer` group."""
    trainer, every = cfg.trainer, cfg.trainer.val_every_n_steps
    if not task.automatic_optimization:
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
        if found := combinations.problems(
            plain, layout, is_manual=True, accumulates=batches.accumulate > 1
        ):
            raise ConfigError(found)
    return {
        "accelerator": trainer.accelerator,
        "devices": environment.local_world_size() if layout.world_size > 1 else 1,
        "num_nodes": trainer.num_nodes,
        **scaler.precision_arguments(trainer.precision, mesh=layout.kind == "mesh"),
        "accumulate_grad_batches": batches.accumulate,
        "gradient_clip_val": _gradient_clip_val(trainer, task),
        # Lightning clips by norm if nothing is said, and a module then clips as it likes
        "gradient_clip_algorithm": "value" if trainer.gradient_clip_algorithm == "value" else None,
        # Lightning would count batches per rank: the feed limits samples
        "limit_val_batches": trainer.limit_val_batches and 1.0,
        "limit_test_batches": trainer.limit_test_batches and 1.0,
        "val_check_interval": every and every * batches.accumulate,
        "check_val_every_n_epoch": 1 if every is None else None,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": trainer.log_every_n_steps,
        "deterministic": trainer.deterministic,
        "detect_anomaly": trainer.detect_anomaly,
        # an epoch is a whole number of steps, but not always the same number
        "reload_dataloaders_every_n_epochs": 1,
        "use_distributed_sampler": False,
        "enable_model_summary": False,
    }


def _collect_garbage_again() -> None:
    """Turn the collector on, without the objects of the imports: they cost 0.8 s of gpt_nano's
    first 60 steps.
    """
    # in a sweep's second trial, what is left of the first must be collected
    if not gc.get_freeze_count():
        gc.freeze()
        # else Triton 3.9 counts at exit what it finds frozen, and prints thirty lines about leaks
        atexit.register(gc.unfreeze)
    gc.enable()


def _gradient_clip_val(trainer: DictConfig, task: L.LightningModule) -> float | None:
    """Return the norm or value to clip to.

    `auto` leaves clipping to a module that does it itself.
    """
    if trainer.gradient_clip_val != "auto":
        return trainer.gradient_clip_val
    if is_overridden("configure_gradient_clipping", task) or not task.automatic_optimization:
        return None
    return AUTO_CLIP


def _checkpoint_to_resume(cfg: DictConfig, directory: Path) -> Path | None:
    """Return the first intact checkpoint to resume from, or None; damaged ones are named and
    skipped.
    """
    if resume.begins_anew(cfg):
        return None
    # rank 0's view for all: a file server may show another machine older files
    found = process_group.on_rank_0(partial(resume.checkpoints_to_resume, cfg, directory))
    if isinstance(found, ConfigError):
        raise found
    if not found and (directory / "metrics.csv").exists() and process_group.rank() == 0:
        log.info(
            "%s has no checkpoint yet: training begins at step 0 again. checkpoint.every_n_minutes "
            "says how often one is saved.",
            directory,
        )
    return storage.first_intact(found, trust=cfg.checkpoint.trust)


def _profiler(cfg: DictConfig, directory: Path) -> Any:
    if not cfg.trainer.profile:
        return None
    from lightning.pytorch.profilers import PyTorchProfiler

    return PyTorchProfiler(
        dirpath=directory / "profile", filename="operators", export_to_chrome=True, row_limit=40
    )


def _last_row(step_log: StepLog) -> dict[str, float]:
    return {name: value for name, value in step_log.last.items() if name.startswith("train/")}


def join(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """Join the ranks that torchrun or srun started, and run with rank 0's configuration."""
    _init_group(cfg)
    try:
        with lock.hold(cfg) if process_group.rank() == 0 else nullcontext():
            cfg = _run_joined(cfg, overrides)
    except BaseException as error:
        # for ranks that wait for this one: its error would never be shown
        if process_group.destroying_waits():
            leave_at_exit(
                EXIT_CONFIG if isinstance(error, ConfigError) else getattr(error, "exit_code", 1)
            )
        else:
            process_group.destroy()
        raise
    process_group.destroy()
    return cfg


def _run_joined(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    if process_group.rank() == 0:
        run_dir.write(cfg, overrides)
    text = process_group.broadcast_object(
        OmegaConf.to_yaml(OmegaConf.create(config.without_secrets(cfg)))
    )
    cfg = OmegaConf.create(text)  # pyright: ignore[reportAssignmentType]
    run(cfg)
    return cfg


def _init_group(cfg: DictConfig) -> None:
    """Join the process group, in which a collective fails a minute after launch.hang_timeout: a
    parent, or the ranks' own watch, can name the rank that hangs before.
    """
    seconds = COLLECTIVE_SECONDS if cfg.launch.hang_timeout == "auto" else cfg.launch.hang_timeout
    process_group.init(
        backend=OmegaConf.select(cfg, "strategy.backend") or "auto",
        accelerator=cfg.trainer.accelerator,
        timeout=timedelta(seconds=seconds + 60) if seconds is not None else None,
        offloads=bool(OmegaConf.select(cfg, "strategy.cpu_offload")),
    )


def main() -> None:
    """Run a rank under the elastic agent, which shows the earliest error of all ranks."""
    directory = Path(sys.argv[1])
    cfg = run_dir.read(directory)
    resize.apply(cfg, environment.resized_settings())
    rank = environment.rank()
    log_file = (directory / "logs" / f"rank_{rank:04d}.log").open("a")
    # requested if a rank hangs
    faulthandler.register(signal.SIGUSR2, file=log_file, all_threads=True)
    if rank:  # rank 0 prints; the others write to their log
        os.dup2(log_file.fileno(), sys.stdout.fileno())
        os.dup2(log_file.fileno(), sys.stderr.fileno())
    get_error_handler().initialize()
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        _init_group(cfg)
        agree(cfg)
        # on one machine, the parent holds the lock
        with lock.hold(cfg) if rank == 0 and cfg.trainer.num_nodes > 1 else nullcontext():
            run(cfg)
    except Exception as error:
        record(error)
        # the disk may be full
        with suppress(OSError), log_file:
            traceback.print_exc(file=log_file)
        os._exit(1)  # no collective that never completes may keep the process
    process_group.destroy()
    leave()
