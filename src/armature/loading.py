"""Load a trained model from a run directory or one of its checkpoints, without the command line
that trained it.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import torch
from hydra.errors import InstantiationException
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from armature import config, run_dir
from armature.checkpoint import (
    convert,
    directory,
    huggingface,
    lightning_file,
    plain,
    resume,
    state,
    storage,
)
from armature.data import feed
from armature.data.samples import preserved_generators, seed_generators
from armature.data.text import TokenData
from armature.errors import ConfigError, by_user, error_line, place_of
from armature.finetune import base
from armature.finetune import check as pretrained
from armature.launcher import run_state
from armature.parallel import initialization
from armature.strategies.base import StrategyMixin
from armature.training import user_state
from armature.training.errors import is_out_of_memory
from armature.training.restore_progress import RestoreProgress
from armature.validation import targets, values
from armature.validation.composing import instantiate
from armature.validation.overrides import apply as apply_overrides
from armature.validation.signatures import accepted, allow

log = logging.getLogger(__name__)
run_of = resume.run_of  # tasks import no checkpoints


def open_run(
    path: Path,
    *,
    best: bool = False,
    overrides: list[str] | None = None,
    trust: bool = False,
    packages: Sequence[str] = (),
    verified: str | None = None,
    calls_callbacks: bool = False,
) -> tuple[DictConfig, Path]:
    """Return the configuration of a run, with run.dir set to where it is now, and one of its
    checkpoints, verified.

    Args:
        path: a run directory (its last checkpoint, or its best with `best`), or one checkpoint in
            it.
        overrides: `key=value`, applied to the run's configuration.
        trust: accept a checkpoint without a manifest.
        packages: that the run's configuration may name besides those of this installation
            (launch.allowed_packages).
        verified: the name of the checkpoint whose files another process has just compared with
            their checksums.
        calls_callbacks: whether the run's callbacks are called, so that others can be typed.
    """
    if not path.exists():
        raise ConfigError(
            f"{path}: no such path. Name a run directory, such as outputs/<run.name>."
        )
    run_path = resume.run_of(path)
    if run_path is None:
        raise ConfigError(
            f"{path}: no run directory, and not in one: there is no config.yaml that says which "
            "model it is. Name outputs/<run.name> or a checkpoint in it; a .ckpt from elsewhere: "
            "YourModule.load_from_checkpoint."
        )
    cfg = run_dir.read(run_path)
    config.require_groups(cfg, run_path / "config.yaml")
    OmegaConf.set_struct(cfg, True)
    apply_overrides(cfg, overrides or [], calls_callbacks=calls_callbacks)
    typed_keys = [config.key_of(each) for each in overrides or [] if each[0] != "~"]
    config.require_plain_addresses(cfg, run_path / "config.yaml", typed=typed_keys)
    OmegaConf.update(cfg, "run.dir", str(run_path))
    if wrong := values.wrong_of(typed_keys, OmegaConf.to_container(cfg)):  # pyright: ignore[reportArgumentType]
        raise ConfigError([*wrong.values()])
    targets.check(cfg, overrides=overrides or [], packages=packages)
    names_base = pretrained.KEY in typed_keys and pretrained.named_by(cfg) is not None
    if names_base:
        pretrained.locate(cfg)
    else:
        pretrained.relocate(cfg, run_path)
    pretrained.require_transformers(cfg)

    def find() -> list[Path]:
        if path != run_path or not best:
            return resume.checkpoints_at(path, cfg)
        name = run_state.read_summary(run_path, of_any_start=True).get("best_checkpoint")
        return [resume.folder(run_path, cfg) / Path(name).name] if name else []

    if verified is not None:
        if (named := [each for each in find() if each.name == verified]) == []:
            raise storage.removed(verified)
        return cfg, named[0]  # the process that has compared them has said the rest
    checkpoint = storage.intact_beside_training(find, trust=trust)
    if checkpoint is None:
        raise ConfigError(
            f"{path}: no {'best' if best else 'complete'} checkpoint. Name the run, {run_path}, or "
            "a step=… folder in its checkpoints."
        )
    if names_base and base.recorded(checkpoint) is None:
        log.warning(
            "%s=%s: %s holds all weights of the model, so none is read from that folder.",
            pretrained.KEY,
            cfg.model.pretrained,
            checkpoint,
        )
    return cfg, checkpoint


def load(
    path: str | Path, *, device: str = "cpu", best: bool = False, trust: bool = False,
    packages: Sequence[str] = (), expect: type[L.LightningModule] = L.LightningModule,
    overrides: Sequence[str] = (), **arguments: Any,
) -> L.LightningModule:  # fmt: skip
    """Return a trained LightningModule with its weights, in evaluation mode, ready for inference.

        module = armature.load("outputs/mine")

    With callbacks=ema they are the averaged ones, as in validation, unless
    callbacks.ema.evaluate=false is overridden.

    Args:
        path: a run directory (its last checkpoint, or its `best`), or one checkpoint in it: a
            directory, or a .ckpt.
        device: where to put the module.
        trust: accept a checkpoint without a manifest.
        packages: your own packages that the run's classes are in, if they are not in src/ of this
            installation.
        expect: the class that the module must be of.
        overrides: of the run's configuration, as ["model.pretrained=FOLDER"] for a base model that
            has moved.
        arguments: of the module's constructor, which override those of the run.

    Raises:
        ConfigError: there is no such run or checkpoint, or it cannot be read.
    """
    cfg, checkpoint = open_run(
        Path(path), best=best, overrides=[*overrides], trust=trust, packages=packages
    )
    task = load_task(cfg, checkpoint, **arguments)
    if not isinstance(task, expect):
        raise ConfigError(
            f"{path} holds a {cfg.task._target_}, not a {expect.__module__}.{expect.__qualname__}."
        )
    return task.to(device)


@contextmanager
def constructors() -> Iterator[None]:
    """Turn what a constructor refuses, and a user's error in one, into a ConfigError with the key
    of its `_target_`.
    """
    try:
        yield
    except InstantiationException as error:
        cause = error.__cause__
        # Hydra's about the user's module
        while isinstance(cause, ImportError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, ConfigError):
            raise cause from error
        if (
            cause is None
            or is_out_of_memory(cause)
            or not (isinstance(cause, TypeError | ValueError) or by_user(cause))
        ):
            raise
        key = re.search(r"full_key: (\S+)", str(error))
        raise ConfigError(
            f"{key[1] if key else 'The configuration'}: {error_line(cause)} ({place_of(cause)})."
        ) from error


def build_task(cfg: DictConfig, **arguments: Any) -> L.LightningModule:
    """Build the task.

    Of the factories model, optimizer and scheduler it gets those that its constructor takes.

    Args:
        arguments: of the constructor, which override those of the configuration.
    """
    allow([cfg.task._target_])  # it is called below: nothing else decides whether it may be
    factories = {name: instantiate(cfg[name]) for name in accepted(cfg.task)}
    # after the imports, in which modules may draw: not every process makes them here
    seed_generators(cfg.seed)
    task = instantiate(cfg.task, **factories | arguments)
    if not isinstance(task, L.LightningModule):
        raise ConfigError(
            f"task._target_={cfg.task._target_} returned {task!r:.80}, not a LightningModule. Let "
            "it return one, or name a class that is one."
        )
    return task


def load_data(cfg: DictConfig) -> feed.Feed:
    """Return the feed of a run's configuration, with what the run saved for it: its classes."""
    found = feed.build(cfg)
    found.assets.load_assets(Path(cfg.run.dir))
    return found


