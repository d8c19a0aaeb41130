"""The examination: checks of this machine first, then ranks that examine what they do together.

It never hangs.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from armature.doctor import environment as machine
from armature.doctor import finding, launch, rank, run_directory
from armature.doctor.finding import Finding
from armature.errors import ConfigError, error_line
from armature.launcher import environment, slurm, supervise

STOP_SECONDS = 5.0  # that ranks may take to end after a report
START_SECONDS = 60.0  # imports, on a slow file system
COLLECTIVES = 12  # checks that may each take deadlines["collective"]


def examine(
    cfg: DictConfig, *, deadlines: dict[str, float], show: Callable[[list[Finding]], None]
) -> int:
    """Examine the run that a configuration describes, and return the exit code: 0, 1 for warnings,
    2 for failures.

    Args:
        deadlines: see `session.Deadlines`.
        show: prints the findings. Of several ranks, one calls it.
    """
    shown: list[int] = []

    def report(found: list[Finding]) -> None:
        show(found)
        shown.append(finding.exit_code(found))

    _examine(cfg, deadlines, report)
    return max(shown, default=0)


def _examine(
    cfg: DictConfig, deadlines: dict[str, float], report: Callable[[list[Finding]], None]
) -> None:
    try:
        slurm.join(cfg)
    except (ConfigError, ValueError, KeyError) as error:
        # the last two for variables that no Slurm has set
        remedy = "Correct the batch script or the configuration."
        problems = (
            error.problems
            if isinstance(error, ConfigError)
            else [f"Slurm's variables: {error_line(error)}"]
        )
        if environment.is_first("SLURM_PROCID"):
            report([finding.failure(launch.GROUP, problem, remedy=remedy) for problem in problems])
        return
    joined = environment.is_joined()
    own = launch.check(cfg)
    if environment.is_first("LOCAL_RANK"):
        own = [*machine.check(cfg), *own, *run_directory.check(cfg)]
    if any(each.level == finding.FAILURE and each.group != run_directory.GROUP for each in own):
        # the other ranks of a machine would only fail for the same reason
        if environment.is_first("LOCAL_RANK"):
            report(own)
    elif joined:
        rank.run(cfg, deadlines=deadlines, own=own, report=report)
    elif cfg.trainer.num_nodes > 1 and not cfg.launch.rdzv_endpoint:
        what = (
            f"trainer.num_nodes={cfg.trainer.num_nodes}, but this command starts ranks on one "
            "machine."
        )
        remedy = (
            "Start the doctor as you start the run: with torchrun or srun, or type "
            "launch.rdzv_endpoint=HOST:PORT on "
            "each machine."
        )
        report([*own, finding.failure(launch.GROUP, what, remedy=remedy)])
    else:
        report(own + start_ranks(cfg, deadlines=deadlines))


def start_ranks(cfg: DictConfig, *, deadlines: dict[str, float]) -> list[Finding]:
    """Start the ranks of this machine, and return their report, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="armature-doctor-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        OmegaConf.save(cfg, folder / rank.CONFIG)
        (folder / rank.SETTINGS).write_text(json.dumps(deadlines))
        with _Ranks(cfg, folder) as ranks:
            end = (
                time.monotonic()
                + START_SECONDS
                + sum(deadlines.values())
                + COLLECTIVES * deadlines["collective"]
            )
            while time.monotonic() < end:
                if (report := folder / rank.REPORT).is_file():
                    return finding.from_records(json.loads(report.read_text()))
                if (found := ranks.early_end()) is not None:
                    return [found]
                time.sleep(0.05)
            what = "The ranks neither finished nor reported."
            return [
                finding.failure(
                    launch.GROUP, what, remedy=f"Their last output: {ranks.last_output()}"
                )
            ]


class _Ranks:
    """The ranks of this machine, as processes of their own that end with this one."""

    def __init__(self, cfg: DictConfig, folder: Path) -> None:
        self.cfg, self.folder = cfg, folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._ended_at: float | None = None

    def __enter__(self) -> "_Ranks":
        if self.cfg.launch.rdzv_endpoint:
            nodes, devices = self.cfg.trainer.num_nodes, self.cfg.trainer.devices
            agent = [
                "-m",
                "torch.distributed.run",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={self.cfg.launch.rdzv_endpoint}",
                "--rdzv-id=armature-doctor",
                f"--nnodes={nodes}",
                f"--nproc-per-node={devices}",
                "--max-restarts=0",
                "-m",
            ]
            self._start(0, agent, {})
            return self
        devices = self.cfg.trainer.devices
        for number in range(devices):
            variables = {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(devices),
                "LOCAL_WORLD_SIZE": str(devices),
                "GROUP_RANK": "0",
                **environment.rank_variables(
                    attempt=0,
                    heartbeats=self.folder / "heartbeats",
                    resized="",
                    store=self.folder / "store",
                ),
                **supervise.loopback_variables(),
            }
            self._start(number, ["-P", "-m"], variables)
        return self

    def _start(self, number: int, options: list[str], variables: dict[str, str]) -> None:
        shared = supervise.process_variables(self.cfg.trainer.devices)
        # removed if they are killed
        variables = {**os.environ, **shared, **variables, "TMPDIR": str(self.folder)}
        with (self.folder / f"rank_{number}.log").open("wb") as log:
            command = [sys.executable, *options, "armature.doctor.rank", str(self.folder)]
            process = subprocess.Popen(
                command, env=variables, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)

    def __exit__(self, *exception: object) -> None:
        end = time.monotonic() + (STOP_SECONDS if exception[0] is None else 0.0)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, end - time.monotonic()))
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with its loader workers
            process.wait()

    def early_end(self) -> Finding | None:
        """Return the finding about a rank that ended without a report, or None."""
        codes = [process.poll() for process in self.processes]
        ended = [number for number, code in enumerate(codes) if code is not None]
        if not ended:
            return None
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() - self._ended_at < STOP_SECONDS and all(
            codes[number] == 0 for number in ended
        ):
            return None  # another rank may be about to report
        first = next((number for number in ended if codes[number]), ended[0])
        code = codes[first] or 0
        if self.cfg.launch.rdzv_endpoint and code == 0:
            return finding.ok(
                launch.GROUP,
                "The ranks of this machine have finished; another machine has the report.",
            )
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        remedy = (
            "SIGKILL without a cause of yours means that memory ran out: dmesg | tail."
            if code == -signal.SIGKILL
            else "Correct the error, then examine again."
        )
        what = (
            f"Rank {first} {how} before it could report. Its last output: {self.last_output(first)}"
        )
        return finding.failure(launch.GROUP, what, remedy=remedy)

    def last_output(self, number: int = 0) -> str:
        lines = (self.folder / f"rank_{number}.log").read_text(errors="replace").split("\n")
        return " ".join([line.strip() for line in lines if line.strip()][-2:])[-600:] or "none"
