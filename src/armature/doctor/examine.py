"""The examination: checks of this machine first, then ranks that examine what they do together.

It never hangs.
"""

import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from armature import launch as run
from armature.doctor import environment as machine
from armature.doctor import finding, rank, run_directory
from armature.doctor.finding import Finding
from armature.errors import ConfigError, RunFailed, masked
from armature.launcher import environment, supervise
from armature.launcher.watch import RankWatcher

START_SECONDS = 60  # imports, on a slow file system
COLLECTIVES = 16  # checks that may each take deadlines["collective"]
SHOWN = 600  # characters of a rank's last output


def examine(
    cfg: DictConfig, *, deadlines: dict[str, float], show: Callable[[list[Finding]], None]
) -> int:
    """Examine the run that a configuration describes, and return the exit code: 0, 1 for warnings,
    2 for failures.

    Args:
        deadlines: see `session.Deadlines`.
        show: prints the findings. Of several ranks, one calls it.
    """
    reported: list[Finding] = []

    def report(found: list[Finding]) -> None:
        show(found)
        reported.extend(found)

    try:
        joined = run.join(cfg)
    except ConfigError as error:
        if environment.is_first("LOCAL_RANK", "SLURM_LOCALID"):
            report(finding.refused("launch", error.problems))
        return finding.exit_code(reported)
    own = machine.check(cfg) if environment.is_first("LOCAL_RANK") else []
    if finding.exit_code(own) == 2:  # the ranks would only fail for the same reason
        report(own)
        return 2
    own += machine.leftovers()
    if environment.is_first("LOCAL_RANK"):
        own += run_directory.check(cfg)
    if joined:
        rank.run(cfg, deadlines=deadlines, own=own, report=report)
    else:
        report(own + start_ranks(cfg, deadlines=deadlines))
    return finding.exit_code(reported)


def start_ranks(cfg: DictConfig, *, deadlines: dict[str, float]) -> list[Finding]:
    """Start the ranks of this machine, and return their report, or why there is none."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    seconds = START_SECONDS + COLLECTIVES * deadlines["collective"] + 2 * deadlines["steps"]
    with tempfile.TemporaryDirectory(prefix="armature-doctor-", ignore_cleanup_errors=True) as name:
        folder, how = Path(name), "ended"
        OmegaConf.save(cfg, folder / rank.CONFIG)
        (folder / rank.DEADLINES).write_text(json.dumps(deadlines))
        watcher = RankWatcher(folder / "heartbeats", ranks=cfg.trainer.devices)
        timer = threading.Timer(seconds, watcher.kill)
        timer.start()
        variables = {"TMPDIR": name}  # removed if they are killed
        try:
            with watcher:
                supervise.start_ranks(
                    cfg, watcher, "armature.doctor.rank", name, variables=variables, logs=folder,
                    join_seconds=START_SECONDS,
                )  # fmt: skip
        except RunFailed as error:
            return finding.refused("launch", [str(error)])
        except ChildFailedError as error:
            number, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
            how = f"rank {number} ended with exit code {failure.exitcode}"
        finally:
            timer.cancel()
        if (report := folder / rank.REPORT).is_file():
            return [Finding(*each) for each in json.loads(report.read_text())]
        if how == "ended" and cfg.launch.rdzv_endpoint:
            what = "The ranks of this machine have finished; another machine has the report."
            return [finding.ok("launch", what)]
        files = folder.rglob("std*.log")
        output = " ".join(" ".join(file.read_text(errors="replace") for file in files).split())
        what = f"The ranks left no report ({how}). Their last output: {masked(output)[-SHOWN:]}"
        remedy = "Correct the error, then examine again. Exit code -9: memory may have run out."
        return [finding.failure("launch", what, remedy=remedy)]
