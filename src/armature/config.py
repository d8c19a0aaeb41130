"""The types, ranges and choices of the core's own keys. Values and comments are in `configs/`.

Hydra merges the YAML files into these dataclasses, so a misspelt key or a wrong type is refused
while the configuration is composed. Groups with a `_target_` (model, task, data, optimizer, ...)
have the keys of the class that they build and are `Any` here; `validation.signatures` checks them
against the constructor's signature.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import Field

from armature.errors import ConfigError, error_line
from armature.project import SHIPPED
from armature.validation.composing import register_resolver

OF_ONE_CLASS = ("task", "model", "data", "optimizer", "scheduler", "strategy")  # groups
OPEN = ("callbacks", "logger")  # groups to which a key may be added
NEEDED = ("run", "task", "model", "data", "optimizer", "strategy")  # groups of every config.yaml
OF_TRAIN = ("project", "run", "sweep")  # groups whose keys are in train.yaml itself
# groups with paths that the scripts open which use a run
OPENED = ("checkpoint", "data", "model", "task")
EMA = "armature.callbacks.ema.EMA"
_WHOLE = re.compile(r"\$\{oc\.env:\w+\}")


# ---------------------------------------------------------------- what a value may be
# A type as pydantic reads it. `Annotated[Any, X]`: X, of which OmegaConf need not know.
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
AtLeast0 = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Count0 = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
# OmegaConf makes true of any number but 0
Switch = Annotated[Any, bool]
Share = Annotated[Number, Field(gt=0, le=1, description="a share of them above 0.0 and up to 1.0")]
Word = Annotated[str, Field(pattern=r"\S")]
Folder = Annotated[Word, Field(description="a folder")]
Metric = Annotated[
    str,
    Field(
        pattern=r"(?i)^(?!(true|false|nan|inf)\Z)\s*[^\W\d]",
        description="the name of a metric, as in val/loss",
    ),
]
Duration = Annotated[
    str,
    Field(
        pattern=r"^(?=.*[1-9])\d{1,5}:([01]\d|2[0-3]):[0-5]\d:[0-5]\d\Z",
        description="DD:HH:MM:SS, as in trainer.max_time=00:12:00:00",
    ),
]
Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*\Z",
        description="letters, digits, '_', '-' and '.', beginning with a letter or a digit",
    ),
]
# not set by users
Computed = Annotated[Any, Annotated[None, Field(description="left out, since it is computed")]]
Package = Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*\Z")]
Precision = Literal["auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true"]


@dataclass
class Project:
    name: Name = MISSING


@dataclass
class Run:
    root: Folder = MISSING
    name: str | None = MISSING
    tags: Annotated[list[Word], Field(description="a list of words, as in [baseline,long]")] = (
        MISSING
    )
    notes: str | None = MISSING
    group: str | None = MISSING
    report: Switch = MISSING
    dir: Computed = None  # root/name once the name is decided
    id: Computed = None  # the run's id for loggers, the same for all its starts
    git: Computed = None  # commit and dirty, of the code at the newest start
    micro_batch_size: Computed = None  # what data.micro_batch_size=auto is, if not the whole share


@dataclass
class Sweep:
    parallel: Annotated[Any, Count | Literal["auto"]] = MISSING


@dataclass
class Trainer:
    accelerator: Annotated[str, Literal["auto", "cpu", "gpu", "mps"]] = MISSING
    devices: Annotated[Any, Count | Literal["auto"]] = MISSING
    num_nodes: Count = MISSING
    precision: Annotated[str, Precision] = MISSING
    max_steps: Count | None = MISSING
    max_epochs: Count | None = MISSING
    max_time: Duration | None = MISSING
    gradient_clip_val: Annotated[Any, Positive | Literal["auto"] | None] = MISSING
    gradient_clip_algorithm: Annotated[str, Literal["norm", "value"]] = MISSING
    val_every_n_steps: Count | None = MISSING
    limit_train_batches: Annotated[Any, Count | Share | None] = MISSING
    limit_val_batches: Annotated[Any, Count0 | Share | None] = MISSING
    limit_test_batches: Annotated[Any, Count0 | Share | None] = MISSING
    log_every_n_steps: Count = MISSING
    on_nan: Annotated[str, Literal["stop", "skip", "ignore"]] = MISSING
    test_at_end: Switch = MISSING
    deterministic: Switch = MISSING
    detect_anomaly: Switch = MISSING
    matmul_precision: Annotated[str, Literal["highest", "high", "medium"]] = MISSING
    profile: Switch = MISSING


@dataclass
class Checkpoint:
    every_n_steps: Count | None = MISSING
    every_n_minutes: Positive | None = MISSING
    keep_last: Count = MISSING
    keep_best: Count0 = MISSING
    keep_every_n_steps: Count | None = MISSING
    monitor: Metric = MISSING
    mode: Annotated[str, Literal["min", "max"]] = MISSING
    at_end: Switch = MISSING
    background: Switch = MISSING
    on_failure: Annotated[str, Literal["continue", "stop"]] = MISSING
    root: Annotated[Word, Field(description="a folder or an object store")] | None = MISSING
    include_base: Switch = MISSING
    trust: Switch = MISSING


@dataclass
class Launch:
    max_restarts: Annotated[Any, Count0 | Literal["auto"]] = MISSING
    min_ranks: int | None = MISSING
    hang_timeout: Annotated[Any, Positive | Literal["auto"] | None] = MISSING
    stop_minutes_before_limit: Positive | None = MISSING
    rdzv_endpoint: (
        Annotated[
            str, Field(pattern=r"^\S+:\d{1,5}\Z", description="HOST:PORT of the first machine")
        ]
        | None
    ) = MISSING
    grace_seconds: Count0 = MISSING
    allowed_packages: Annotated[
        list[Package],
        Field(min_length=1, description="a list of packages, as in [armature,torch.nn]"),
    ] = MISSING


# of a group whose keys its class decides: an option's name in their place does not compose
Keys = Annotated[dict[str, Any] | None, Any]


@dataclass
class Config:
    project: Project = MISSING
    run: Run = MISSING
    sweep: Sweep = MISSING
    seed: Seed = MISSING
    resume: Annotated[
        Word, Field(description="auto, never, required, or the path of a run or a checkpoint")
    ] = MISSING
    trainer: Trainer = MISSING
    checkpoint: Checkpoint = MISSING
    launch: Launch = MISSING
    task: Keys = MISSING
    model: Keys = MISSING
    data: Keys = MISSING
    optimizer: Keys = MISSING
    scheduler: Keys = MISSING
    strategy: Keys = MISSING
    callbacks: Keys = field(default_factory=dict)
    logger: Keys = field(default_factory=dict)


def _model_size(name: str, otherwise: int | None, *, _root_: DictConfig) -> int | None:
    """Return a size of the model; `otherwise` if it has no such size, or takes it from the data."""
    model = _root_.model
    # before `in`, which would follow the reference to the data back to here, until Python's stack
    # is full
    from_data = name in {*model} and OmegaConf.is_interpolation(model, name)
    return otherwise if from_data or name not in model else model[name]


# every config.yaml is read by this module
register_resolver("model_size", _model_size, replace=True)
# of this process: all trials of a sweep are in one folder
_STARTED = os.environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S")
register_resolver("sweep_name", lambda name: name or f"sweep-{_STARTED}", replace=True)


# under the name that `configs/train.yaml` starts from
ConfigStore.instance().store(name="schema", node=Config)


def key_of(override: str) -> str:
    """Return the key of an override as it is typed, such as `model.width` of `+model.width=8`."""
    return override.lstrip("+~").partition("=")[0]


def load(file: Path) -> DictConfig:
    """Return a run's config.yaml.

    One of an older version gets defaults for its missing keys. Raises ConfigError for a damaged
    one.
    """
    return OmegaConf.merge(_defaults(), read_raw(file))  # pyright: ignore[reportReturnType]


@cache
def _defaults() -> DictConfig:
    train: Any = OmegaConf.load(SHIPPED / "train.yaml")
    files = {
        each.name: OmegaConf.load(SHIPPED / each.name / "default.yaml")
        for each in fields(Config)
        if is_dataclass(each.type) and each.name not in OF_TRAIN
    }
    of_train = OmegaConf.masked_copy(train, [*OF_TRAIN, "seed", "resume"])
    return OmegaConf.merge(of_train, files)  # pyright: ignore[reportReturnType]


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full key and the value of every entry, in mappings and lists at any depth."""
    is_list = isinstance(node, list)
    items = enumerate(node) if is_list else node.items() if isinstance(node, dict) else ()
    for key, value in items:
        path = f"{prefix.rstrip('.')}[{key}]" if is_list else f"{prefix}{key}"
        yield path, value
        yield from walk(value, f"{path}.")


