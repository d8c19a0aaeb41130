"""Predicted against measured on this machine's GPUs: peak memory and tokens/s, as a table in
docs/simulator.md.

python -m benchmarks.measured_gpu [KEY=VALUE …]

Simulations need torch's CPU build, so they run in .venv-simulate, or on another machine: --measure
FILE here, then --table FILE --device h100_80gb there.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from armature import hardware
from armature.planner import devices
from benchmarks.simulate_check import DOCUMENT

ROOT = Path(__file__).resolve().parents[1]
SIMULATOR = ROOT / ".venv-simulate/bin/python"
MODEL = (
    "model=gpt2_124m data=synthetic data.context=1024 optimizer=adamw trainer.precision=bf16-mixed "
    "data.micro_batch_size=8"
)
LARGER = (
    "model=llama3_1b data=synthetic data.context=2048 optimizer=adamw trainer.precision=bf16-mixed "
    "data.micro_batch_size=4"
)
HEADS = 12  # of gpt2_124m, which a tensor axis divides
ENDING = (
    "trainer.max_steps=40 trainer.log_every_n_steps=10 trainer.limit_val_batches=0 "
    "trainer.test_at_end=false "
    "logger=none callbacks=none task.preview_tokens=0"
)
RECOMPUTED = "strategy.activation_checkpointing=every"
GIB = 2**30


def cases(gpus: int) -> dict[str, str]:
    """Return name → overrides of what `gpus` GPUs can run."""
    found = {
        "single": f"{MODEL} strategy=single",
        "single, selective recomputation": f"{MODEL} strategy=single "
        "strategy.activation_checkpointing=selective",
        "single, every block recomputed": f"{MODEL} strategy=single {RECOMPUTED}",
        "single, compiled": f"{MODEL} strategy=single strategy.compile=block",
        "single, Muon": f"{MODEL.replace('=adamw', '=muon')} strategy=single",
        "fsdp of 1, compiled": f"{MODEL} strategy=fsdp strategy.compile=block",
        "llama3_1b, single, every block recomputed": f"{LARGER} strategy=single {RECOMPUTED}",
        "llama3_1b, single, selective recomputation, compiled": (
            f"{LARGER} strategy=single strategy.activation_checkpointing=selective "
            "strategy.compile=block"
        ),
    }
    if gpus > 1:
        found = {name: found[name] for name in ("single", "single, every block recomputed")}
        for name in ("ddp", "fsdp", *(["tensor"] if HEADS % gpus == 0 else [])):
            found[f"{name} {gpus}"] = f"{MODEL} strategy={name} trainer.devices={gpus}"
        found[f"fsdp {gpus}, every block recomputed"] = (
            f"{MODEL} strategy=fsdp trainer.devices={gpus} {RECOMPUTED}"
        )
    if gpus % 4 == 0:
        found[f"fsdp {gpus // 2} × tensor 2"] = (
            f"{MODEL} strategy=fsdp_tensor strategy.tensor=2 trainer.devices={gpus}"
        )
    return {
        name: f"{words} data.global_batch_size={_batch(words) * gpus}"
        for name, words in found.items()
    }


def _batch(words: str) -> int:
    found = re.search(r"data\.micro_batch_size=(\d+)", words)
    assert found is not None
    return int(found[1])


def predict(words: Sequence[str], *, device: str) -> dict[str, Any]:
    """Return rank 0's report, from the environment with torch's CPU build."""
    python = sys.executable if torch.version.cuda is None else str(SIMULATOR)
    command = [
        python,
        str(ROOT / "scripts/simulate.py"),
        *words,
        f"hardware={device}",
        "--ranks",
        "0",
        "--json",
    ]
    return json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    )[0]


def measure(words: Sequence[str]) -> tuple[float, float]:
    """Return peak bytes and tokens/s of all ranks of a real run of 40 steps, the rate from its last
    10.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "train.py"),
            *words,
            *ENDING.split(),
            f"run.root={folder}",
            "run.name=run",
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        summary = json.loads((Path(folder) / "run/summary.json").read_text())
        lines = (Path(folder) / "run/timings.csv").read_text().splitlines()
    last = dict(zip(lines[0].split(","), lines[-1].split(","), strict=True))
    return summary["peak_memory_bytes"], float(last["tokens_per_second"])


