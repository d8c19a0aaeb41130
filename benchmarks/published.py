"""Predicted beside published: others' runs on GPUs, simulated, as tables in docs/.

python -m benchmarks.published [TABLE …]  # without names: all tables
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from armature import simulation
from armature.errors import ConfigError
from armature.planner.text import UNEVEN
from armature.simulation.report import GIB, Report
from benchmarks.simulate_check import DOCUMENT
from scripts import simulate as command

MODEL = "data=synthetic optimizer=adamw trainer.precision=bf16-mixed trainer.devices=8"
H100 = "hardware=h100_80gb"
DEPTHS = (3, 5)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to predict, beside what was published of it.

    Attributes:
        published: tokens per second and GPU, by how it was made; the compiled one is compared.
            Empty: none known.
        memory: GiB that its allocator reserved.
        load: tokens of this rank's experts, over the mean of all ranks.
    """

    name: str
    overrides: str
    published: Mapping[str, int] = field(default_factory=dict)
    memory: float | None = None
    load: float = 1.0


# torchtitan's benchmarks/llama3_h100_202412_torchtitan.md and
# asyncTP_llama3_h100_2025-06_torchtitan.md at b5bcd76c
ON_H100 = (
    Run(
        name="8B, fsdp 8, batch 2, selective",
        published={"eager": 5762, "compiled": 6667},
        memory=82.4,
        overrides=f"model=llama3_8b {H100} strategy=fsdp "
        "strategy.activation_checkpointing=selective "
        "data.micro_batch_size=2 data.global_batch_size=16",
    ),
    Run(
        name="8B, fsdp 128, batch 2, selective",
        published={"eager": 5605, "compiled": 6514},
        memory=67.0,
        overrides=f"model=llama3_8b {H100} strategy=fsdp "
        "strategy.activation_checkpointing=selective "
        "data.micro_batch_size=2 data.global_batch_size=256 trainer.num_nodes=16",
    ),
    Run(
        name="8B, fsdp 8 × tensor 8, batch 12, selective",
        published={"compiled": 4378},
        overrides=f"model=llama3_8b {H100} strategy=fsdp_tensor strategy.tensor=8 "
        "strategy.activation_checkpointing=selective data.micro_batch_size=12 "
        "data.global_batch_size=96 "
        "trainer.num_nodes=8",
    ),
    Run(
        name="70B, fsdp 32 × tensor 8, batch 16, every block recomputed",
        published={"compiled": 597},
        memory=71.9,
        overrides=f"model=llama3_70b {H100} strategy=fsdp_tensor strategy.tensor=8 "
        "strategy.activation_checkpointing=every data.micro_batch_size=16 "
        "data.global_batch_size=512 "
        "trainer.num_nodes=32",
    ),
)


def long(
    positions: int,
    context: int,
    *,
    recompute: str = "every",
    memory: float | None = None,
    **published: int,
) -> Run:
    shard = 8 // context
    words = f"strategy=context strategy.context={context}" if context > 1 else "strategy=fsdp"
    name = f"{positions:,} positions, fsdp {shard} × context {context}"
    return Run(
        name=name if recompute == "every" else f"{name}, {recompute}",
        published=published,
        memory=memory,
        overrides=f"model=llama3_8b model.context={positions} {H100} {words} "
        "data.micro_batch_size=1 "
        f"strategy.activation_checkpointing={recompute} data.global_batch_size={shard}",
    )


# table 2 of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md at b5bcd76c: every block
# recomputed
LONG = (
    long(32_768, 1, memory=83.9, float8=3890),
    long(65_536, 2, memory=84.2, float8=2540),
    long(131_072, 4, memory=84.0, float8=1071),
    long(131_072, 8),
    long(262_144, 8, memory=84.5, float8=548),
)


def mixture(
    model: str, expert: int, *, batch: int, recompute: str, load: float = 1.0, **published: int
) -> Run:  # fmt: skip
    words = f"strategy=expert strategy.expert={expert}" if expert > 1 else "strategy=fsdp"
    layout = f"fsdp 8, expert {expert}" if expert > 1 else "fsdp 8"
    uneven = f", {load:g} × the mean load" if load != 1 else ""
    return Run(
        name=f"{model}, {layout}, batch {batch}, {recompute}{uneven}",
        published=published,
        load=load,
        overrides=f"model={model} {H100} {words} data.micro_batch_size={batch} "
        f"data.global_batch_size={8 * batch * 16} "
        f"strategy.activation_checkpointing={recompute}",
    )


# NVIDIA's NeMo AutoModel, docs/performance-summary.md at 01926a5c
MIXTURES = (
    mixture("qwen3_30b_a3b", 8, batch=4, recompute="every", DeepEP=12040),
    mixture("qwen3_30b_a3b", 8, batch=4, recompute="every", load=UNEVEN),
    mixture("qwen3_30b_a3b", 1, batch=4, recompute="every"),
    mixture("mixture_16b", 8, batch=4, recompute="every"),
)
TABLES = {  # name → (file, runs)
    "published": (DOCUMENT, ON_H100),
    "published-context": (DOCUMENT.with_name("long-context.md"), LONG),
    "published-mixtures": (DOCUMENT.with_name("mixtures.md"), MIXTURES),
}
HEAD = (
    "| run | published | predicted: no communication hidden, all hidden | published beside that "
    "range | memory GiB, "
    "published (reserved) / predicted (allocated) |",
    "| --- | --- | --- | --- | --- |",
)


def predict(runs: Sequence[Run]) -> list[Report]:
    """Return the reports of rank 0 of some runs."""
    composed = [command.composed(f"{MODEL} {run.overrides}".split()) for run in runs]
    requests = [
        simulation.Request(cfg=cfg, rank=0, device=device, depths=DEPTHS, expert_load=run.load)
        for run, (cfg, device) in zip(runs, composed, strict=True)
    ]
    reports = []
    for run, result in zip(runs, simulation.simulate_all(requests), strict=True):
        if isinstance(result, Exception):
            raise SystemExit(f"{run.name}: {result}") from result
        reports.append(result)
    return reports


def row(run: Run, report: Report) -> str:
    low, high = (rate / report.world_size for rate in report.rate)
    published = ", ".join(f"{rate:,} {form}" for form, rate in run.published.items())
    rate = run.published.get("compiled", next(iter(run.published.values()), None))
    position = (
        ""
        if rate is None
        else "inside"
        if low <= rate <= high
        else f"{rate / (low if rate < low else high) - 1:+.1%}"
    )
    memory = f"{'' if run.memory is None else f'{run.memory} / '}{report.peak / GIB:.1f}"
    lacking = "" if report.fits else ", does not fit"
    return (
        f"| {run.name} | {published} | {low:,.0f} to {high:,.0f} | {position} | {memory}{lacking} |"
    )


def main() -> None:
    if unknown := [name for name in sys.argv[1:] if name not in TABLES]:
        raise SystemExit(f"{unknown[0]}: there is no such table. Known: {', '.join(TABLES)}")
    for name in sys.argv[1:] or TABLES:
        document, runs = TABLES[name]
        try:
            reports = predict(runs)
        except ConfigError as error:
            raise SystemExit("\n".join(error.problems)) from error
        table = "\n".join(
            [*HEAD, *(row(run, report) for run, report in zip(runs, reports, strict=True))]
        )
        print(table)
        before, mark, after = document.read_text().partition(f"<!-- {name} -->\n")
        assert mark, f"{document} has no place for the table {name}"
        end = after[after.index("<!-- end -->") :]
        document.write_text(f"{before}{mark}{table}\n{end}")


if __name__ == "__main__":
    main()
