"""Derive from overrides what all contenders train. Imports no torch."""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from armature.launcher import heap
from benchmarks.contender import ROOT, Contender, environment, file_name

FOREVER = 1_000_000  # optimizer steps: a benchmark ends when its blocks are measured
CONFIGS = ROOT / "benchmarks" / "configs"  # groups only for benchmarks
EXTRAS = Path(sys.prefix) / "extras"  # packages that no other start should see: Makefile
PINNED = {  # options of ours that no change of configs/ moves, by group
    "task": "language_modeling",
    "model": "gpt_bench",
    "data": "stdlib_bench",
    "optimizer": "muon_bench",
    "scheduler": "wsd_bench",
    "trainer": "bench",
}
PINNED_STRATEGY = (
    "strategy.activation_checkpointing=none",
    "strategy.compile=none",
    "strategy.float8=false",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One optimizer step's work.

    Batch sizes are samples; `micro_batch_size` None means a rank's whole share.

    Attributes:
        tokens: file and dtype of the memory-mapped tokens.
        model, optimizer, scheduler: `_target_` and arguments.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    tokens: tuple[str, str]
    context: int
    global_batch_size: int
    micro_batch_size: int | None
    precision: str
    device: str
    clip: float | None
    compile: str
    compile_mode: str
    float8: bool | str
    activation_checkpointing: str | int
    total_steps: int
    log_every_n_steps: int
    seed: int

    def save(self, file: Path) -> Path:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return file

    def micro(self, ranks: int) -> int:
        """Return the samples per rank in one forward pass."""
        return self.micro_batch_size or self.global_batch_size // ranks

    def accumulate(self, ranks: int) -> int:
        return self.global_batch_size // (self.micro(ranks) * ranks)

    @classmethod
    def load(cls, file: str) -> "Job":
        return cls(**json.loads(Path(file).read_text()))


@dataclass(frozen=True)
class Workload:
    """The measured work: the contenders' job, and the overrides that make ours equal.

    Attributes:
        allowed: launch.allowed_packages, with this folder's.
        ranks: processes that the overrides ask for.
        accelerator: cpu or gpu.
    """

    job: Job
    overrides: tuple[str, ...]
    allowed: tuple[str, ...]
    ranks: int
    accelerator: str
    model_name: str


def pinned(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides behind those of the measured job: a better default of training must not
    move the ruler.

    A group that is typed keeps its own settings, and nothing is pinned beside an experiment, which
    chooses groups.
    """
    typed = {override.partition("=")[0] for override in overrides}
    searched = f"hydra.searchpath=[file://{CONFIGS}]"
    if typed & {"experiment", "debug"}:
        return (searched, *overrides)
    groups = (f"{group}={option}" for group, option in PINNED.items() if group not in typed)
    return (searched, *groups, *PINNED_STRATEGY, *overrides)


def compose(overrides: Sequence[str]) -> Workload:
    """Return the measured job with these overrides, and prepare its data.

    Raises:
        ConfigError: for what training refuses, and for data that are no tokens.
    """
    import hydra
    from omegaconf import OmegaConf

    from armature.errors import ConfigError
    from armature.validation.checks import check
    from armature.validation.composing import composing, instantiate

    overrides = pinned(overrides)
    with composing():
        name = hydra.compose(
            "train", list(overrides), return_hydra_config=True
        ).hydra.runtime.choices.model
        composed = hydra.compose(
            "train", [*overrides, allowed("armature", "benchmarks", "torch", "lightning.pytorch")]
        )
        packages = hydra.compose("train", list(overrides)).launch.allowed_packages
    cfg = check(composed)
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # pyright: ignore[reportAssignmentType]
    data, trainer, strategy = plain["data"], plain["trainer"], plain["strategy"]
    source: Any = instantiate(cfg.data.source) if "source" in data else None
    if not hasattr(source, "tokens"):
        raise ConfigError(
            f"data={data['_target_']}: the bare loop reads memory-mapped tokens. Type data=stdlib "
            "or data=text."
        )
    source.prepare()
    array = source.tokens("train")
    micro = data["micro_batch_size"]
    job = Job(
        model=plain["model"],
        optimizer=plain["optimizer"],
        scheduler=plain["scheduler"],
        tokens=(str(array.filename), str(array.dtype)),
        context=data.get("context", 1),
        global_batch_size=data["global_batch_size"],
        micro_batch_size=None if micro == "auto" else micro,
        precision=trainer["precision"],
        device="cuda" if trainer["accelerator"] == "gpu" else trainer["accelerator"],
        clip=1.0 if trainer["gradient_clip_val"] == "auto" else trainer["gradient_clip_val"],
        compile=strategy["compile"],
        compile_mode=strategy.get("compile_mode", "default"),
        float8=strategy.get("float8", False),
        activation_checkpointing=strategy["activation_checkpointing"],
        total_steps=FOREVER,
        log_every_n_steps=trainer["log_every_n_steps"],
        seed=plain["seed"],
    )
    return Workload(
        job,
        tuple(overrides),
        (*packages, "benchmarks"),
        trainer["devices"],
        trainer["accelerator"],
        str(name),
    )


def allowed(*packages: str) -> str:
    return f"launch.allowed_packages=[{','.join(packages)}]"


def ours(
    workload: Workload, folder: Path, *more: str, name: str = "ours", ranks: int | None = None
) -> Contender:
    """Return a user's command with a gate.

    The default callbacks, loggers, display and checkpoints are on.
    """
    ranks = ranks or workload.ranks
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *workload.overrides,
        *more,
        f"trainer.devices={ranks}",
        f"run.root={folder / 'runs'}",
        f"run.name={file_name(name)}",
        f"trainer.max_steps={FOREVER}",
        "trainer.max_epochs=null",
        allowed(*workload.allowed),
        "+callbacks.gate._target_=benchmarks.lightning_gate.LightningGate",
    ]
    return Contender(name, command, ranks=ranks)


def bare(
    job_file: Path, *strategy: str, name: str = "bare loop", ranks: int = 1, port: int = 29617
) -> Contender:
    """Return the plain loop, in one process or as ranks of raw ddp or fsdp; its heap is kept as
    ours.
    """
    environment = heap_variables(job_file, ranks=ranks)
    if ranks > 1:
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
        environment |= {
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        }
    command = [sys.executable, "-m", "benchmarks.bare", str(job_file), *strategy]
    return Contender(name, command, ranks=ranks, spawn=ranks, environment=environment)


def heap_variables(job_file: Path, *, ranks: int = 1) -> dict[str, str]:
    """Return the variables that give another contender the heap that ours gives itself, or none on
    a GPU.
    """
    device = Job.load(str(job_file)).device
    of_ranks = heap.rank_variables(device)
    found = {name: str(value) for name, (_, value) in heap.SETTINGS.items()} if of_ranks else {}
    return found | (of_ranks if ranks > 1 else {})


def rival(which: str, job_file: Path, folder: Path) -> Contender:
    """Return Lightning, Fabric, accelerate or transformers as a contender."""
    package = {"fabric": "lightning"}.get(which, which)
    apart = (EXTRAS / package).is_dir()
    missing = None if apart or importlib.util.find_spec(package) else "not installed"
    command = [sys.executable, "-m", "benchmarks.rivals", which, str(job_file), str(folder / which)]
    path = {"PYTHONPATH": f"{environment()['PYTHONPATH']}{os.pathsep}{EXTRAS}"}
    shown = {
        "lightning": "stock Lightning",
        "fabric": "Lightning Fabric",
        "transformers": "transformers' Trainer",
    }
    variables = heap_variables(job_file) | (path if apart else {})
    return Contender(shown.get(which, which), command, missing=missing, environment=variables)
