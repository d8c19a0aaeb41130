"""One rank of an examination.

`python -m armature.doctor.rank FOLDER`, or a rank that torchrun or srun started.
"""

import hashlib
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from armature import config, files, run_dir
from armature.doctor import finding
from armature.doctor.finding import Finding
from armature.errors import ConfigError, error_line, masked, place_of
from armature.launcher import rank

# in the folder of an examination
REPORT, CONFIG, DEADLINES = ("report.json", "config.yaml", "deadlines.json")


def run(
    cfg: DictConfig,
    *,
    deadlines: dict[str, float],
    own: list[Finding],
    report: Callable[[list[Finding]], None],
) -> None:
    """Meet the other ranks and examine what they do together.

    One of them calls `report` with everyone's findings.

    Args:
        deadlines: see `session.Deadlines`.
        own: what this rank has found on its machine.
    """
    import lightning.pytorch as L
    import torch

    from armature.doctor import communication, session, training
    from armature.training import process

    process.quiet()
    torch.set_float32_matmul_precision(cfg.trainer.matmul_precision)
    on_gpus = cfg.trainer.accelerator == "gpu"
    met = session.meet(
        deadlines=session.Deadlines(**deadlines),
        report=report,
        own=own,
        alike=_alike(cfg),
        on_gpus=on_gpus,
    )
    with _naming_errors(met, "communication"):
        communication.check(cfg, met)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    with _naming_errors(met, "gradients"):
        training.check(cfg, met)
    met.finish()


def _alike(cfg: DictConfig) -> dict[str, str]:
    """Return what must be equal on all ranks, by its name."""
    import torch

    files_of_code = sorted(Path(__file__).parents[1].rglob("*.py"))
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files_of_code))
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "lightning": metadata.version("lightning"),
        "The configuration": run_dir.fingerprint(cfg),
        "The code of armature": code.hexdigest()[:8],
    }


@contextmanager
def _naming_errors(met: Any, group: str) -> Iterator[None]:
    """Report an error as a finding, and end the examination: the other ranks would wait for this
    one.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError):
            what = " ".join(error.problems)
        else:
            traceback.print_exc()
            what = f"{error_line(error)[:400]} ({place_of(error)})"
        remedy = "Correct it, then examine again."
        met.fail(finding.failure(group, masked(what), remedy=remedy, where=met.name()))


def main() -> None:
    """Run a rank that the doctor itself started. Its report is a file in the folder."""
    rank.end_with_parent()
    folder = Path(sys.argv[1])
    deadlines = json.loads((folder / DEADLINES).read_text())

    def report(found: list[Finding]) -> None:
        files.replace(folder / REPORT, json.dumps(found))

    run(config.load(folder / CONFIG), deadlines=deadlines, own=[], report=report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo can abort the interpreter's teardown


if __name__ == "__main__":
    main()
