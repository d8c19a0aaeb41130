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
    found = [each for each in _candidates(cfg, kinds) if each[0] and _is_valid(cfg, each[1])]
    best = sorted(found, key=lambda each: -each[0])[:MOST]
    return [
        " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())
        for _, changes in best
    ]


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
) -> Iterator[tuple[float, dict[str, object]]]:
    """Yield what is saved, and the changed keys."""
    layout, activations = Layout.of(cfg), kinds["activations and other"]
    optimizer, state = kinds["optimizer state"], sum(kinds.values()) - activations
    kind, ranks, on_gpu = layout.kind, layout.world_size, cfg.trainer.accelerator == "gpu"
    micro = _micro_batch_size(cfg, layout)
    if micro > 1:
        smaller = max(n for n in range(1, micro // 2 + 1) if micro % n == 0)
        yield HALF_MICRO_BATCH * activations, {"data.micro_batch_size": smaller}
    if layout.options.get("activation_checkpointing", "every") in ("none", "selective", "half"):
        yield RECOMPUTED * activations, {"strategy.activation_checkpointing": "every"}
    if cfg.trainer.precision == "32-true":
        yield SIXTEEN_BITS * activations, {"trainer.precision": "bf16-mixed"}
    if kind == "ddp":
        yield state * (1 - 1 / ranks), {"strategy": "fsdp"}
    gpus = hardware.gpu_count() if on_gpu else 1
    if kind == "single" and gpus > 1:
        yield state * (1 - 1 / gpus), {"strategy": "fsdp", "trainer.devices": gpus}
    if kind == "mesh" and on_gpu and not layout.options["cpu_offload"]:
        yield 0.9 * state, {"strategy.cpu_offload": True}
    if kind == "deepspeed" and layout.options["stage"] < 3:
        yield kinds["parameters"] * (1 - 1 / ranks), {"strategy.stage": 3}
    if kind == "deepspeed" and on_gpu and not layout.options["offload_optimizer"]:
        yield optimizer, {"strategy.offload_optimizer": True}


def _micro_batch_size(cfg: DictConfig, layout: Layout) -> int:
    size = micro_batch.decided(cfg).data.micro_batch_size
    if size == "auto":
        size = (batching.configured_batch_size(cfg.data) or 1) // layout.data_ranks
    return size if isinstance(size, int) else 1


def _is_valid(cfg: DictConfig, changes: Mapping[str, object]) -> bool:
    changed = cfg.copy()
    OmegaConf.set_struct(changed, False)
    for key, value in changes.items():
        node = _sharded(cfg) if key == "strategy" else value
        OmegaConf.update(changed, key, node, merge=False)
    return not checks.layout_problems(changed)


def _sharded(cfg: DictConfig) -> dict[str, object]:
    """Return strategy=fsdp with what the present strategy has, too."""
    shared = ("seed", "activation_checkpointing", "compile")
    kept = {key: cfg.strategy[key] for key in shared if key in cfg.strategy}
    return {"_target_": STRATEGIES["mesh"], "shard": "auto", **kept}
