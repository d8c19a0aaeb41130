"""One rank of a run: builds data, task, strategy, callbacks, loggers and Trainer, then fit, test, summary.

Under the elastic agent a rank calls `main` (`armature.launcher.rank`); a run of one process calls `run` directly.
"""

import faulthandler
import gc
import logging
import math
import os
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from armature import run_dir
from armature.checkpoint import manifest, resume, storage
from armature.checkpoint.state import is_weights_only
from armature.data import batching
from armature.launcher import environment
from armature.launcher.rank import leave
from armature.layout import Layout
from armature.parallel import process_group
from armature.training import report
from armature.training.checkpointing import Checkpointing
from armature.training.display import Display
from armature.training.heartbeat import Heartbeat
from armature.training.metrics_csv import MetricsCSV
from armature.training.restore_progress import RestoreProgress
from armature.training.step_log import StepLog
from armature.training.stop import StopOnSignal, StoppedBySignal
from armature.training.trainer import Trainer
from armature.validation import resize

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> None:
    """Trains, tests and writes summary.json. Called on every rank, after its process group was made."""
    stop = StopOnSignal(max_seconds=_seconds(cfg.trainer.max_time), deadline=environment.deadline())
    stop.install()
    log_file = _prepare_process(cfg, Path(cfg.run.dir))
    try:
        _train(cfg, stop)
    finally:
        stop.restore()
        logging.getLogger().removeHandler(log_file)  # a sweep's next trial has a log of its own
        log_file.close()


def _train(cfg: DictConfig, stop: StopOnSignal) -> None:
    directory = Path(cfg.run.dir)
    layout = Layout.of(cfg)
    data = instantiate(cfg.data)
    data.prepare_data()
    data.setup("fit")
    if environment.rank() == 0:
        data.save_assets(directory)
    batches = batching.plan_batches(data.global_batch_size, data.micro_batch_size, layout.data_ranks)
    total_steps = _total_steps(cfg, data)

    factories = {name: instantiate(cfg[name]) for name in ("model", "optimizer", "scheduler")}
    task = instantiate(cfg.task, **factories)
    strategy = instantiate(cfg.strategy)
    checkpoint = _sound_checkpoint(cfg, directory)
    if checkpoint is not None and is_weights_only(checkpoint):
        strategy.initial_weights, checkpoint = checkpoint, None
    csv = MetricsCSV(directory)
    step_log = StepLog(
        csv,
        every_n_steps=cfg.trainer.log_every_n_steps,
        global_batch_size=data.global_batch_size,
        train_size=data.train_size,
        tokens_per_sample=data.tokens_per_sample,
    )
    display = Display(
        step_log, total_steps=total_steps, start_line=partial(report.start_line, cfg, batches, checkpoint)
    )
    policy = {key: value for key, value in cfg.checkpoint.items() if key not in ("root", "trust")}
    checkpointing = Checkpointing(resume.folder(directory, cfg), step_log, **policy)
    strategy.facts = {"config_hash": run_dir.fingerprint(cfg)}
    extra = [instantiate(node) for node in (cfg.callbacks or {}).values()]
    callbacks = [_RecordError(), Heartbeat(), RestoreProgress(), step_log, *extra, checkpointing, stop, display]
    trainer = Trainer(
        strategy=strategy,
        accelerator=cfg.trainer.accelerator,
        devices=environment.local_world_size(),
        num_nodes=cfg.trainer.num_nodes,
        precision=cfg.trainer.precision,
        max_epochs=-1,
        max_steps=total_steps,
        accumulate_grad_batches=batches.accumulate,
        gradient_clip_val=cfg.trainer.gradient_clip_val,
        gradient_clip_algorithm=cfg.trainer.gradient_clip_algorithm,
        limit_val_batches=1.0 if cfg.trainer.limit_val_batches is None else cfg.trainer.limit_val_batches,
        limit_test_batches=1.0 if cfg.trainer.limit_test_batches is None else cfg.trainer.limit_test_batches,
        val_check_interval=cfg.trainer.val_every_n_steps and cfg.trainer.val_every_n_steps * batches.accumulate,
        check_val_every_n_epoch=1 if cfg.trainer.val_every_n_steps is None else None,
        num_sanity_val_steps=0,
        log_every_n_steps=cfg.trainer.log_every_n_steps,
        deterministic=cfg.trainer.deterministic,
        detect_anomaly=cfg.trainer.detect_anomaly,
        default_root_dir=directory,
        callbacks=callbacks,
        logger=[csv, *_loggers(cfg, checkpoint)],
        profiler=_profiler(cfg, directory),
        reload_dataloaders_every_n_epochs=1,  # an epoch is a whole number of steps, but not always the same number
        use_distributed_sampler=False,
        enable_model_summary=False,
    )
    trainer.before_training = [partial(step_log.go_on, trainer), partial(checkpointing.begin, trainer)]
    trainer.step_ended = [partial(checkpointing.step_ended, trainer), stop.step_ended]
    started = time.monotonic()
    if not gc.get_freeze_count():  # a sweep's second trial must not keep what is left of the first
        gc.freeze()  # the imports' objects, which cost 0.8 s of gpt_nano's first 60 steps
    gc.enable()
    try:
        trainer.fit(task, datamodule=data, ckpt_path=checkpoint)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics = {**_last_row(step_log), **metrics}
        reason = stop.received or "finished"  # at the last step, or before it by a callback such as early stopping
        test = reason == "finished" and cfg.trainer.test_at_end
        tested = next(iter(trainer.test(task, datamodule=data, verbose=False)), {}) if test else {}
        metrics.update({name: float(value) for name, value in tested.items()})
    except StoppedBySignal:
        reason, metrics = str(stop.received), _last_row(step_log)
    csv.flush()
    can_preview = hasattr(task, "preview") and getattr(strategy, "can_generate", True)
    preview = task.preview() if reason == "finished" and can_preview else None
    if trainer.is_global_zero:
        summary = report.summarize(cfg, trainer, step_log, reason=reason, metrics=metrics, best=checkpointing.best)
        summary["seconds"] = time.monotonic() - started
        run_dir.write_summary(directory, summary)
        report.show(
            cfg, display, summary, metrics=metrics, preview=preview, baselines=getattr(data, "baselines", list)()
        )


