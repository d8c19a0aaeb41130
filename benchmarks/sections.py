"""The sections of a benchmark: the contenders of each, and what is computed from their records."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from armature import hardware
from benchmarks import loss, scaling, serving, startup
from benchmarks.contender import ROOT, Contender, environment
from benchmarks.job import TINY, Workload, bare, compose, heap_variables, ours, rival
from benchmarks.rounds import Record, Rounds

NAMES = ("training", "strategies", "overhead", "startup", "loss", "data", "saves")
STRATEGIES = {  # by displayed name: overrides, and the minimum number of ranks
    "ddp": (("strategy=ddp",), 2),
    "fsdp": (("strategy=fsdp",), 2),
    "fsdp, ZeRO-2": (("strategy=fsdp", "strategy.reshard_after_forward=false"), 2),
    "hsdp": (("strategy=hsdp", "strategy.shard=2"), 4),
    "tensor": (("strategy=tensor",), 2),
    "pipeline (untied)": (("strategy=pipeline", "model.tied=false"), 2),
    "fsdp × tensor": (("strategy=fsdp_tensor", "strategy.tensor=2"), 4),
    "deepspeed (AdamW)": (("strategy=deepspeed", "optimizer=adamw_bench"), 2),
}
LOSS = {"tokens": 4096, "width": 256, "vocabulary": 32000}
TINY_MULTIPLE = 200
SAVED_MEGABYTES = 1000
UNTOUCHED = "glibc's default heap"  # added to the name of a contender that is run as people run it


class Benchmark:
    """Run the sections that `args` name (benchmarks/__main__.py).

    Args:
        folder: for job files, run directories and logs.
        say: receives lines of progress.
    """

    def __init__(
        self, args: argparse.Namespace, folder: Path, *, say: Callable[[str], None]
    ) -> None:
        self.args, self.folder, self.say = args, folder, say
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Return the results of all sections.

        `save` is called after each, so that a later failure loses nothing.
        """
        results: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
            "sections": {},
        }
        self.workload = compose(self.args.overrides)
        results["rate"] = self.matrix_rate()
        results["machine"] = {
            "device": results["rate"]["device"],
            "gpus": hardware.gpu_count(),
            "python": platform.python_version(),
            "torch": results["rate"]["torch"],
            "load_before": os.getloadavg()[0],
        }
        for name in (*self.args.sections, *(["scale"] if self.args.scale else [])):
            self.say(f"--- {name}")
            results["sections"][name] = getattr(self, name)()
            save(results)
        again = self.matrix_rate()  # keep the better one, because the first may have been disturbed
        results["rate"] = max(results["rate"], again, key=lambda rate: rate["rate"])
        save(results)
        return results

    def matrix_rate(self) -> dict[str, Any]:
        job = self.workload.job
        dtype = "bfloat16" if job.precision.startswith("bf16") else "float32"
        return counted("rate", job.device, dtype)

    def training(self) -> dict[str, Any]:
        """One process: the bare loop, ours, and installed alternatives."""
        workload = replace(self.workload, ranks=1)
        job_file = workload.job.save(self.folder / "job.json")
        contenders = [bare(job_file), ours(workload, self.folder)]
        if heap_variables(job_file):
            contenders.append(bare(job_file, name=f"bare loop, {UNTOUCHED}", keeps_memory=False))
        contenders += self.rivals(job_file)
        return self.section(workload, contenders)

    def strategies(self) -> dict[str, Any] | None:
        """Several ranks, compared with the bare loop in one process; on a CPU they share its
        cores.
        """
        ranks = self.args.ranks or max(
            hardware.gpu_count() if self.workload.accelerator == "gpu" else 2, 1
        )
        if ranks == 1:
            return {"records": [], "note": "one GPU: no strategy of several ranks can run"}
        overrides = tuple(o for o in self.workload.overrides if not o.startswith("strategy="))
        workload = replace(self.workload, overrides=overrides)
        job_file = workload.job.save(self.folder / "job.json")
        contenders = [bare(job_file)]
        for name in ("ddp", "fsdp"):
            port = 29617 + len(contenders)
            contenders.append(bare(job_file, name, name=f"raw {name}", ranks=ranks, port=port))
        if heap_variables(job_file):
            name, port = f"raw ddp, {UNTOUCHED}", 29617 + len(contenders)
            contenders.append(
                bare(job_file, "ddp", name=name, ranks=ranks, port=port, keeps_memory=False)
            )
        for name, (more, fewest) in STRATEGIES.items():
            if ranks >= fewest and ranks % fewest == 0:
                contenders.append(
                    ours(workload, self.folder, *more, name=f"ours, {name}", ranks=ranks)
                )
        return self.section(workload, contenders)

    def overhead(self) -> dict[str, Any]:
        """A tiny model, whose step time is mostly that of the training loop."""
        workload = compose([*TINY, f"trainer.accelerator={self.workload.accelerator}"])
        job_file = workload.job.save(self.folder / "tiny.json")
        contenders = [bare(job_file), ours(workload, self.folder, name="ours")]
        contenders += self.rivals(job_file)
        return self.section(
            workload, contenders, multiple=TINY_MULTIPLE, seconds=self.args.seconds / 2
        )

    def startup(self) -> dict[str, Any]:
        workload = replace(self.workload, ranks=1)
        job_file = workload.job.save(self.folder / "job.json")
        contenders = [bare(job_file), ours(workload, self.folder)]
        records = startup.measure(
            contenders, self.folder, rounds=max(5, self.args.rounds), say=self.say
        )
        return {"records": records, "over_the_limit": startup.over_the_limit(records, "ours")}

    def loss(self) -> dict[str, Any]:
        rows = {}
        dtype = "bfloat16" if self.workload.job.precision.startswith("bf16") else "float32"
        for variant in loss.VARIANTS:
            try:
                rows[variant] = loss.run(
                    variant, **LOSS, device=self.workload.job.device, dtype=dtype
                )
            except RuntimeError as error:
                rows[variant] = {"note": f"failed: {error}"}
            self.say(f"{variant} {rows[variant]}")
        return {**LOSS, "dtype": dtype, "rows": rows}

    def data(self) -> dict[str, Any]:
        """Speed of the loader compared with training, and samples that cost CPU time."""
        job_file = self.workload.job.save(self.folder / "job.json")
        images = serving.images(self.folder, rounds=max(3, self.args.rounds // 3), say=self.say)
        return {**serving.serve(job_file), "images": images}

    def saves(self) -> dict[str, Any]:
        """A save of a gigabyte, and what it costs the steps after it."""
        folder = self.folder / "saves"
        folder.mkdir(exist_ok=True)
        rounds, device = max(3, self.args.rounds // 2), self.workload.job.device
        return printed("benchmarks.saves", str(SAVED_MEGABYTES), str(rounds), device, str(folder))

    def scale(self) -> dict[str, Any]:
        """Weak and strong scaling of ours, and a projection if there is more than one rank."""
        args = self.args
        result = scaling.measure(
            self.workload,
            self.folder,
            ranks=args.scale,
            rounds=args.rounds,
            block_seconds=args.seconds,
            say=self.say,
        )
        base = result["records"][0]
        if max(args.scale) > 1 and base.seconds:
            collectives = scaling.count(self.workload, self.folder)
            seconds = sorted(base.seconds)[len(base.seconds) // 2]
            result["collectives"], result["bandwidth"] = collectives, args.bandwidth * 1e9
            result["projection"] = scaling.project(
                collectives, compute_seconds=seconds, bandwidth=result["bandwidth"]
            )
        return result

    def rivals(self, job_file: Path) -> list[Contender]:
        names = ("lightning", "fabric", "accelerate", "transformers")
        return [rival(name, job_file, self.folder) for name in names]

    def section(
        self,
        workload: Workload,
        contenders: list[Contender],
        *,
        multiple: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Measures; the first contender is the one that the others are held against."""
        if self.args.only:
            words = self.args.only
            contenders = [
                contenders[0],
                *(c for c in contenders[1:] if any(word in c.name for word in words)),
            ]
        rounds = Rounds(
            contenders, self.folder, block_seconds=seconds or self.args.seconds,
            multiple=multiple or workload.job.log_every_n_steps, say=self.say,
        )  # fmt: skip
        records: list[Record] = (rounds.alone if self.args.alone else rounds.together)(
            self.args.rounds
        )
        job = workload.job
        return {
            "model": workload.model_name,
            "overrides": list(workload.overrides),
            "precision": job.precision,
            "optimizer": job.optimizer["_target_"].rpartition(".")[2],
            "compile": job.compile,
            "float8": job.float8,
            "global_batch_size": job.global_batch_size,
            "context": job.context,
            "flops_per_step": counted("step", str(job.save(self.folder / "counted.json"))),
            "records": records,
        }


def counted(*words: str) -> Any:
    return printed("benchmarks.flops", *words)


def printed(module: str, *words: str) -> Any:
    """Return the JSON that a module prints: in a process of its own, because this one imports no
    torch.
    """
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])
