"""What works under which strategy: the core's table, and the classes that say it themselves."""

from armature.validation import parallelism, signatures

OPTIONAL = {"ema": "armature.callbacks.ema.EMA", "muon": "armature.optim.muon.Muon"}


def refused() -> dict[tuple[str, str], str]:
    """Return (feature, kind of strategy) → why not."""
    table = dict(parallelism.REFUSED)
    for feature, target in OPTIONAL.items():
        unsupported = signatures.class_attribute(target, "unsupported_strategies")
        assert unsupported
        table |= {(feature, kind): reason for kind, reason in unsupported.items()}
    return table