def unresolved(node: Any) -> Any:
    """Return a configuration as plain types, with its references."""
    return OmegaConf.to_container(node, resolve=False)


def read_raw(file: Path) -> DictConfig:
    """Return a config.yaml as it is. Raises ConfigError for a damaged one."""
    try:
        cfg = OmegaConf.load(file)
        if isinstance(cfg, DictConfig) and len(cfg):
            return cfg
        raise ValueError("it is empty, or holds no keys")
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise _damaged(file, error_line(error)) from error


def require_groups(cfg: DictConfig, file: Path) -> None:
    """Raise ConfigError if groups of a run are missing, as in a file of which a loss of power left
    half.
    """
    if lacking := _lacking(cfg):
        raise _damaged(file, f"it holds no {', '.join(lacking)}")


def is_of_a_run(file: Path) -> bool:
    """Return whether a config.yaml has the groups of a run: other programs write files of this
    name, too.
    """
    try:
        return file.is_file() and not _lacking(read_raw(file))
    except ConfigError:
        return False


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Resolve references to the environment to themselves."""
    register_resolver("oc.env", _env_reference, replace=True)
    register_resolver("oc.decode", _decode_reference, replace=True)
    try:
        yield
    finally:
        register_resolver("oc.env", oc.env, replace=True)
        register_resolver("oc.decode", oc.decode, replace=True)


def _env_reference(name: str, *default: Any) -> str:
    return f"${{oc.env:{','.join([name, *('null' if d is None else str(d) for d in default)])}}}"


def _decode_reference(value: Any, _parent_: Any, _node_: Any) -> Any:
    """Keep an environment reference unresolved; decode anything else."""
    return f"${{oc.decode:{value}}}" if "${" in str(value) else oc.decode(value, _parent_, _node_)


def averages(cfg: DictConfig) -> list[Any]:
    """Return the nodes of the callbacks that average weights as `callbacks=ema` does."""
    nodes = (cfg.get("callbacks") or {}).values()
    return [
        node
        for node in nodes
        if isinstance(node, Mapping | DictConfig) and node.get("_target_") == EMA
    ]


def without_secrets(cfg: DictConfig) -> dict[str, Any]:
    """Return everything resolved but `${oc.env:NAME}`, so that no value of the environment is
    written to a file.
    """
    untyped = OmegaConf.create(unresolved(cfg))
    with _environment_kept():
        return OmegaConf.to_container(untyped, resolve=True)  # pyright: ignore[reportReturnType]


def require_plain_addresses(
    cfg: DictConfig, file: Path, *, groups: Sequence[str] = OPENED, typed: Sequence[str] = ()
) -> None:
    """Raise ConfigError if a run's configuration puts values of the environment into an address
    that would be opened.

    The file may be a stranger's, whose server would get the values, such as keys. A reference that
    is the whole address (`${oc.env:MY_STORE}`) names a place of the user's own.

    Args:
        groups: what this command opens.
        typed: keys that the user of this command has typed.
    """
    untyped = OmegaConf.create(unresolved(cfg))
    with _environment_kept():
        try:
            kept = {name: _resolved(untyped, name) for name in groups}
            root, name = (
                str(OmegaConf.select(untyped, key)) for key in ("checkpoint.root", "run.name")
            )
            # the root is opened with the run's name behind it
            if "${" in name and not _WHOLE.fullmatch(root):
                kept["checkpoint.root/run.name"] = f"{root}/{name}"
        except OmegaConfBaseException as error:
            raise ConfigError(f"{file}: {error_line(error)}.") from error
    for key, value in walk(kept):
        if (
            not isinstance(value, str)
            or "${" not in value
            or _WHOLE.fullmatch(value)
            or any(re.match(rf"{re.escape(each)}\b", key) for each in typed)
        ):
            continue
        with suppress(OmegaConfBaseException):  # a variable that is not set: nothing to send
            if "://" in str(OmegaConf.create({"value": value}).value):
                raise ConfigError(
                    f"{file}: {key}={value} would send a value of this environment to the address "
                    "in it. If the run is yours, write the whole address into the file, or "
                    f"{key}=${{oc.env:NAME}} alone."
                )


def _resolved(cfg: Any, name: str) -> Any:
    node = OmegaConf.select(cfg, name, throw_on_missing=False)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _lacking(cfg: DictConfig) -> list[str]:
    return [name for name in NEEDED if not isinstance(cfg.get(name), DictConfig)]


def _damaged(file: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{file} is damaged ({why[:200]}). The checkpoints beside it are not affected. To train "
        f"on, type rm {file} and "
        "the command that started the run; else restore the file from a copy."
    )
