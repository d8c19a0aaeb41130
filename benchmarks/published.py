"""Predicted beside published: torchtitan's runs on H100, simulated, as a table in docs/simulator.md.

python -m benchmarks.published
"""

import re
import sys
from dataclasses import dataclass

from armature import simulation
from armature.errors import ConfigError
from armature.simulation.report import GIB, Report
from benchmarks.simulate_check import DOCUMENT
from scripts import simulate as command

MODEL = "data=synthetic data.context=8192 optimizer=adamw trainer.precision=bf16-mixed hardware=h100_80gb"
MODEL += " trainer.devices=8"
DEPTHS = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run: tokens per second and GPU, and GiB that its allocator reserved. None: not published."""

    name: str
    overrides: str
    eager: int | None = None
    compiled: int
    memory: float | None = None


# of benchmarks/llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-06_torchtitan.md at b5bcd76c
RUNS = (
    Run(
        name="8B, fsdp 8, batch 2, selective", eager=5762, compiled=6667, memory=82.4,
        overrides="model=llama3_8b strategy=fsdp strategy.activation_checkpointing=selective data.micro_batch_size=2 "
        "data.global_batch_size=16",
    ),
    Run(
        name="8B, fsdp 128, batch 2, selective", eager=5605, compiled=6514, memory=67.0,
        overrides="model=llama3_8b strategy=fsdp strategy.activation_checkpointing=selective data.micro_batch_size=2 "
        "data.global_batch_size=256 trainer.num_nodes=16",
    ),
    Run(
        name="8B, fsdp 8 × tensor 8, batch 12, selective", compiled=4378,
        overrides="model=llama3_8b strategy=fsdp_tensor strategy.tensor=8 strategy.activation_checkpointing=selective "
        "data.micro_batch_size=12 data.global_batch_size=96 trainer.num_nodes=8",
    ),
    Run(
        name="70B, fsdp 32 × tensor 8, batch 16, every block recomputed", compiled=597, memory=71.9,
        overrides="model=llama3_70b strategy=fsdp_tensor strategy.tensor=8 strategy.activation_checkpointing=every "
        "data.micro_batch_size=16 data.global_batch_size=512 trainer.num_nodes=32",
    ),
)  # fmt: skip


def predict(overrides: list[str]) -> list[Report]:
    """Return the reports of rank 0 of some runs."""
    composed = [command.composed(f"{MODEL} {each}".split()) for each in overrides]
    requests = [simulation.Request(cfg=cfg, rank=0, device=device, depths=DEPTHS) for cfg, device in composed]
    reports = []
    for result in simulation.simulate_all(requests):
        if isinstance(result, Exception):
            raise result
        reports.append(result)
    return reports


def row(run: Run, report: Report) -> str:
    low, high = (rate / report.world_size for rate in report.rate)
    published = ", ".join(
        f"{rate:,} {kind}" for rate, kind in ((run.eager, "eager"), (run.compiled, "compiled")) if rate is not None
    )
    memory = f"{'' if run.memory is None else run.memory} / {report.peak / GIB:.1f}"
    position = (
        "inside" if low <= run.compiled <= high else f"{run.compiled / (low if run.compiled < low else high) - 1:+.1%}"
    )
    return f"| {run.name} | {published} | {low:,.0f} to {high:,.0f} | {position} | {memory} |"


def main() -> None:
    try:
        reports = predict([run.overrides for run in RUNS])
    except ConfigError as error:
        raise SystemExit("\n".join(error.problems)) from error
    lines = [
        "| run | published | predicted: no communication hidden, all hidden | compiled beside that range | memory GiB, "
        "published (reserved) / predicted (allocated) |",
        "| --- | --- | --- | --- | --- |",
    ]
    table = "\n".join([*lines, *(row(run, report) for run, report in zip(RUNS, reports, strict=True))])
    print(table)
    marked = re.compile(r"(<!-- published -->\n).*?(\n<!-- end -->)", re.DOTALL)
    DOCUMENT.write_text(marked.sub(lambda match: match[1] + table + match[2], DOCUMENT.read_text()))


if __name__ == "__main__":
    sys.exit(main())
