"""Try this machine's GPUs for about half an hour, and write one JSON file that you can send back.

    make test-gpus
    python scripts/gpus.py --out gpus.json --skip simulated
    python scripts/gpus.py --model gpt_nano --accelerator cpu --devices 4   # the same in small

The large model needs eight GPUs of 80 GB. It checks links and versions
(scripts/doctor.py), proves a small model under every layout (scripts/prove.py: losses, weights, a
stop and a kill), trains a large model for some steps under several layouts and schedules beside
what scripts/simulate.py predicts, and resumes a save on half of the GPUs.
"""

import argparse
import csv
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
TRAIN = SCRIPTS.parent / "train.py"
sys.path.insert(0, str(SCRIPTS.parent / "src"))

from armature import hardware

SECTIONS = ("doctor", "layouts", "speed", "simulated", "resume")
SMALL = (
    "model=gpt_nano",
    "data=synthetic",
    "model.tied=false",  # the ends of a pipeline share nothing
    "data.context=64",
    "data.global_batch_size=64",
    "data.micro_batch_size=4",
    "optimizer=adamw",
    "trainer.matmul_precision=highest",
)
STEPS = 20
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpus.json"), metavar="FILE")
    parser.add_argument("--model", default="llama3_8b", help="trained for speed (llama3_8b)")
    parser.add_argument("--devices", type=int, default=None, help="all GPUs of this machine")
    parser.add_argument("--accelerator", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--skip", default=[], nargs="+", choices=SECTIONS, help="left out")
    args = parser.parse_args()
    devices = args.devices or hardware.gpu_count()
    if devices < 4 or devices % 4:
        parser.error(
            f"{devices} GPUs: a multiple of 4 is needed. Type --devices N, or "
            "--accelerator cpu --model gpt_nano --devices 4 to try this script without a GPU."
        )
    trial = Trial(args.out, model=args.model, devices=devices, accelerator=args.accelerator)
    for section in SECTIONS:
        if section not in args.skip:
            getattr(trial, section)()
    failed = [each["name"] for each in trial.results["runs"] if each["exit_code"]]
    print(f"{args.out}: {len(trial.results['runs'])} runs, {len(failed)} failed")
    for name in failed:
        print(f"  {name}")
    sys.exit(bool(failed))


class Trial:
    """Runs commands one after the other; the file holds all that have ended."""

    def __init__(self, out: Path, *, model: str, devices: int, accelerator: str) -> None:
        self.out, self.devices, self.accelerator = out, devices, accelerator
        self.folder = out.with_suffix("")
        self.large = (f"model={model}", "model.tied=false", "data=synthetic", "optimizer=adamw")
        self.results: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "devices": devices,
            "hardware": hardware.gpu_name() or hardware.cpu_name(),
            "versions": {name: version(name) for name in ("torch", "lightning")},
            "runs": [],
        }

    def doctor(self) -> None:
        self._run("doctor", "doctor.py", *self._layout("fsdp"))

    def layouts(self) -> None:
        """Prove a small model, whose layouts must be those of one process."""
        on_all = ("ddp", "fsdp", "hsdp", "fsdp_tensor", "fsdp_pipeline")
        counts = dict.fromkeys(("tensor", "pipeline", "context"), 2)
        counts |= dict.fromkeys(on_all, self.devices)
        names = ",".join(f"{name}:{count}" for name, count in counts.items())
        accelerator = f"trainer.accelerator={self.accelerator}"
        self._run("layouts", "prove.py", "--layouts", names, *SMALL, accelerator)

    def speed(self) -> None:
        """Train some steps; the first ones compile, gather shapes and fill caches."""
        for name, words in self._measured().items():
            self._train(name, *words, f"trainer.max_steps={STEPS}")

    def simulated(self) -> None:
        for name, words in self._measured().items():
            predicted = ("hardware=this",) if self.accelerator == "gpu" else ()
            printed = self._run(
                f"simulated {name}", "simulate.py", "--json", "--ranks", "0", *words, *predicted
            )
            if printed is not None:
                self._add(predicted=json.loads(printed[printed.index("[") :]))

    def resume(self) -> None:
        """Save on all GPUs and go on with half of them."""
        name, half = "resume", self.devices // 2
        first = self._train(name, *SMALL, *self._layout("fsdp"), "trainer.max_steps=10")
        if first is not None:
            layout = (*self._layout("fsdp"), f"trainer.devices={half}")
            self._train(name, *SMALL, *layout, "resume=required", "trainer.max_steps=20")

    def _layout(self, strategy: str) -> tuple[str, ...]:
        devices = f"trainer.devices={self.devices}"
        return f"strategy={strategy}", devices, f"trainer.accelerator={self.accelerator}"

    def _measured(self) -> dict[str, tuple[str, ...]]:
        """Return the commands of the large model, by name."""
        saving = (*self.large, "strategy.activation_checkpointing=every")
        found = {name: (*saving, *self._layout(name)) for name in ("fsdp", "fsdp_tensor", "hsdp")}
        for schedule in SCHEDULES:
            found[f"fsdp_pipeline {schedule}"] = (
                *saving,
                *self._layout("fsdp_pipeline"),
                f"strategy.schedule={schedule}",
                "data.micro_batch_size=4",  # four pieces
            )
        return found

    def _train(self, name: str, *words: str) -> str | None:
        run = self.folder / name.replace(" ", "-")
        decided = (
            f"run.root={run.parent}",
            f"run.name={run.name}",
            "logger=none",
            "trainer.log_every_n_steps=1",
            "trainer.test_at_end=false",
            "trainer.limit_val_batches=1",
            "task.preview_tokens=0",
        )
        printed = self._run(name, "train.py", *words, *decided)
        if printed is not None:
            rows = [*csv.DictReader((run / "timings.csv").open())]
            later = rows[len(rows) // 2 :]
            self._add(
                medians={
                    column: median(float(row[column]) for row in later)
                    for column in rows[-1]
                    if all(row[column] for row in later)
                }
            )
        return printed

    def _run(self, name: str, script: str, *words: str) -> str | None:
        """Run a script and note how it ended. Return what it printed, None if it failed."""
        print(f"{name} …", flush=True)
        began = time.monotonic()
        program = TRAIN if script == "train.py" else SCRIPTS / script
        done = subprocess.run(
            [sys.executable, str(program), *words], capture_output=True, text=True, check=False
        )
        self.results["runs"].append(
            {
                "name": name,
                "command": " ".join([script, *words]),
                "exit_code": done.returncode,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
        lines = (done.stdout + done.stderr).splitlines()
        self._add(printed=lines[-60:] if done.returncode or script != "train.py" else [])
        return None if done.returncode else done.stdout

    def _add(self, **facts: Any) -> None:
        self.results["runs"][-1] |= facts
        self.out.write_text(json.dumps(self.results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
