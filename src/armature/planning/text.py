"""A plan as text."""

import shlex
from collections.abc import Sequence

from armature.planning.auto import HEADROOM
from armature.planning.ranking import Candidate

GIB = 2**30
MOST_SHOWN = 24  # layouts of one number of devices
MOST_OF_EACH = 3  # of each number, if there are several
DAY = 24 * 3600
ADAPTERS = (
    "Weights that are trained already (model.pretrained) can be fine-tuned by adapters, which need "
    "less: plan again with task=lora, or with task=lora task.adapter.quantize=nf4."
)


def shown(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the layouts to show: the best, or if the number of devices was left open the best of
    each number.
    """
    counts = sorted({each.world_size for each in candidates})
    if len(counts) < 2:
        return list(candidates[:MOST_SHOWN])
    return [
        each for n in counts for each in [c for c in candidates if c.world_size == n][:MOST_OF_EACH]
    ]


def table(candidates: Sequence[Candidate], *, units: float | None, unit: str) -> list[str]:
    """Return one line per layout. `units`: tokens or samples of the whole run; None: no times."""
    found = shown(candidates)
    in_days = (
        units is not None
        and max((units / each.units_per_second[0] for each in found), default=0) >= DAY
    )
    times = f"{'days' if in_days else 'hours':>16}{'GPU hours':>24}" if units else ""
    lines = [
        f"{'layout':<34}{'GPUs':>5}{'micro':>6} {'recompute':<10}{'GiB':>7}{'free':>7}"
        f"{f'{unit}/s':>21}{times}"
    ]
    for each in found:
        low, high = each.units_per_second
        spans = _times(each, units, in_days=in_days) if units else ("", "")
        star = "*" if each.simulated else ""
        tight = "  tight" if each.fits else "  does not fit"
        line = (
            f"{each.choice.name + star:<34}{each.world_size:>5}{each.setup.micro:>6} "
            f"{each.setup.recompute!s:<10}"
            f"{each.peak_bytes / GIB:>7.1f}{each.margin:>7.0%}{f'{low:,.0f}-{high:,.0f}':>21} "
            f"{spans[0]:>15} {spans[1]:>23}{'' if each.margin >= HEADROOM else tight}"
        )
        other = f"  global batch {each.setup.global_batch_size}" if each.other_batch else ""
        lines.append(f"{line.rstrip()}{other}")
    if len(candidates) > len(found):
        lines.append(f"… and {len(candidates) - len(found)} more")
    return lines


def _times(each: Candidate, units: float, *, in_days: bool) -> tuple[str, str]:
    low, high = each.units_per_second
    least, most = units / high / 3600, units / low / 3600
    hours = 24 if in_days else 1
    return _span(least / hours, most / hours), _span(
        least * each.world_size, most * each.world_size
    )


def _span(least: float, most: float) -> str:
    if most < 0.001:
        return "<0.001"
    digits = 0 if most >= 100 else 1 if most >= 1 else 3
    return f"{least:,.{digits}f}-{most:,.{digits}f}"


def report(
    runs: Sequence[Candidate],
    refused: Sequence[Candidate],
    *,
    typed: str,
    units: float | None,
    unit: str,
) -> list[str]:
    """Return the whole plan: the ranking and the commands."""
    fitting = [each for each in runs if each.fits]
    lines = table(runs, units=units, unit=unit)
    if any(each.simulated for each in runs):
        lines.append("* simulated; all others by closed formulas")
    if any(each.setup.offloads for each in shown(runs)):
        lines.append(
            "Offloaded layouts also take memory of each machine's host, which is not checked."
        )
    if any(each.setup.cost.experts for each in runs):
        lines.append("All experts are taken to get equally many tokens.")
    best = {each.world_size: each for each in reversed(fitting)}  # the first of each number
    for place, (_, each) in enumerate(sorted(best.items())):
        lines += [] if place else ["", "Type:"]
        lines.append(f"  {_command(typed, each.words)}")
    if any(each.other_batch for each in best.values()):
        lines.append(
            "  (data.global_batch_size: one that divides among the ranks; this changes the result)"
        )
    if not fitting:
        lines += ["", "Nothing of these fits."]
    if all(each.setup.offloads for each in fitting) and runs and runs[0].setup.cost.linears:
        lines += ["", ADAPTERS]
    if refused:
        lines += ["", "Not possible:"]
        reasons: dict[str, list[Candidate]] = {}
        for each in refused:
            reasons.setdefault(str(each.refused), []).append(each)
        lines += [f"  {_named(those)}: {why}" for why, those in reasons.items()]
    return lines


def _command(typed: str, words: str) -> str:
    """Return the command of a layout, without the typed keys that it names itself."""
    chosen = {word.partition("=")[0] for word in words.split()}
    kept = [word for word in shlex.split(typed) if word.lstrip("+").partition("=")[0] not in chosen]
    return " ".join(filter(None, ("python train.py", shlex.join(kept), words)))


def _named(candidates: Sequence[Candidate]) -> str:
    """Return `ddp on 2, 4, 8; hsdp 2 × 8 on 16`, at most four layouts."""
    counts: dict[str, list[int]] = {}
    for each in candidates:
        counts.setdefault(each.choice.name, []).append(each.world_size)
    parts = [
        f"{name} on {', '.join(map(str, sorted(numbers)))}" for name, numbers in counts.items()
    ]
    return f"{'; '.join(parts[:4])}{' …' if len(parts) > 4 else ''}"
