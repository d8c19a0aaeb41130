"""Check the values of a composed configuration that have a range, a fixed set of choices, or must
not be secret.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature.config import Config
from armature.errors import MASK, hide, masked
from armature.parallel.split import SCHEDULES
from armature.validation import rules
from armature.validation.rules import Rule

CHOICES: dict[str, tuple[Any, ...]] = {
    "trainer.accelerator": ("auto", "cpu", "gpu", "mps"),
    "trainer.precision": (
        "auto",
        "32-true",
        "bf16-mixed",
        "bf16-true",
        "16-mixed",
        "16-true",
        "64-true",
    ),
    "trainer.gradient_clip_algorithm": ("norm", "value"),
    "trainer.on_nan": ("stop", "skip", "ignore"),
    "trainer.matmul_precision": ("highest", "high", "medium"),
    "checkpoint.mode": ("min", "max"),
    "checkpoint.on_failure": ("continue", "stop"),
}
OWN_CHOICES: dict[str, tuple[Any, ...]] = {  # where the group's class is ours
    "strategy.backend": ("auto", "gloo", "nccl", "mpi", "ucc", "xccl"),
    "strategy.compile": ("none", "block", "model"),
    "strategy.comm_hook": (None, "bf16", "fp16"),
    "strategy.param_dtype": (None, "bfloat16", "float16", "float32", "float64"),
    "strategy.reduce_dtype": (None, "bfloat16", "float16", "float32", "float64"),
    "strategy.stage": (1, 2, 3),
    "data.image_mode": (None, "L", "RGB", "RGBA"),
    "data.source.dtype": ("uint16", "uint32", "uint64", "uint8", "int16", "int32", "int64", "int8"),
    "strategy.sequence_parallel": ("auto", True, False),
    "strategy.schedule": tuple(SCHEDULES),
}
ALIASES = {
    "trainer.precision": {
        "fp16": "16-mixed",
        "16": "16-mixed",
        "bf16": "bf16-mixed",
        "fp32": "32-true",
        "32": "32-true",
    },
    "trainer.accelerator": {"cuda": "gpu"},
}
log = logging.getLogger(__name__)
LARGEST_BATCH = 10**9  # samples
LONGEST = 1e9  # seconds, 31 years: what torch and Python still take as a time
_SECRET = re.compile(
    r"(^|_)(api_?keys?|key|key_?id|token|(api|access|auth|refresh|bearer|hf)_?tokens|auth"
    r"|authorization|passw(or)?d|passphrase|pwd|secrets?|credentials?)$",
    re.IGNORECASE,
)
# names that end in "key" or "token" and are no secrets
_PLAIN_KEY = re.compile(
    r"(^|_)(metric|monitor|input|output|target|batch|sort|state|image|text|label|primary|data|field"
    r"|column|cache|group|config|document|pad|eos|bos|eot|unk|mask|special|cls|sep|start|stop|end"
    r"|begin|sentinel|feature|caption|source|src|tgt|query|video|audio|loss|class|prompt|question"
    r"|answer|context|sample|index|id|name|prefix|suffix|middle)_(key|token)$|^key$",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)


def problems(cfg: DictConfig, plain: dict[str, Any]) -> list[str]:
    """Return every value out of its range; `plain` is the resolved configuration."""
    found = [
        *_choices(plain, CHOICES),
        *_ranges(plain, RANGES),
        *_trainer(plain),
        *_not_finite(plain),
        *_names(plain),
    ]
    found += [*_optimizer(plain.get("optimizer")), *_arguments(plain), *secrets(cfg)]
    ours = _ours(plain)
    found += _choices(
        plain, {key: names for key, names in OWN_CHOICES.items() if key.split(".")[0] in ours}
    )
    found += _ranges(
        plain, {key: rule for key, rule in OWN_RANGES.items() if key.split(".")[0] in ours}
    )
    return found


def problems_of(keys: Sequence[str], plain: dict[str, Any]) -> list[str]:
    """Return which of these keys, typed for a saved run, have values out of their range."""
    ours = [f"{group}." for group in _ours(plain)]
    own = {key: rule for key, rule in OWN_RANGES.items() if key.startswith(tuple(ours))}
    return [*_ranges(plain, {key: rule for key, rule in {**RANGES, **own}.items() if key in keys})]


def _ours(plain: dict[str, Any]) -> list[str]:
    """Return the groups whose class is ours."""
    return [
        group for group in ("task", "data", "scheduler", "strategy") if _is_ours(plain.get(group))
    ]


# ---------------------------------------------------------------- ranges
_clip = rules.number(above=0, null="no clipping")
_steps = rules.number(least=1, whole=True, null="never")
_limit = rules.number(least=1, whole=True, null="all samples, or batch for one global batch")
_count = rules.number(least=1, whole=True)
_size = rules.number(least=1, most=2**24, whole=True)
_seconds = rules.number(above=0, most=LONGEST, null="never")
RANGES: dict[str, Rule] = {
    "seed": rules.number(least=0, most=2**32 - 1, whole=True),
    "resume": rules.text("auto, never, required, or the path of a run or a checkpoint"),
    "run.root": rules.text("a folder"),
    "run.tags": rules.texts,
    "trainer.num_nodes": rules.number(least=1, most=10**5, whole=True),
    "trainer.max_steps": rules.number(least=1, most=10**12, whole=True, null="no limit"),
    "trainer.max_epochs": rules.number(least=1, most=10**9, whole=True, null="no limit"),
    "trainer.max_time": rules.duration,
    "trainer.gradient_clip_val": lambda value: None if value == "auto" else _clip(value),
    "trainer.val_every_n_steps": rules.number(least=1, whole=True, null="the end of each epoch"),
    "trainer.log_every_n_steps": _count,
    "checkpoint.every_n_steps": _steps,
    "checkpoint.every_n_minutes": rules.number(above=0, most=LONGEST / 60, null="never"),
    "checkpoint.keep_last": rules.number(least=1, whole=True),
    "checkpoint.keep_best": rules.number(least=0, whole=True),
    "checkpoint.keep_every_n_steps": _steps,
    "checkpoint.monitor": rules.metric,
    "checkpoint.root": rules.text("a folder or an object store", null="the run directory"),
    "launch.hang_timeout": lambda value: None if value == "auto" else _seconds(value),
    "launch.stop_minutes_before_limit": rules.number(above=0, most=LONGEST / 60, null="never"),
    "launch.grace_seconds": rules.number(least=0, most=LONGEST),
    "launch.rdzv_endpoint": rules.text(
        "HOST:PORT of the first machine", null="none", form=r"\S+:\d{1,5}"
    ),
    "launch.allowed_packages": rules.packages,
    "data.eval_batch_size": rules.number(
        least=1, most=LARGEST_BATCH, whole=True, null="the data module's own"
    ),
    "data.num_workers": rules.number(least=0, most=1024, whole=True),
    "data.skip_steps": rules.steps,
    "data.train_limit": lambda value: None if value == "batch" else _limit(value),
}
OWN_RANGES: dict[str, Rule] = {  # where the group's class is ours
    "task.preview_prompt": rules.prompts,
    "task.preview_tokens": rules.number(least=0, most=2**16, whole=True),
    "task.preview_temperature": rules.number(least=0),
    "task.adapter.rank": _count,
    "task.adapter.alpha": rules.number(above=0),
    "task.adapter.dropout": rules.number(least=0, below=1),
    "task.adapter.targets": rules.patterns,
    "task.adapter.train": rules.patterns,
    "scheduler.warmup": rules.length,
    "scheduler.decay": rules.length,
    "scheduler.final": rules.number(least=0),
    "strategy.seed": rules.number(least=0, most=2**32 - 1, whole=True),
    "strategy.activation_checkpointing": rules.checkpointing,
    "strategy.prefetch": rules.number(least=0, whole=True),
    "strategy.min_num_params": rules.number(least=0, whole=True),
    "strategy.microbatches": _count,
    "strategy.stages": rules.counts,
    "data.seed": rules.number(least=0, most=2**32 - 1, whole=True),
    "data.shift": rules.number(least=0, most=8, whole=True),
    "data.samples": rules.number(least=1, most=10**12, whole=True),
    "data.held_out": rules.number(least=1, most=10**12, whole=True),
    "data.noise": rules.number(least=0),
    "data.context": _size,
    "data.val_fraction": rules.number(least=0, below=1),
    "data.test_fraction": rules.number(least=0, below=1),
    "data.global_batch_size": rules.number(least=1, most=LARGEST_BATCH, whole=True),
    "data.path": rules.paths,
    "data.source.path": rules.paths,
    "data.source.context": _size,
    "data.multiple": rules.number(least=1, most=2**24, whole=True, null="data.context"),
    "data.source.vocab_size": _size,
    "data.source.tokenizer_bytes": _count,
    "data.source.val_fraction": rules.number(least=0, below=0.9),
    "data.source.test_fraction": rules.number(least=0, below=0.9),
}
# names that most optimizers share; torch's would refuse the values in the rank
OPTIMIZER: dict[str, Rule] = {
    "optimizer.lr": rules.number(above=0),
    "optimizer.weight_decay": rules.number(least=0),
    "optimizer.eps": rules.number(least=0),
    "optimizer.momentum": rules.number(least=0, below=1),
    "optimizer.newton_schulz_steps": rules.number(least=1, most=100, whole=True),
    "optimizer.base_width": rules.number(least=1, whole=True, null="no scaling"),
}
_of_bytes = rules.number(least=257, most=2**24, whole=True)
# one problem at a time
_bytes_and_end = {"vocab_size": lambda value: None if _size(value) else _of_bytes(value)}
ARGUMENTS: dict[str, dict[str, Rule]] = {  # by the class, which would refuse them in the rank
    "armature.data.image_folder.ImageFolderData": {
        "size": rules.number(least=1, most=2**16, whole=True),
        "margin": rules.number(least=0, most=10),
        "mean": rules.three(),
        "std": rules.three(above=0),
    },
    "armature.data.synthetic.SyntheticData": {
        "image_size": rules.number(least=1, most=2**16, whole=True, null="tokens"),
        "channels": rules.number(least=1, most=2**16, whole=True, null="tokens"),
        "classes": rules.number(least=1, most=2**24, whole=True, null="tokens"),
    },
    "armature.data.corpus.Corpus": _bytes_and_end,
    "armature.data.blend.Blend": {
        **_bytes_and_end,
        "paths": rules.named_paths,
        "field": rules.text("the name of a field"),
        "cache_dir": rules.text("a folder", null="the usual one"),
    },
    "armature.data.hf.HFData": {"data_files": rules.files},
    "armature.data.blend.BlendData": {
        "paths": rules.named_paths,
        "weights": rules.named_weights,
    },
    "armature.callbacks.ema.EMA": {"decay": rules.number(above=0, below=1)},
    "armature.callbacks.monitors.Monitors": {
        "peak_tflops": rules.number(above=0, null="the device's own"),
        "norms_every_n_steps": _steps,
    },
    "armature.optim.muon.Muon": {"precision": rules.one_of(*CHOICES["trainer.precision"])},
    "lightning.pytorch.callbacks.EarlyStopping": {
        "mode": rules.one_of("min", "max"),
        "monitor": rules.metric,
        "patience": rules.number(least=0, whole=True),
        "min_delta": rules.number(),
    },
}
_UNSET = object()


def _select(plain: dict[str, Any], key: str) -> Any:
    """Return the value of a key, or _UNSET if the configuration has no such key."""
    node: Any = plain
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return _UNSET
        node = node[part]
    return node


def _is_ours(node: Any) -> bool:
    return isinstance(node, dict) and str(node.get("_target_")).split(".")[0] in (
        "armature",
        "example",
    )


def _ranges(plain: dict[str, Any], ranges: dict[str, Rule]) -> Iterator[str]:
    for key, rule in ranges.items():
        value = _select(plain, key)
        if value is not _UNSET and (wrong := rule(value)) is not None:
            yield f"{key}={_shown(value)}: {wrong}.{quotes_hint(key, value, rule)}"


def _arguments(plain: dict[str, Any]) -> Iterator[str]:
    callbacks = plain.get("callbacks")
    nodes = (
        {f"callbacks.{name}": node for name, node in callbacks.items()}
        if isinstance(callbacks, dict)
        else {}
    )
    data = plain.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    nodes |= {"data": data, "data.source": source}
    optimizer = plain.get("optimizer")
    # reported there
    if isinstance(optimizer, dict) and optimizer.get("precision") != plain["trainer"]["precision"]:
        nodes["optimizer"] = optimizer
    for path, node in nodes.items():
        ranges = ARGUMENTS.get(str(node.get("_target_")), {}) if isinstance(node, dict) else {}
        yield from _ranges(plain, {f"{path}.{key}": rule for key, rule in ranges.items()})


def quotes_hint(key: str, value: Any, rule: Rule) -> str:
    """Return what to say of a text that would be right as a number."""
    for read in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            if rule(read(value)) is None:
                return f" It is text: type {key}={value} without quotes."
    return ""


def _shown(value: Any) -> str:
    return "null" if value is None else "''" if value == "" else str(value)


def _choices(plain: dict[str, Any], choices: dict[str, tuple[Any, ...]]) -> Iterator[str]:
    for key, names in choices.items():
        value = _select(plain, key)
        # True equals 1
        known = any(value is name for name in names) if isinstance(value, bool) else value in names
        if value is _UNSET or known:
            continue
        texts = [_shown(name) for name in names]
        meant = ALIASES.get(key, {}).get(str(value))
        meant = meant or next(iter(difflib.get_close_matches(str(value), texts, 1, 0.4)), None)
        hint = f" Did you mean {key}={meant}?" if meant else ""
        yield f"{key}={_shown(value)}: must be one of {', '.join(texts)}.{hint}"


def _trainer(plain: dict[str, Any]) -> Iterator[str]:
    trainer, checkpoint = plain["trainer"], plain["checkpoint"]
    if trainer["max_steps"] is None and trainer["max_epochs"] is None:
        yield (
            "trainer.max_steps=null and trainer.max_epochs=null: the run would never end. "
            "Type trainer.max_steps=… or trainer.max_epochs=…."
        )
    monitored = checkpoint["keep_best"] and str(checkpoint["monitor"]).startswith("val/")
    if trainer["limit_val_batches"] == 0 and monitored:
        log.warning(
            "trainer.limit_val_batches=0 switches validation off: checkpoint.monitor=%s is never "
            "known, so no "
            "checkpoint is kept as best. Type trainer.limit_val_batches=null for all batches.",
            checkpoint["monitor"],
        )


def _not_finite(plain: dict[str, Any]) -> Iterator[str]:
    """Yield numbers that are no numbers, in what is ours or every optimizer and scheduler has."""
    known = {*RANGES, *OWN_RANGES, *OPTIMIZER, "optimizer.betas"}
    for group, node in plain.items():
        if group in ("trainer", "checkpoint", "launch", "optimizer", "scheduler") or _is_ours(node):
            for path, value in walk(node, f"{group}."):
                if (
                    isinstance(value, float)
                    and not math.isfinite(value)
                    and path.partition("[")[0] not in known
                ):
                    yield f"{path}={value}: must be a finite number."


def _optimizer(node: Any) -> Iterator[str]:
    """Yield what torch's optimizers would refuse in the rank, by the names that most optimizers
    share.
    """
    if not isinstance(node, dict):
        return
    for key, rule in OPTIMIZER.items():
        value = node.get(key.removeprefix("optimizer."))
        if (
            value is not None
            and not isinstance(value, list | dict)
            and (wrong := rule(value)) is not None
        ):
            yield f"{key}={_shown(value)}: {wrong}.{quotes_hint(key, value, rule)}"
    if node.get("nesterov") is True and not node.get("momentum"):
        yield (
            "optimizer.nesterov=true needs momentum. Type optimizer.momentum=0.9, or "
            "optimizer.nesterov=false."
        )
    betas, share = node.get("betas"), rules.number(least=0, below=1)
    pairs = str(node.get("_target_")).split(".")[0] in ("armature", "torch")
    if "betas" in node and (
        not isinstance(betas, list)
        or any(share(beta) for beta in betas)
        or len(betas) < 2
        or (pairs and len(betas) > 2)
    ):
        yield (
            f"optimizer.betas={_shown(betas)}: must be two numbers of at least 0 and below 1, as "
            "in [0.9,0.95]."
        )


def _names(plain: dict[str, Any]) -> Iterator[str]:
    run, project = plain["run"], str(plain["project"]["name"])
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", project, re.ASCII):
        form = "letters, digits, '_', '-' and '.', beginning with a letter or a digit"
        yield f"project.name={project}: must be {form}. Type project.name=my-project."
    for key in ("dir", "id", "git"):
        if run.get(key) is not None:
            yield (
                f"run.{key}={run[key]}: it is computed. Type run.root=… and run.name=… for another "
                "place."
            )
    if (size := run.get("micro_batch_size")) is not None:
        yield (
            f"run.micro_batch_size={size}: data.micro_batch_size=auto finds it. Type "
            f"data.micro_batch_size={size}."
        )


def switch_problems(overrides: Sequence[str]) -> list[str]:
    """Return typed values of true-or-false keys that are numbers.

    OmegaConf makes true of any but 0.
    """
    switches = {
        f"{group.name}.{each.name}"
        for group in fields(Config)
        if is_dataclass(group.type)
        for each in fields(group.type)
        if each.type is bool
    }
    typed = [override.lstrip("+").partition("=") for override in overrides]
    numbers = re.compile(r"""['"]?[-+]?\d+['"]?""")
    return [
        f"{key}={value}: must be true or false."
        for key, _, value in typed
        if key in switches and numbers.fullmatch(value) and value.strip("'\"") not in ("0", "1")
    ]


