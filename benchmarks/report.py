"""Turn records into JSON, tables and a chart."""

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from armature.hardware import published_peak
from benchmarks import loss, saves, scaling, startup
from benchmarks.rounds import Record, ratios, spread

BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
TITLES = {
    "training": "One process",
    "strategies": "Several ranks",
    "overhead": "What a training loop adds to a step",
    "startup": "From the command to the first optimizer step",
    "loss": "The loss of a large vocabulary",
    "data": "Data that keep up",
    "saves": "Checkpoints",
    "scale": "More ranks",
}


def save(results: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot be written to the JSON file")


def load(file: Path) -> dict[str, Any]:
    """Return what `save` wrote."""
    results = json.loads(file.read_text())
    for section in results["sections"].values():
        if "records" in section:
            section["records"] = [Record(**record) for record in section["records"]]
    return results


def markdown(results: dict[str, Any]) -> str:
    """Return all tables, with the machine and the date."""
    machine, rate = results["machine"], results["rate"]
    lines = [
        f"{machine['device']}, {results['date']}, torch {machine['torch']}, Python "
        f"{machine['python']}: "
        f"`{results['command']}`. Matrix products in {rate['dtype']} reach {_rate(rate['rate'])} "
        "here "
        f"(the best of square ones, all {'cores' if not machine['gpus'] else 'of one GPU'})."
    ]
    for name, section in results["sections"].items():
        lines += ["", f"### {TITLES[name]}", ""]
        if section.get("note"):
            lines.append(section["note"])
        else:
            lines += globals()[f"_{name}"](section, results)
    return "\n".join(lines)


def _training(section: dict[str, Any], results: dict[str, Any]) -> list[str]:
    records: list[Record] = section["records"]
    reference = records[0]
    tokens = section["context"] * section["global_batch_size"]
    lines = [
        f"{section['model']}, {section['precision']}, {section['optimizer']}, "
        f"{section['global_batch_size']} × {section['context']} tokens per step"
        + (f", compiled ({section['compile']})" if section["compile"] != "none" else "")
        + (", float8" if section["float8"] else "")
        + f". Ratio: steps per second relative to the {reference.name} in the same round, median "
        "and quartiles of "
        f"{len(reference.seconds)} rounds.",
        "",
        "| | ranks | steps/s | tokens/s | ratio | peak memory per rank | MFU, measured rate | MFU, "
        "published peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        if not record.seconds:
            lines.append(f"| {record.name} | {record.ranks} | {_short(record.note)} | | | | | |")
            continue
        rate = 1 / spread(record.seconds).median
        lines.append(
            f"| {record.name} | {record.ranks} | {rate:,.3g} | {rate * tokens:,.0f} | "
            f"{spread(ratios(record, reference))} | {record.peak / 2**20:,.0f} MiB | "
            f"{_mfu(section, results, rate, record.ranks, measured=True)} | "
            f"{_mfu(section, results, rate, record.ranks, measured=False)} |"
        )
    return lines


_strategies = _training


def _overhead(section: dict[str, Any], results: dict[str, Any]) -> list[str]:
    records: list[Record] = section["records"]
    reference = records[0]
    lines = [
        f"A model whose step takes {spread(reference.seconds).median * 1e6:.0f} µs "
        f"({section['precision']}, "
        f"{section['optimizer']}); time added to it, median and quartiles of "
        f"{len(reference.seconds)} rounds.",
        "",
        "| | per step | added | CPU time added |",
        "| --- | ---: | ---: | ---: |",
    ]
    for record in records:
        if not record.seconds:
            lines.append(f"| {record.name} | {_short(record.note)} | | |")
            continue
        step = f"{spread(record.seconds).median * 1e6:,.0f} µs"
        wall, cpu = (
            _added(record.seconds, reference.seconds),
            _added(record.cpu_seconds, reference.cpu_seconds),
        )
        lines.append(f"| {record.name} | {step} | {wall} | {cpu} |")
    return lines


def _added(seconds: list[float], reference: list[float]) -> str:
    added = spread([(a - b) * 1e6 for a, b in zip(seconds, reference, strict=False)])
    return f"{added.median:,.0f} µs ({added.low:,.0f}–{added.high:,.0f})"


def _startup(section: dict[str, Any], results: dict[str, Any]) -> list[str]:
    records: list[Record] = section["records"]
    lines = [
        "Data prepared, Python files compiled, page cache warm; medians and quartiles of "
        f"{len(records[0].seconds)} "
        "interleaved rounds.",
        "",
        "| | seconds |",
        "| --- | ---: |",
    ]
    lines += [f"| {record.name} | {spread(record.seconds)} |" for record in records]
    over = spread(section["over_the_limit"])
    return [
        *lines,
        "",
        f"Ours relative to `{startup.IMPORTS}` plus the bare loop's own part: {over}.",
    ]


def _loss(section: dict[str, Any], results: dict[str, Any]) -> list[str]:
    plain = section["rows"]["plain"]
    lines = [
        f"{section['tokens']:,} tokens of width {section['width']}, a vocabulary of "
        f"{section['vocabulary']:,}, "
        f"{section['dtype']} products: peak memory added by forward and backward.",
        "",
        "| | peak | relative to plain | seconds | gradients differ by |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for variant, row in section["rows"].items():
        if "note" in row:
            lines.append(f"| {loss.VARIANTS[variant]} | {_short(row['note'])} | | | |")
            continue
        lines.append(
            f"| {loss.VARIANTS[variant]} | {row['bytes'] / 1e6:,.0f} MB | "
            f"{row['bytes'] / plain['bytes']:.2f} | "
            f"{row['seconds']:.2f} | {row['gradients_differ_by']:.0e} |"
        )
    return lines


def _data(section: dict[str, Any], results: dict[str, Any]) -> list[str]:
    lines = []
    if section["tokens_per_second"] is not None:
        served = (
            f"The loader by itself serves {section['tokens_per_second'] / 1e6:,.1f} million "
            "tokens per second"
        )
        ours = [
            r
            for r in results["sections"].get("training", {}).get("records", [])
            if r.name == "ours" and r.seconds
        ]
        if ours:
            training = results["sections"]["training"]
            taken = (
                training["context"]
                * training["global_batch_size"]
                / statistics.median(ours[0].seconds)
            )
            served += f", {section['tokens_per_second'] / taken:,.0f} times what training consumes"
        lines += [f"{served} (memory-mapped, shuffled windows, no loader process).", ""]
    lines += [
        "Images of 256 × 256 pixels are decompressed, cropped and reduced while a small vision "
        "transformer "
        "trains on one core; medians.",
        "",
        "| `data.num_workers=` | images/s | the step waits |",
        "| ---: | ---: | ---: |",
    ]
    for workers, rows in section["images"].items():
        rate, wait = (
            statistics.median(row[name] for row in rows)
            for name in ("samples_per_second", "data_wait")
        )
        lines.append(f"| {workers} | {rate:,.0f} | {wait:.1%} |")
    return lines


def _saves(section: dict[str, Any], results: dict[str, Any]) -> list[str]:
    return saves.table(section)


def _scale(section: dict[str, Any], results: dict[str, Any]) -> list[str]:
    records: list[Record] = section["records"]
    base, first = records[0], section["points"][0]
    lines = [
        f"{section['threads_per_rank']} CPU threads per rank. Efficiency: work per rank and second "
        "relative to "
        f"{first['ranks']} rank{'s' * (first['ranks'] > 1)}.",
        "",
        "| scaling | ranks | batch | steps/s | efficiency |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for point, record in zip(section["points"], records, strict=True):
        start = f"| {point['kind']} | {point['ranks']} | {point['global_batch_size']} |"
        if not record.seconds:
            lines.append(f"{start} {_short(record.note)} | |")
            continue
        efficiency = spread(scaling.efficiencies(point, record, first["ranks"], base))
        lines.append(f"{start} {1 / spread(record.seconds).median:,.3g} | {efficiency} |")
    if "projection" in section:
        lines += [
            "",
            f"**Projection, not measured**, of weak scaling: from {len(section['collectives'])} "
            "counted collectives "
            f"per step, {section['bandwidth'] / 1e9:g} GB/s per rank, {scaling.LATENCY * 1e6:g} µs "
            "per hop, no "
            "contention, no stragglers; with none or all of the communication hidden behind "
            "arithmetic.",
            "",
            "| ranks | sent per rank and step | communication | efficiency, none hidden | all "
            "hidden |",
            "| ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {row['ranks']:,} | {row['gigabytes_sent']:.3g} GB | "
            f"{row['communication_seconds'] * 1e3:.3g} ms | "
            f"{row['exposed']:.2f} | {row['hidden']:.2f} |"
            for row in section["projection"]
        ]
    return lines


def _mfu(
    section: dict[str, Any], results: dict[str, Any], rate: float, ranks: int, *, measured: bool
) -> str:
    """Model FLOPs utilization.

    The ranks of a CPU share the machine that was measured; each GPU has its own rate.
    """
    gpus = results["machine"]["gpus"]
    peak = (
        results["rate"]["rate"]
        if measured
        else published_peak(results["machine"]["device"])
        if gpus
        else None
    )
    if section["flops_per_step"] is None or peak is None:
        return "–"
    return f"{section['flops_per_step'] * rate / (peak * (ranks if gpus else 1)):.1%}"


def _rate(value: float) -> str:
    return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.0f} GFLOP/s"


def _short(note: str) -> str:
    return note.split(" (/")[0].replace("|", "/")[:120]


def write(results: dict[str, Any], file: Path, *, docs: Path) -> None:
    """Write the tables, and the chart if there is one, between the markers of docs/benchmarks.md.

    Raises:
        ValueError: where the file has no markers.
    """
    page = docs / "benchmarks.md"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} must hold one {BEGIN} and one {END}, between which the tables go")
    shown = markdown(results)
    chart = file.with_suffix(".svg")
    if chart.exists():
        shutil.copyfile(chart, docs / "benchmarks.svg")
        shown += "\n\n![Steps a second over the bare loop's](benchmarks.svg)"
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{shown}\n{END}{rest.split(END)[1]}")


def plot(file: Path, chart: Path) -> str | None:
    """Draw the chart. Return None, or the reason why it was not drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no chart: matplotlib is not installed (pip install matplotlib)"
    command = [sys.executable, str(Path(__file__).with_name("plot.py")), str(file), str(chart)]
    done = subprocess.run(command, capture_output=True, text=True)
    failed = done.returncode != 0
    return f"no chart: {done.stderr.strip().splitlines()[-1]}" if failed else None