def build_callbacks(cfg: DictConfig) -> list[L.Callback]:
    """Build the callbacks of a run's configuration, but those that save checkpoints."""
    built = []
    for key, node in (cfg.callbacks or {}).items():
        try:
            with constructors():
                callback = instantiate(node, _convert_="all")
        except InstantiationException as error:
            raise ConfigError(
                f"callbacks.{key}={node.get('_target_')}: {error_line(error.__cause__ or error)}. "
                f"Leave it out here: '~callbacks.{key}'."
            ) from error
        if not isinstance(callback, Checkpoint):
            built.append(callback)
    return built


def task_and_weights(
    cfg: DictConfig, checkpoint: Path, *, averaged: bool | None = None, **given: Any
) -> tuple[L.LightningModule, Callable[[], dict[str, Any]]]:
    """Return the task, and what gives it a checkpoint's weights, saved under any layout, once its
    layers are made; that returns the checkpoint.

    Args:
        averaged: take the averaged weights if the checkpoint holds them. None: if the run is
            measured with them.
        given: arguments of the task's constructor.

    Weights that the checkpoint leaves out are read from model.pretrained. The module's
    `on_load_checkpoint` is called, as Lightning's load_from_checkpoint does. Raises ConfigError if
    that folder is not the one that the run began with.
    """
    folder = base.verified(cfg, checkpoint)
    if folder is not None:
        cfg = cfg.copy()
        cfg.model.pretrained = str(folder)
    try:
        # draws that no checkpoint holds, such as random features, are those of training
        with constructors(), preserved_generators():
            task = build_task(cfg, **given)
    except InstantiationException as error:
        raise ConfigError(f"{cfg.task._target_}: {error}") from error
    if averaged is None:  # callbacks=ema, unless its `evaluate` is false
        averaged = any(node.get("evaluate", True) for node in config.averages(cfg))

    def read() -> dict[str, Any]:
        if any(p.is_meta for p in task.parameters()):
            # not to_empty, which empties computed buffers
            initialization.materialize(task, device=torch.device("cpu"))
        return _read(task, checkpoint, folder, averaged)

    return task, read


