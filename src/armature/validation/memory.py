"""Overrides that make a run need less memory, best first. Torch-free."""

from collections.abc import Iterator, Mapping

from omegaconf import DictConfig, OmegaConf

from armature import hardware
from armature.data import batching
from armature.layout import STRATEGIES, Layout
from armature.validation import checks, micro_batch

MOST = 3
# shares of the activations that are saved, roughly
HALF_MICRO_BATCH, RECOMPUTED, SIXTEEN_BITS = 0.5, 0.7, 0.45
UNKNOWN = {
    "parameters": 1.0,
    "gradients": 1.0,
    "optimizer state": 2.0,
    "activations and other": 4.0,
}


def overrides(cfg: DictConfig, *, kinds: Mapping[str, float] = UNKNOWN) -> list[str]:
    """Return up to three overrides that fit the configuration, the one that saves most first.

    Args:
        kinds: bytes per rank (or shares) of parameters, gradients, optimizer state, and activations
            and other.
    """
    found = [
        (saved, words)
        for saved, words, changes in _candidates(cfg, kinds)
        if saved and _is_valid(cfg, changes)
    ]
    return [words for _, words in sorted(found, key=lambda pair: -pair[0])[:MOST]]


def remedy(cfg: DictConfig, *, kinds: Mapping[str, float] = UNKNOWN) -> str:
    """Return a sentence that names those overrides, empty if there are none."""
    found = overrides(cfg, kinds=kinds)
    typed = any(
        each.startswith("data.micro_batch_size") for each in found
    ) and not micro_batch.is_auto(cfg)
    alone = " data.micro_batch_size=auto finds the largest micro-batch that fits." if typed else ""
    return f" What would help most: {', or '.join(found)}.{alone}" if found else ""


def _candidates(
    cfg: DictConfig, kinds: Mapping[str, float]
) -> Iterator[tuple[float, str, dict[str, object]]]:
    """Yield what is saved, what to type, and the changed keys."""
    layout, activations = Layout.of(cfg), kinds["activations and other"]
    optimizer, state = kinds["optimizer state"], sum(kinds.values()) - activations
    micro = _micro_batch_size(cfg, layout)
    if micro > 1:
        smaller = max(n for n in range(1, micro // 2 + 1) if micro % n == 0)
        yield _key("data.micro_batch_size", smaller, HALF_MICRO_BATCH * activations)
    if layout.options.get("activation_checkpointing", "every") in ("none", "selective", "half"):
        yield _key("strategy.activation_checkpointing", "every", RECOMPUTED * activations)
    if cfg.trainer.precision == "32-true":
        yield _key("trainer.precision", "bf16-mixed", SIXTEEN_BITS * activations)
    ranks = layout.world_size
    if layout.kind == "ddp":
        yield state * (1 - 1 / ranks), "strategy=fsdp", {"strategy": _sharded(cfg)}
    gpus = hardware.gpu_count() if cfg.trainer.accelerator == "gpu" else 1
    if layout.kind == "single" and gpus > 1:
        words = f"strategy=fsdp trainer.devices={gpus}"
        yield state * (1 - 1 / gpus), words, {"strategy": _sharded(cfg), "trainer.devices": gpus}
    if (
        layout.kind == "mesh"
        and cfg.trainer.accelerator == "gpu"
        and not layout.options["cpu_offload"]
    ):
        yield _key("strategy.cpu_offload", "true", 0.9 * state)
    if layout.kind == "deepspeed" and layout.options["stage"] < 3:
        yield _key("strategy.stage", 3, kinds["parameters"] * (1 - 1 / ranks))
    if (
        layout.kind == "deepspeed"
        and cfg.trainer.accelerator == "gpu"
        and not layout.options["offload_optimizer"]
    ):
        yield _key("strategy.offload_optimizer", "true", optimizer)


def _key(key: str, value: object, saved: float) -> tuple[float, str, dict[str, object]]:
    return saved, f"{key}={value}", {key: {"true": True}.get(str(value), value)}


def _micro_batch_size(cfg: DictConfig, layout: Layout) -> int:
    size = micro_batch.decided(cfg).data.micro_batch_size
    if size == "auto":
        size = (batching.configured_batch_size(cfg.data) or 1) // layout.data_ranks
    return size if isinstance(size, int) else 1


def _sharded(cfg: DictConfig) -> dict[str, object]:
    kept = {
        key: cfg.strategy[key]
        for key in ("seed", "activation_checkpointing", "compile")
        if key in cfg.strategy
    }
    return {"_target_": STRATEGIES["mesh"], "shard": "auto", **kept}


def _is_valid(cfg: DictConfig, changes: Mapping[str, object]) -> bool:
    changed = cfg.copy()
    OmegaConf.set_struct(changed, False)
    for key, value in changes.items():
        OmegaConf.update(changed, key, value, merge=False)
    return not checks.layout_problems(changed)
