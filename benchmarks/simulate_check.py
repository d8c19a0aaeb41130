"""Predicted against measured: simulated ranks beside real processes on gloo, as a table in docs/simulator.md.

python -m benchmarks.simulate_check [NAME …]
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import simulate as command

from armature import simulation
from armature.errors import ConfigError
from armature.simulation import measured

DOCUMENT = ROOT / "docs" / "simulator.md"
MODEL = (
    "model=gpt_nano model.layers=4 model.width=128 model.tied=false data=synthetic data.context=64 optimizer=adamw "
    "data.global_batch_size=16 data.micro_batch_size=2 trainer.precision=32-true hardware=h100_80gb"
)
UNITS = "strategy.min_num_params=200000"  # several units, although the model is small
CASES = {  # name → (rank, overrides)
    "single": (0, "strategy=single data.micro_batch_size=8"),
    "ddp 2": (1, "strategy=ddp trainer.devices=2 data.micro_batch_size=4"),
    "fsdp 2": (1, f"strategy=fsdp trainer.devices=2 data.micro_batch_size=4 {UNITS}"),
    "fsdp 2, Muon": (1, f"strategy=fsdp trainer.devices=2 data.micro_batch_size=4 optimizer=muon {UNITS}"),
    "fsdp 2, bf16-mixed": (0, f"strategy=fsdp trainer.devices=2 data.micro_batch_size=4 trainer.precision=bf16-mixed {UNITS}"),
    "fsdp 4, every block recomputed": (3, f"strategy=fsdp trainer.devices=4 strategy.activation_checkpointing=every {UNITS}"),
    "hsdp 2 × 2": (3, f"strategy=hsdp trainer.devices=4 {UNITS}"),
    "tensor 2": (1, "strategy=tensor trainer.devices=2 data.micro_batch_size=8"),
    "fsdp 2 × tensor 2": (2, f"strategy=fsdp_tensor trainer.devices=4 data.micro_batch_size=4 {UNITS}"),
    "pipeline 2, first": (0, "strategy=pipeline trainer.devices=2 data.micro_batch_size=8"),
    "pipeline 2, last": (1, "strategy=pipeline trainer.devices=2 data.micro_batch_size=8"),
    "interleaved 2": (1, "strategy=pipeline trainer.devices=2 data.micro_batch_size=8 strategy.schedule=interleaved_1f1b"),
    "fsdp 2 × pipeline 2": (3, f"strategy=fsdp_pipeline trainer.devices=4 data.micro_batch_size=8 {UNITS}"),
    "3d, 2 × 2 × 2": (7, f"strategy=3d trainer.devices=8 data.micro_batch_size=8 {UNITS}"),
}  # fmt: skip


def compare(names: list[str]) -> list[tuple[str, str, str]]:
    """Return (name, held, volume) of each case: "equal", or both values."""
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
        volumes = {(v.axis, v.kind, v.ranks): (v.calls, v.bytes) for v in report.volumes}
        sent = {tuple(key): (calls, size) for *key, calls, size in found["volumes"]}
        volume = {" ".join(map(str, key)): (sent.get(key), volumes.get(key)) for key in {**sent, **volumes}}
        rows.append(
            (name, _verdict(held, sum(report.held.values())), _verdict(volume, sum(s for _, s in sent.values())))
        )
    return rows


def _verdict(pairs: dict[str, tuple[object, object]], total: float) -> str:
    wrong = [
        f"{key}: measured {real}, predicted {predicted}"
        for key, (real, predicted) in pairs.items()
        if real != predicted
    ]
    return "; ".join(wrong) or f"equal: {total:,.0f} B"


def main() -> None:
    if unknown := [name for name in sys.argv[1:] if name not in CASES]:
        raise SystemExit(f"{unknown[0]}: there is no such case. Known: {', '.join(CASES)}")
    try:
        rows = compare(sys.argv[1:] or list(CASES))
    except ConfigError as error:
        raise SystemExit("\n".join(error.problems)) from error
    lines = ["| layout | parameters, gradients, optimizer state | collectives of a step |", "| --- | --- | --- |"]
    table = "\n".join(lines + [f"| {name} | {held} | {volume} |" for name, held, volume in rows])
    print(table)
    if not sys.argv[1:]:
        text = DOCUMENT.read_text()
        marked = re.compile(r"(<!-- simulate-check -->\n).*?(\n<!-- end -->)", re.DOTALL)
        DOCUMENT.write_text(marked.sub(lambda match: match[1] + table + match[2], text))
    sys.exit(any("measured" in cell for row in rows for cell in row))


if __name__ == "__main__":
    main()