def _read(
    task: L.LightningModule, checkpoint: Path, folder: Path | None, takes_average: bool
) -> dict[str, Any]:
    is_file = directory.is_file(checkpoint)
    saved = lightning_file.read(checkpoint) if is_file else state.read_whole(checkpoint)
    weights = saved["state_dict"]
    if takes_average and not is_file:
        found = convert.averages_of(checkpoint, weights)
        weights |= {k: v.to(weights[k].dtype) if k in weights else v for k, v in found.items()}
        vars(task)["_armature_averaged"] = bool(found)
    if not is_file:
        state.resize_buffers(checkpoint, task)
    plain.remake(task, saved)
    task.on_load_checkpoint(saved)
    weights = saved["state_dict"]
    lacking = set()
    if folder is not None:
        _convert_as(task, weights)
        lacking = huggingface.read_others(task, weights)
    state.load_tensors_of(
        checkpoint, task, weights, strict=task.strict_loading, assign=True,
        may_lack=lacking.__contains__,
    )  # fmt: skip
    return saved


class WithWeights(SingleDeviceStrategy):
    """Gives the task its weights, and callbacks and data what the checkpoint holds for them, once
    the Trainer has called `setup` of all, which may make layers.

    Args:
        read: of `task_and_weights`.
    """

    def __init__(self, device: torch.device, read: Callable[[], dict[str, Any]]) -> None:
        super().__init__(device)
        self._read_weights = read

    process_dataloader = StrategyMixin.process_dataloader

    @override
    def setup(self, trainer: L.Trainer) -> None:
        saved = self._read_weights()
        states = saved.get("callbacks") or {}
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            callback.on_load_checkpoint(trainer, trainer.lightning_module, saved)
            # not the position in the training data
            if not isinstance(callback, feed.Feed) and (found := states.get(callback.state_key)):
                callback.load_state_dict(found)
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        # tokens may be others than those of the training
        if not isinstance(data, TokenData) and (found := saved.get(type(data).__qualname__)):
            data.load_state_dict(found)
        _put_back(trainer.lightning_module, saved, trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        super().setup(trainer)


def _put_back(task: L.LightningModule, saved: Mapping[str, Any], callbacks: Any = ()) -> None:
    """Set the plain attributes of the task and of callbacks that training has changed."""
    own = (saved.get("callbacks") or {}).get(RestoreProgress(None).state_key) or {}
    found = (own.get("attributes") or [{}])[0]
    owner: Any = SimpleNamespace(
        lightning_module=task, datamodule=None, callbacks=callbacks, optimizers=[],
        lr_scheduler_configs=[], strategy=SimpleNamespace(root_device=task.device),
    )  # fmt: skip
    user_state.put_back(
        owner, {path: kept for path, kept in found.items() if not path.endswith(".training")}
    )


def load_task(
    cfg: DictConfig, checkpoint: Path, *, averaged: bool | None = None, **given: Any
) -> L.LightningModule:
    """Return the task with its whole model on the CPU, and a checkpoint's weights, as
    `task_and_weights`.
    """
    task, read = task_and_weights(cfg, checkpoint, averaged=averaged, **given)
    task.configure_model()
    _put_back(task, read())
    return task.eval()


def weights_note(task: L.LightningModule) -> str:
    """Return what a line about a loaded task adds: " (averaged weights)", or nothing."""
    return " (averaged weights)" if getattr(task, "_armature_averaged", False) else ""


def _convert_as(task: L.LightningModule, saved: Mapping[str, Any]) -> None:
    """Give a module's weights the type of those that a checkpoint holds, which the run's base model
    had as well.
    """
    kinds = {
        value.dtype
        for value in saved.values()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    if len(kinds) != 1:
        return
    for param in task.parameters():
        if param.is_floating_point():
            param.data = param.data.to(next(iter(kinds)))
