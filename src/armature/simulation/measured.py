"""The same step in real processes: what ranks on gloo hold and send, to compare simulations with.

Nothing is replaced.

    python -m armature.simulation.measured CASES.json     prints one JSON line for each case

A case is {"cfg": …, "rank": …}. Its ranks are forked, so that torch is imported once.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

SECONDS = 300  # for all ranks of a case


def measure(cases: Sequence[tuple[DictConfig, int]]) -> list[dict[str, Any]]:
    """Return {"held": bytes by kind, "volumes": [[axis, kind, ranks, calls, bytes], …]} of a rank
    for each case.
    """
    plain = [
        {"cfg": OmegaConf.to_container(cfg, resolve=False), "rank": rank} for cfg, rank in cases
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plain, file)
        file.flush()
        command = [sys.executable, "-m", "armature.simulation.measured", file.name]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(f"exit code {result.returncode}:\n{result.stderr}")
    return [json.loads(line) for line in result.stdout.splitlines()]


def main() -> None:
    from armature import worker  # noqa: F401  # before ranks are forked

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for case in json.loads(Path(sys.argv[1]).read_text()):
        with tempfile.TemporaryDirectory(prefix="armature-measured-") as folder:
            replies.write(_measure(case, Path(folder)) + "\n")
            replies.flush()


def _measure(case: dict[str, Any], folder: Path) -> str:
    from armature.layout import Layout
    from armature.validation import checks

    cfg: Any = OmegaConf.create(case["cfg"])
    cfg.trainer.accelerator, cfg.logger, cfg.resume = "cpu", {}, "never"
    cfg.run.root, cfg.run.name, cfg.run.report = str(folder), "run", False
    cfg = checks.check(cfg)
    cfg.run.dir = str(folder / "run")
    (folder / "run/logs").mkdir(parents=True)
    ranks = Layout.of(cfg).world_size
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            _run_rank(cfg, rank, ranks=ranks, folder=folder, writes=rank == case["rank"])
        children.append(child)
    failed = [status for child in children if (status := os.waitpid(child, 0)[1])]
    if failed:
        raise RuntimeError(f"{len(failed)} of {ranks} ranks failed; their tracebacks are above")
    return (folder / "result.json").read_text()


def _run_rank(cfg: DictConfig, rank: int, *, ranks: int, folder: Path, writes: bool) -> None:
    import faulthandler
    import traceback

    try:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        if ranks > 1:
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": "0",
                "ARMATURE_STORE": str(folder / "store"),
            }
        found = _step(cfg)
        if writes:
            (folder / "result.json").write_text(json.dumps(found))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _step(cfg: DictConfig) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from armature import worker
    from armature.layout import Layout
    from armature.parallel import process_group
    from armature.simulation.probe import MeasuredStep, StepEnded
    from armature.training import process
    from armature.training.stop import StopOnSignal

    torch.set_num_threads(1)
    process.quiet()
    process_group.init()
    run = worker.build(cfg, StopOnSignal(max_seconds=None, deadline=None))
    layout = Layout.of(cfg)
    probe = MeasuredStep(layout.axes, engine=layout.kind == "deepspeed")
    run.trainer.callbacks.insert(0, probe)  # pyright: ignore[reportAttributeAccessIssue]
    with suppress(StepEnded):
        run.trainer.fit(run.task, datamodule=run.data)
    if dist.is_initialized():
        dist.barrier()
    return {
        "held": probe.held,
        "volumes": [[*key, *value[:2]] for key, value in sorted(probe.collectives.volumes.items())],
    }


if __name__ == "__main__":
    main()
