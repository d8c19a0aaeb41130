"""The process of a rank: its log, and what torch, Lightning and the C library are set to."""

import logging
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from omegaconf import DictConfig

from armature.errors import LOG_NOTE, ConfigError, MaskingFormatter, RunFailed
from armature.launcher import environment, heap
from armature.validation.values import hide_secrets

log = logging.getLogger(__name__)


def prepare(cfg: DictConfig, directory: Path) -> logging.FileHandler:
    """Open this rank's log, and set what holds for the whole process."""
    quiet()
    # an NFS client may not know yet that rank 0 made it
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if cfg.trainer.accelerator == "gpu" else "cpu")
    heap.keep_freed_memory(cfg.trainer.accelerator)
    file = directory / "logs" / f"rank_{environment.rank():04d}.log"
    handler = logging.FileHandler(file, encoding="utf-8")
    # on a full disk, where each line's traceback would hide what the terminal says of it
    handler.handleError = lambda record: None
    hide_secrets(cfg)
    handler.setFormatter(MaskingFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    torch.set_float32_matmul_precision(cfg.trainer.matmul_precision)
    torch.backends.cudnn.allow_tf32 = cfg.trainer.matmul_precision != "highest"  # convolutions
    return handler


def quiet() -> None:
    """Silence warnings about things we do on purpose, and of Lightning's remarks all but those that
    callbacks make, such as `EarlyStopping(verbose=True)`.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("callbacks", "utilities.rank_zero"):  # through which some of them speak
        remarks = logging.getLogger(f"lightning.pytorch.{name}")
        remarks.setLevel(logging.INFO)
        remarks.addFilter(lambda said: said.levelno > logging.INFO or "callbacks" in said.pathname)
    logging.getLogger("lightning").handlers.clear()  # it would print them a second time
    for message in (
        ".*does not have many workers.*",
        ".*sync_dist=True.*",  # torchmetrics has reduced them already
        "The `srun` command is available",
        ".*LeafSpec.*is deprecated.*",
        # norms of each head's queries and keys, whose weights stay in fp32 under autocast
        "Mismatch dtype between input and weight",
        "torch.distributed is disabled, unavailable or uninitialized",
        ".*dataloader is not resumable.*",  # ours is: the sampler knows its position
        ".*is smaller than the logging interval.*",
        ".*sampler has shuffling enabled.*",  # the order of an evaluation is drawn once
        "Total length of .* across ranks is zero",  # the feed names the split
        "Your `IterableDataset` has `__len__` defined",  # the feed's loader has one
        "torch.distributed.nn.functional.*deprecated",  # of self.all_gather(sync_grads=True)
    ):
        warnings.filterwarnings("ignore", message=message)


def keep_traceback(error: Exception, file: logging.FileHandler) -> None:
    """Write the traceback of the error that ends a run into its log, since the terminal shows less
    of it.
    """
    says_all = isinstance(error, RunFailed) or (
        isinstance(error, ConfigError) and error.__cause__ is None
    )
    # a rank with such a file writes it itself (worker.main)
    if says_all or environment.error_file() is not None:
        return
    file.handle(
        log.makeRecord(log.name, logging.ERROR, __file__, 0, "The run failed.", (), sys.exc_info())
    )
    if not isinstance(error, ConfigError):
        error.add_note(f"{LOG_NOTE} {file.baseFilename}.")


def close(file: logging.FileHandler) -> None:
    logging.getLogger().removeHandler(file)  # a sweep's next trial has a log of its own
    with suppress(OSError):  # of lines that a full disk has no room for
        file.close()