def _total_steps(cfg: DictConfig, data: Any) -> int:
    """Optimizer steps of the run: max_steps, or those that see max_epochs × the training samples."""
    limits = []
    if cfg.trainer.max_steps is not None:
        limits.append(cfg.trainer.max_steps)
    if cfg.trainer.max_epochs is not None:
        limits.append(math.ceil(cfg.trainer.max_epochs * data.train_size / data.global_batch_size))
    return min(limits)


def _sound_checkpoint(cfg: DictConfig, directory: Path) -> Path | None:
    """The checkpoint to go on from, whose files are what was saved; damaged ones are named and passed over."""
    if resume.checkpoint_for(cfg, directory) is None:
        return None
    named = resume.candidates(resume.folder(directory, cfg)) or resume.checkpoints_at(resume.to_path(cfg.resume))
    return storage.first_sound(named, trust=cfg.checkpoint.trust)


def _loggers(cfg: DictConfig, checkpoint: Path | None) -> list[Logger]:
    """The configured ones. TensorBoard forgets what a killed process logged after the checkpoint."""
    loggers = [instantiate(node) for node in (cfg.logger or {}).values()]
    step = (manifest.read(checkpoint) or {}).get("step") if checkpoint is not None else None
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and step is not None:
            logger._kwargs.setdefault("purge_step", step + 1)
    return loggers


def _seconds(max_time: str | None) -> float | None:
    """Of DD:HH:MM:SS."""
    if max_time is None:
        return None
    days, hours, minutes, seconds = map(int, max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def _prepare_process(cfg: DictConfig, directory: Path) -> logging.Handler:
    quiet()
    rank = environment.rank()
    handler = logging.FileHandler(directory / "logs" / f"rank_{rank:04d}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    torch.set_float32_matmul_precision(cfg.trainer.matmul_precision)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    return handler


def quiet() -> None:
    """Keeps to itself what Lightning and torch would say of things that are meant as they are."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # tasks log values that torchmetrics has reduced
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    warnings.filterwarnings(
        "ignore", message=".*dataloader is not resumable.*"
    )  # ours is: the sampler knows its position
    warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")


def _profiler(cfg: DictConfig, directory: Path) -> Any:
    if not cfg.trainer.profile:
        return None
    from lightning.pytorch.profilers import PyTorchProfiler

    return PyTorchProfiler(dirpath=directory / "profile", filename="operators", export_to_chrome=True, row_limit=40)


def _last_row(step_log: StepLog) -> dict[str, float]:
    return {name: value for name, value in step_log.last.items() if name.startswith("train/")}


def join(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """Joins ranks that torchrun or srun started, and runs. Rank 0's configuration is everybody's."""
    _init_group(cfg)
    try:
        if process_group.rank() == 0:
            run_dir.write(cfg, overrides)
        text = process_group.broadcast_object(OmegaConf.to_yaml(OmegaConf.create(run_dir.without_secrets(cfg))))
        cfg = OmegaConf.create(text)  # pyright: ignore[reportAssignmentType]
        run(cfg)
        return cfg
    finally:
        process_group.destroy()


def _init_group(cfg: DictConfig, *, later: float = 0) -> None:
    """The process group, in which a collective that does not complete is an error after launch.hang_timeout.

    Args:
        later: seconds more, where a parent watches, who can tell which rank stands still.
    """
    seconds = cfg.launch.hang_timeout
    process_group.init(
        backend=OmegaConf.select(cfg, "strategy.backend") or "auto",
        accelerator=cfg.trainer.accelerator,
        timeout=timedelta(seconds=seconds + later) if seconds is not None else None,
    )


def _record(error: BaseException) -> None:
    """Leaves an error for the agent, which shows the one that came first. Only a rank's first call counts."""
    file = environment.error_file()
    if file is not None and not file.exists():
        get_error_handler().record_exception(error)


class _RecordError(L.Callback):
    """Records at once: taking the Trainer down closes connections, and another rank would be taken for the first."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, StoppedBySignal):
            _record(exception)


def main() -> None:
    """A rank under the elastic agent. An error goes to the agent, which shows the one that came first."""
    directory = Path(sys.argv[1])
    cfg = run_dir.read(directory)
    resize.apply(cfg, environment.resized_settings())
    rank = environment.rank()
    log_file = os.open(directory / "logs" / f"rank_{rank:04d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR2, file=log_file, all_threads=True)  # asked for where a rank stands still
    if rank:  # rank 0 prints; the others write to their log
        os.dup2(log_file, sys.stdout.fileno())
        os.dup2(log_file, sys.stderr.fileno())
    get_error_handler().initialize()
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        _init_group(cfg, later=60)
        run(cfg)
    except Exception as error:
        _record(error)
        with (directory / "logs" / f"rank_{rank:04d}.log").open("a") as file:
            traceback.print_exc(file=file)
        os._exit(1)  # a collective that can never complete must not keep the process
    process_group.destroy()
    leave()
