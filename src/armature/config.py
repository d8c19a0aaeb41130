"""The types of the core's own configuration. The values, with their comments, are in `configs/`.

Hydra merges the YAML files into these dataclasses, so a misspelt key or a wrong type is refused
while the configuration is composed. Groups with a `_target_` (model, task, data, optimizer, ...)
have the keys of the class that they build and are `Any` here; `validation.signatures` checks them
against the constructor's signature.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from armature.errors import ConfigError, error_line

NEEDED = ("run", "task", "model", "data", "optimizer", "strategy")  # groups of every config.yaml
OF_TRAIN = ("project", "run")  # groups whose keys are in train.yaml itself
# groups with paths that the scripts open which use a run
OPENED = ("checkpoint", "data", "model", "task")
LARGEST = 1_000_000  # bytes of a config.yaml
EMA = "armature.callbacks.ema.EMA"
_WHOLE = re.compile(r"\$\{oc\.env:\w+\}")
CONFIGS = Path(__file__).parents[2] / "configs"


@dataclass
class Project:
    name: str = MISSING


@dataclass
class Run:
    root: str = MISSING
    name: str | None = MISSING
    tags: list[str] = MISSING
    notes: str | None = MISSING
    group: str | None = MISSING
    report: bool = MISSING
    dir: str | None = None  # root/name once the name is decided; not set by users
    id: str | None = None  # the run's id for loggers, the same for all its starts; not set by users
    git: Any = None  # commit and dirty, of the code at the newest start; not set by users
    # what data.micro_batch_size=auto is, if not the whole share; not set by users
    micro_batch_size: int | None = None


@dataclass
class Trainer:
    accelerator: str = MISSING
    devices: Any = MISSING
    num_nodes: int = MISSING
    precision: str = MISSING
    max_steps: int | None = MISSING
    max_epochs: int | None = MISSING
    max_time: str | None = MISSING
    gradient_clip_val: Any = MISSING  # a number, auto or null: OmegaConf cannot merge unions
    gradient_clip_algorithm: str = MISSING
    val_every_n_steps: int | None = MISSING
    limit_train_batches: Any = MISSING  # int | float | None
    limit_val_batches: Any = MISSING  # int | float | None
    limit_test_batches: Any = MISSING  # int | float | None
    log_every_n_steps: int = MISSING
    on_nan: str = MISSING
    test_at_end: bool = MISSING
    deterministic: bool = MISSING
    detect_anomaly: bool = MISSING
    matmul_precision: str = MISSING
    profile: bool = MISSING


@dataclass
class Checkpoint:
    every_n_steps: int | None = MISSING
    every_n_minutes: float | None = MISSING
    keep_last: int = MISSING
    keep_best: int = MISSING
    keep_every_n_steps: int | None = MISSING
    monitor: str = MISSING
    mode: str = MISSING
    at_end: bool = MISSING
    background: bool = MISSING
    on_failure: str = MISSING
    root: str | None = MISSING
    include_base: bool = MISSING
    trust: bool = MISSING


@dataclass
class Launch:
    max_restarts: Any = MISSING
    min_ranks: int | None = MISSING
    hang_timeout: Any = MISSING  # float | None | auto
    stop_minutes_before_limit: float | None = MISSING
    rdzv_endpoint: str | None = MISSING
    grace_seconds: int = MISSING
    allowed_packages: list[str] = MISSING


@dataclass
class Config:
    project: Project = MISSING
    run: Run = MISSING
    seed: int = MISSING
    resume: str = MISSING
    trainer: Trainer = MISSING
    checkpoint: Checkpoint = MISSING
    launch: Launch = MISSING
    task: Any = MISSING
    model: Any = MISSING
    data: Any = MISSING
    optimizer: Any = MISSING
    scheduler: Any = MISSING
    strategy: Any = MISSING
    callbacks: Any = None
    logger: Any = None


def _model_size(name: str, otherwise: int | None, *, _root_: DictConfig) -> int | None:
    """Return a size of the model; `otherwise` if it has no such size, or takes it from the data."""
    model = _root_.model
    # before `in`, which would follow the reference to the data back to here, until Python's stack
    # is full
    from_data = name in {*model} and OmegaConf.is_interpolation(model, name)
    return otherwise if from_data or name not in model else model[name]


# every config.yaml is read by this module
OmegaConf.register_new_resolver("model_size", _model_size, replace=True)


def register() -> None:
    """Register the types with Hydra, under the name that `configs/train.yaml` starts from."""
    ConfigStore.instance().store(name="schema", node=Config)
    started = time.strftime("%Y%m%d-%H%M%S")
    OmegaConf.register_new_resolver(
        "sweep_name", lambda name: name or f"sweep-{started}", replace=True
    )


def load(file: Path) -> DictConfig:
    """Return a run's config.yaml.

    One of an older version gets defaults for its missing keys.

    Raises ConfigError for a damaged one, and one that was made to fill the memory.
    """
    cfg = read_raw(file)
    groups = {field.name: field.type for field in fields(Config) if is_dataclass(field.type)}
    if any(
        field.name not in (cfg.get(name) or {})
        for name, kind in groups.items()
        for field in fields(kind)
    ):
        train = OmegaConf.load(CONFIGS / "train.yaml")
        train = OmegaConf.masked_copy(train, [*OF_TRAIN, "seed", "resume"])  # pyright: ignore[reportArgumentType]
        defaults = {
            name: OmegaConf.load(CONFIGS / name / "default.yaml")
            for name in groups
            if name not in OF_TRAIN
        }
        cfg = OmegaConf.merge(train, defaults, cfg)
    return cfg  # pyright: ignore[reportReturnType]


def read_raw(file: Path) -> DictConfig:
    """Return a config.yaml as it is. Raises ConfigError as `load` does."""
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is no file")
        if file.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        text = file.read_bytes().decode("utf-8")
        if (
            "*" in text
            and "&" in text
            and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
        ):
            raise ValueError("it has references (*name), which this program never writes")
        try:
            cfg = OmegaConf.create(text)
        except AssertionError:  # a number, true or a date: no mapping
            cfg = None
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
    OmegaConf.register_new_resolver("oc.env", _env_reference, replace=True)
    OmegaConf.register_new_resolver("oc.decode", _decode_reference, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", oc.decode, replace=True)


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
    untyped = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
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
    untyped: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
    with _environment_kept():
        try:
            kept = [(name, _resolved(untyped, name)) for name in groups]
            root, name = (
                str(OmegaConf.select(untyped, key)) for key in ("checkpoint.root", "run.name")
            )
            # the root is opened with the run's name behind it
            if "${" in name and not _WHOLE.fullmatch(root):
                kept.append(("checkpoint.root/run.name", f"{root}/{name}"))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{file}: {error_line(error)}.") from error
    for key, value in (leaf for name, group in kept for leaf in _leaves(group, name)):
        if (
            "${" not in value
            or _WHOLE.fullmatch(value)
            or any(f"{key}.".startswith(f"{each}.") for each in typed)
        ):
            continue
        with suppress(OmegaConfBaseException):  # a variable that is not set: nothing to send
            if "://" in str(OmegaConf.create({"value": value}).value):
                raise ConfigError(
                    f"{file}: {key}={value} would send a value of this environment to the address "
                    "in it. If the run is "
                    f"yours, write the whole address into the file, or {key}=${{oc.env:NAME}} "
                    "alone."
                )


def _resolved(cfg: Any, name: str) -> Any:
    node = OmegaConf.select(cfg, name, throw_on_missing=False)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{key}.{name}")
    elif isinstance(value, str):
        yield key, value


def _lacking(cfg: DictConfig) -> list[str]:
    return [name for name in NEEDED if not isinstance(cfg.get(name), DictConfig)]


def _damaged(file: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{file} is damaged ({why[:200]}). The checkpoints beside it are not affected. To train "
        f"on, type rm {file} and "
        "the command that started the run; else restore the file from a copy."
    )
