"""What works under which strategy: the core's table, and the classes that say it themselves."""

from armature.validation import combinations, signatures

OPTIONAL = {"ema": "armature.callbacks.ema.EMA", "muon": "armature.optim.muon.Muon"}
KINDS = ("single", "ddp", "shard", "context", "tensor", "pipeline", "deepspeed", "zero3")
TYPED = {  # as docs/strategies.md calls it, and as it is typed
    "32-true": "trainer.precision=32-true",
    "bf16-mixed": "trainer.precision=bf16-mixed",
    "bf16-true": "trainer.precision=bf16-true",
    "16-mixed": "trainer.precision=16-mixed",
    "compile=block": "strategy.compile=block",
    "compile=model": "strategy.compile=model",
    "clip=norm": "trainer.gradient_clip_algorithm=norm",
    "clip=value": "trainer.gradient_clip_algorithm=value",
    "activation_checkpointing=every": "strategy.activation_checkpointing=every",
    "activation_checkpointing=selective": "strategy.activation_checkpointing=selective",
    "ema": "",
    "muon": "",
    "float8": "strategy.float8=emulate",
}


def refused(feature: str) -> dict[str, str]:
    """Return kind of strategy → why not."""
    if feature in OPTIONAL:
        return signatures.class_attribute(OPTIONAL[feature], "unsupported_strategies") or {}
    return combinations.UNSUPPORTED.get(TYPED[feature], {})
