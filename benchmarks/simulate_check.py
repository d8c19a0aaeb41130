"""Predicted against measured: simulated ranks beside real processes on gloo, as a table in
docs/simulator.md.

python -m benchmarks.simulate_check [NAME …]
    with names: these rows alone, the others stay as they were
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from armature import simulation
from armature.errors import ConfigError
from armature.simulation import measured
from armature.simulation.report import Volume
from scripts import simulate as command

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "simulator.md"
MODEL = (
    "model=gpt_nano model.layers=4 model.width=128 model.tied=false data=synthetic data.context=64 "
    "optimizer=adamw "
    "data.global_batch_size=16 data.micro_batch_size=2 trainer.precision=32-true hardware=h100_80gb"
)
PIPELINE = "strategy=pipeline data.micro_batch_size=8"
UNITS = "strategy.min_num_params=200000"  # several units, although the model is small
# matrices of more than 100,000 elements: the engine keeps smaller ones gathered in stage 3
ENGINE = (
    "trainer.devices=2 trainer.precision=bf16-mixed data.micro_batch_size=4 model.layers=2 "
    "model.width=512"
)
TWICE = (
    "+strategy.config.zero_optimization={stage3_max_reuse_distance:0,stage3_prefetch_bucket_size:0}"
)
# every token goes to every expert: the only load that real processes and the simulator, which has
# no values, share
MIXTURE = (
    "model._target_=armature.models.mixture.model.MixtureDecoder +model.experts=4 +model.active=4 "
    "+model.expert_hidden=64 data.micro_batch_size=4"
)
CASES = {  # name → (rank, overrides)
    "single": (0, "strategy=single data.micro_batch_size=8"),
    "ddp 2": (1, "strategy=ddp trainer.devices=2 data.micro_batch_size=4"),
    "fsdp 2": (1, f"strategy=fsdp trainer.devices=2 {UNITS} data.micro_batch_size=4"),
    "fsdp 2, Muon": (
        1,
        f"strategy=fsdp trainer.devices=2 {UNITS} data.micro_batch_size=4 optimizer=muon",
    ),
    "fsdp 2, bf16-mixed": (
        0,
        f"strategy=fsdp trainer.devices=2 {UNITS} trainer.precision=bf16-mixed",
    ),
    "fsdp 4, blocks recomputed": (
        3,
        f"strategy=fsdp trainer.devices=4 {UNITS} strategy.activation_checkpointing=every",
    ),
    "hsdp 2 × 2": (3, f"strategy=hsdp trainer.devices=4 {UNITS}"),
    "tensor 2": (
        1,
        "strategy=tensor strategy.sequence_parallel=true trainer.devices=2 data.micro_batch_size=8",
    ),
    "fsdp 2 × tensor 2": (
        2,
        f"strategy=fsdp_tensor strategy.sequence_parallel=true trainer.devices=4 {UNITS} "
        "data.micro_batch_size=4",
    ),
    "pipeline 2, first": (0, f"{PIPELINE} trainer.devices=2"),
    "pipeline 2, last": (1, f"{PIPELINE} trainer.devices=2"),
    "pipeline 2, interleaved": (
        1,
        f"{PIPELINE} trainer.devices=2 strategy.schedule=interleaved_1f1b",
    ),
    "fsdp 2 × pipeline 2": (
        3,
        f"strategy=fsdp_pipeline trainer.devices=4 {UNITS} data.micro_batch_size=8",
    ),
    "3d: 2 × 2 × 2": (
        7,
        f"strategy=3d strategy.sequence_parallel=true trainer.devices=8 {UNITS} "
        "data.micro_batch_size=8",
    ),
    "fsdp 2 × tensor 2, bf16-mixed": (
        1,
        f"strategy=fsdp_tensor strategy.sequence_parallel=true trainer.devices=4 {UNITS} "
        "data.micro_batch_size=4 "
        "trainer.precision=bf16-mixed",
    ),
    "hsdp 2 × 2, Muon": (2, f"strategy=hsdp trainer.devices=4 {UNITS} optimizer=muon"),
    "pipeline 2, zero bubble": (
        1,
        f"{PIPELINE} trainer.devices=2 strategy.schedule=zero_bubble strategy.microbatches=4",
    ),
    "ddp 2, unused parameters": (
        0,
        "strategy=ddp trainer.devices=2 data.micro_batch_size=4 "
        "strategy.find_unused_parameters=true",
    ),
    "context 2": (1, f"strategy=context trainer.devices=2 {UNITS} data.micro_batch_size=8"),
    "fsdp 2 × context 2, selective": (
        3,
        f"strategy=context strategy.shard=2 trainer.devices=4 {UNITS} data.micro_batch_size=8 "
        "strategy.activation_checkpointing=selective",
    ),
    "mixture, fsdp 2": (0, f"{MIXTURE} strategy=fsdp trainer.devices=2 {UNITS}"),
    "mixture, fsdp 2, expert 2": (1, f"{MIXTURE} strategy=expert trainer.devices=2 {UNITS}"),
    "mixture, fsdp 4, expert 2, blocks recomputed": (
        2,
        f"{MIXTURE} strategy=expert trainer.devices=4 {UNITS} "
        "strategy.activation_checkpointing=every",
    ),
    "mixture, fsdp 2 × tensor 2, expert 4": (
        3,
        f"{MIXTURE} strategy=fsdp_tensor strategy.expert=4 strategy.sequence_parallel=true "
        f"trainer.devices=4 {UNITS}",
    ),
    "ZeRO-1 2, bf16-mixed": (1, f"strategy=deepspeed_zero1 {ENGINE}"),
    "ZeRO-2 2, bf16-mixed": (1, f"strategy=deepspeed {ENGINE}"),
    "ZeRO-3 2, bf16-mixed": (1, f"strategy=deepspeed_zero3 {ENGINE}"),
    "ZeRO-3 2, bf16-mixed, each weight gathered twice": (
        1,
        f"strategy=deepspeed_zero3 {ENGINE} {TWICE}",
    ),
    "ZeRO-3 2, fp32": (1, f"strategy=deepspeed_zero3 {ENGINE} trainer.precision=32-true"),
}
SHARE = 0.02  # by which DeepSpeed's engine, which is not simulated, may differ from the formulas
HEAD = (
    "| layout | parameters, gradients, optimizer state | collectives of a step |",
    "| --- | --- | --- |",
)
MARKED = re.compile(r"(<!-- simulate-check -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)


def compare(names: list[str]) -> list[tuple[str, str, str]]:
    """Return (name, held, volume) of each case: "equal", or what differs."""
    composed = [command.composed(f"{MODEL} {CASES[name][1]}".split()) for name in names]
    ranks = [CASES[name][0] for name in names]
    requests = [
        simulation.Request(cfg=cfg, rank=rank, device=device)
        for (cfg, device), rank in zip(composed, ranks, strict=True)
    ]
    reports = simulation.simulate_all(requests)
    real = measured.measure([(cfg, rank) for (cfg, _), rank in zip(composed, ranks, strict=True)])
    rows = []
    for name, report, found in zip(names, reports, real, strict=True):
        if isinstance(report, Exception):
            raise report
        held = {kind: (found["held"][kind], size) for kind, size in report.held.items()}
        if "strategy=deepspeed" in CASES[name][1]:
            buffers = (
                1 if composed[names.index(name)][0].strategy.stage == 3 else 2
            )  # two overlap on a GPU
            held["bucket"] = (
                found["held"]["bucket"],
                report.peak_by_kind["communication"] / buffers,
            )
            rows.append((name, _near(held), _near(_by_kind(report.volumes, found["volumes"]))))
            continue
        volumes = {(v.axis, v.kind, v.ranks): (v.calls, v.bytes) for v in report.volumes}
        sent = {
            (axis, kind, ranks): (calls, size)
            for axis, kind, ranks, calls, size in found["volumes"]
        }
        volume = {
            " ".join(map(str, key)): (sent.get(key), volumes.get(key))
            for key in {**sent, **volumes}
        }
        rows.append((name, _verdict(held), _verdict(volume)))
    return rows


def _by_kind(
    predicted: Sequence[Volume], measured: Sequence[Any]
) -> dict[str, tuple[float, float]]:
    """Return measured and predicted bytes of each kind of collective, larger than a few numbers."""
    real: Counter[str] = Counter()
    for _, kind, _, calls, size in measured:
        real[kind] += size if size / calls > 1024 else 0
    found = {volume.kind: volume.bytes for volume in predicted}
    return {kind: (real[kind], found.get(kind, 0.0)) for kind in {*(+real), *found}}


def _near(pairs: Mapping[str, tuple[float, float]]) -> str:
    """Return by how much the farthest pair differs, or all that differ by more than SHARE."""
    shares = {key: abs(real - found) / max(real, found) for key, (real, found) in pairs.items()}
    far = {key: pairs[key] for key, share in shares.items() if share > SHARE}
    return _verdict(far) if far else f"within {max(shares.values()):.1%} of the formulas"


def _verdict(pairs: Mapping[str, tuple[object, object]]) -> str:
    wrong = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    return (
        "; ".join(
            f"{key}: measured {real}, predicted {found}" for key, (real, found) in wrong.items()
        )
        or "equal"
    )


def table(rows: Sequence[tuple[str, str, str]], *, before: str) -> str:
    """Return the table with these rows, and those of other cases as they were before."""
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in before.splitlines()}
    lines |= {name: f"| {name} | {held} | {volume} |" for name, held, volume in rows}
    return "\n".join([*HEAD, *(lines[name] for name in CASES if name in lines)])


def main() -> None:
    if unknown := [name for name in sys.argv[1:] if name not in CASES]:
        raise SystemExit(f"{unknown[0]}: there is no such case. Known: {', '.join(CASES)}")
    try:
        rows = compare(sys.argv[1:] or list(CASES))
    except ConfigError as error:
        raise SystemExit("\n".join(error.problems)) from error
    text = DOCUMENT.read_text()
    updated = MARKED.sub(lambda match: f"{match[1]}{table(rows, before=match[2])}{match[3]}", text)
    DOCUMENT.write_text(updated)
    print(table(rows, before=""))
    sys.exit(any("measured" in cell for row in rows for cell in row))


if __name__ == "__main__":
    main()
