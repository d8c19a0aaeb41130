"""Predicted against measured on this machine's GPUs: peak memory and tokens/s, as a table in docs/simulator.md.

python -m benchmarks.measured_gpu [KEY=VALUE …]

Simulations need torch's CPU build, so they run in .venv-simulate.
"""

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
HEADS = 12  # of gpt2_124m, which a tensor axis divides
ENDING = (
    "trainer.max_steps=40 trainer.log_every_n_steps=10 trainer.limit_val_batches=0 trainer.test_at_end=false "
    "logger=none callbacks=none task.preview_tokens=0"
)
RECOMPUTED = "strategy.activation_checkpointing=every"
GIB = 2**30


def cases(gpus: int) -> dict[str, str]:
    """Return name → overrides of what `gpus` GPUs can run."""
    found = {"single": "strategy=single", "single, every block recomputed": f"strategy=single {RECOMPUTED}"}
    if gpus > 1:
        for name in ("ddp", "fsdp", *(["tensor"] if HEADS % gpus == 0 else [])):
            found[f"{name} {gpus}"] = f"strategy={name} trainer.devices={gpus}"
        found[f"fsdp {gpus}, every block recomputed"] = f"strategy=fsdp trainer.devices={gpus} {RECOMPUTED}"
    if gpus % 4 == 0:
        found[f"fsdp {gpus // 2} × tensor 2"] = f"strategy=fsdp_tensor strategy.tensor=2 trainer.devices={gpus}"
    return {name: f"{words} data.global_batch_size={8 * gpus}" for name, words in found.items()}


def predict(words: Sequence[str], *, device: str) -> dict[str, Any]:
    """Return rank 0's report, from the environment with torch's CPU build."""
    python = sys.executable if torch.version.cuda is None else str(SIMULATOR)
    command = [python, str(ROOT / "scripts/simulate.py"), *words, f"hardware={device}", "--ranks", "0", "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)[0]


def measure(words: Sequence[str]) -> tuple[float, float]:
    """Return peak bytes and tokens/s of all ranks of a real run of 40 steps, the rate from its last 10."""
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
    head = [
        f"gpt2_124m, 1,024 tokens, micro-batch 8, bf16-mixed, on {where}:",
        "",
        "| layout | peak GiB, predicted | measured | tokens/s, predicted | measured |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows])


def write(text: str, *, document: Path = DOCUMENT) -> None:
    """Replace what a document has between its marks."""
    marked = re.compile(r"(<!-- measured-gpu -->\n).*?(\n<!-- end -->)", re.DOTALL)
    document.write_text(marked.sub(lambda match: match[1] + text + match[2], document.read_text()))


def main() -> None:
    gpus, typed = hardware.gpu_count(), sys.argv[1:]
    if not gpus:
        raise SystemExit("This machine has no GPU to measure on.")
    if torch.version.cuda is not None and not SIMULATOR.exists():
        raise SystemExit(
            f"{SIMULATOR} is not there. Predictions need torch's CPU build. Type: python -m venv .venv-simulate && "
            ".venv-simulate/bin/pip install -r requirements.txt torch==2.13.0+cpu --extra-index-url "
            "https://download.pytorch.org/whl/cpu"
        )
    rows = []
    for name, overrides in cases(gpus).items():
        words = [*MODEL.split(), *overrides.split(), *typed]
        peak, rate = measure([*words, "trainer.accelerator=gpu"])
        rows.append(row(name, predict(words, device=devices.THIS), peak=peak, rate=rate))
        print(rows[-1], flush=True)
        write(table(rows, where=f"{gpus} × {hardware.gpu_name()}"))  # each time: a later row may fail


if __name__ == "__main__":
    main()