# ---------------------------------------------------------------- secrets
def secrets(cfg: DictConfig) -> Iterator[str]:
    """Yield keys whose typed values look secret, because config.yaml would hold them.

    The values are not shown.
    """
    for path, value in walk(OmegaConf.to_container(cfg, resolve=False)):
        if not isinstance(value, str) or not value or "${" in value:
            continue
        name = _leaf(path)
        where = f"Put it into .env and refer to it, as in '{path}=${{oc.env:{name.upper()}}}'."
        if is_secret(name):
            yield f"{path}: a secret typed here would be written to config.yaml. {where}"
        elif _URL_PASSWORD.search(value):
            yield f"{path}: a password in an address would be written to config.yaml. {where}"


def hide_secrets(cfg: DictConfig) -> None:
    """Keep secrets out of messages and logs: those that were typed, and environment variables if
    they, or the keys that refer to them, are secret.
    """
    for path, value in walk(OmegaConf.to_container(cfg, resolve=False)):
        if isinstance(value, str) and "${" not in value and is_secret(_leaf(path)):
            hide([value])  # another mistake's message may quote the mapping that holds it
        for name in (
            re.findall(r"\$\{oc\.env:([A-Za-z_]\w*)", value) if isinstance(value, str) else ()
        ):
            if is_secret(name) or is_secret(_leaf(path)):
                hide([os.environ.get(name, "")])


def without_secrets(value: Any, *, name: str = "") -> Any:
    """Return hyperparameters in which texts that are secret by their name, and secret variables,
    are masked.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        return {key: without_secrets(each, name=str(key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_secrets(each, name=name) for each in value)
    if not isinstance(value, str):
        return value
    return MASK if value and is_secret(name) and "${" not in value else masked(value)


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1].split("[")[0]


def is_secret(name: str) -> bool:
    """Return whether a key's name says that its value is secret."""
    return _SECRET.search(name) is not None and _PLAIN_KEY.search(name) is None


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full key and the value of every entry, in mappings and lists at any depth."""
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, value in items:
        path = f"{prefix.rstrip('.')}[{key}]" if isinstance(node, list) else f"{prefix}{key}"
        yield path, value
        yield from walk(value, f"{path}.")