def row(name: str, predicted: dict[str, Any], *, peak: float, rate: float) -> str:
    """Return a line of the table."""
    from armature.simulation.report import Report

    report = Report.from_dict(predicted)
    low, high = report.rate
    return (
        f"| {name} | {report.peak / GIB:.2f} | {peak / GIB:.2f} ({peak / report.peak - 1:+.1%}) | "
        f"{low:,.0f} to {high:,.0f} | {rate:,.0f} |"
    )


def table(rows: Sequence[str], *, where: str) -> str:
    larger = " (llama3_1b: 2,048 tokens, micro-batch 4)" * any("llama3_1b" in row for row in rows)
    head = [
        f"gpt2_124m, 1,024 tokens, micro-batch 8{larger}, bf16-mixed, on {where}:",
        "",
        "| layout | peak GiB, predicted | measured | tokens/s, predicted | measured |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows])


def write(text: str, *, document: Path = DOCUMENT) -> None:
    """Replace what a document has between its marks."""
    marked = re.compile(r"(<!-- measured-gpu -->\n).*?(\n<!-- end -->)", re.DOTALL)
    document.write_text(marked.sub(lambda match: match[1] + text + match[2], document.read_text()))


def measure_all(file: Path, typed: Sequence[str]) -> None:
    """Write what this machine's GPUs measure to a file, after each case, since a later one may
    fail.
    """
    gpus = hardware.gpu_count()
    where = f"{gpus} × {hardware.gpu_name()}, torch {torch.__version__}, {datetime.date.today()}"
    found: dict[str, Any] = {"where": where, "device": hardware.gpu_name(), "cases": {}}
    for name, overrides in cases(gpus).items():
        words = [*overrides.split(), *typed]
        try:
            peak, rate = measure([*words, "trainer.accelerator=gpu"])
        except subprocess.CalledProcessError as error:
            print(f"{name}: exit code {error.returncode}", file=sys.stderr)
            continue
        found["cases"][name] = {"words": words, "peak": peak, "rate": rate}
        print(f"{name}: {peak / GIB:.2f} GiB, {rate:,.0f} tokens/s", flush=True)
        file.write_text(json.dumps(found, indent=1))


def tabulate(file: Path, device: str) -> None:
    """Predict what a file's cases measured, and write both into the document."""
    found = json.loads(file.read_text())
    rows = []
    for name, case in found["cases"].items():
        rows.append(
            row(name, predict(case["words"], device=device), peak=case["peak"], rate=case["rate"])
        )
        print(rows[-1], flush=True)
    write(table(rows, where=found["where"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measure", type=Path, metavar="FILE", help="only measure, where .venv-simulate is missing"
    )
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="only predict what FILE measured, on any machine"
    )
    parser.add_argument(
        "--device", default=devices.THIS, help="what --table predicts, as configs/hardware names it"
    )
    parser.add_argument("overrides", nargs="*", help="as for train.py; they apply to every case")
    args = parser.parse_args()
    if args.table:
        return tabulate(args.table, args.device)
    if not hardware.gpu_count():
        raise SystemExit("This machine has no GPU to measure on.")
    if args.measure:
        return measure_all(args.measure, args.overrides)
    if torch.version.cuda is not None and not SIMULATOR.exists():
        raise SystemExit(
            f"{SIMULATOR} is not there. Predictions need torch's CPU build. Type: python -m venv "
            ".venv-simulate && "
            ".venv-simulate/bin/pip install -r requirements.txt torch==2.13.0+cpu "
            "--extra-index-url "
            "https://download.pytorch.org/whl/cpu; or measure here with --measure FILE, and type "
            "--table FILE elsewhere"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        measure_all(file, args.overrides)
        tabulate(file, args.device)


if __name__ == "__main__":
    main()
