"""A run that is disturbed once, resumes, and is compared with the undisturbed one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from armature.checkpoint import directory, resume
from armature.proof import compare
from tests import running
from tests.support.faults.inject import note_strike

STEPS = 10
EVERY = 2  # optimizer steps between two checkpoints
WITHIN = 60.0  # seconds from a fault to the first new step, on two busy cores
LIMIT = 90.0  # seconds for one command; then it counts as stuck and is killed
ORPHANS_WITHIN = 5.0  # seconds after the command's end

OVERRIDES = [
    *running.TINY,
    f"trainer.max_steps={STEPS}",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
    "task.preview_tokens=0",
    "model.dropout=0.1",  # so that the random state matters
    "model.tied=false",  # a pipeline's ends cannot share a parameter
    f"checkpoint.every_n_steps={EVERY}",
    "checkpoint.keep_last=3",
]

RANKS = {"single": 1, "ddp": 2, "fsdp": 2, "tensor": 2, "pipeline": 2, "deepspeed": 2}


class Session:
    """Shared by the runs: the corpus, the cache of its tokens, undisturbed and stopped runs, and
    the folder of all that.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = running.write_corpus(folder / "corpus")
        self.stack = ExitStack()
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which is called once per name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def reference(self, strategy: str) -> "Run":
        """The undisturbed run."""

        def make() -> Run:
            run = Run(self, strategy, f"undisturbed {strategy}")
            code = run.start().wait(5 * LIMIT)  # DeepSpeed compiles extensions first
            run.kill()
            assert code == 0, f"the undisturbed run ended with {code}: {run.output()[-1000:]}"
            return run

        return self.once(f"undisturbed {strategy}", make)


class Run:
    """One run directory, and the commands started in it."""

    def __init__(self, session: Session, strategy: str, name: str) -> None:
        self.session, self.strategy, self.ranks = session, strategy, RANKS[strategy]
        self.folder = session.folder / name.replace(" ", "-").replace("/", "-")
        self.commands: list[Command] = []
        self.overrides: list[str] = []
        self.fault, self.at_step, self.rank = "none", 0, 0
        self.folder.mkdir(exist_ok=True)

    @property
    def directory(self) -> Path:
        return self.folder / "outputs" / "run"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def words(self) -> list[str]:
        """Return the command, which is the same for each start."""
        # with restarts, an agent watches a single process too
        launch = [f"trainer.devices={self.ranks}", "launch.max_restarts=2"]
        script = str(running.ROOT / "train.py")
        return [sys.executable, script, *self.arguments(), *launch, *self.overrides]

    def arguments(self) -> list[str]:
        """Return the arguments of the script, without those that start ranks."""
        inject = {
            "fault": self.fault,
            "at_step": self.at_step,
            "rank": self.rank,
            "folder": self.folder,
        }
        return [
            *OVERRIDES,
            f"data.path={self.session.corpus}",
            f"strategy={self.strategy}",
            f"run.root={self.folder / 'outputs'}",
            "run.name=run",
            "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]",
            "+callbacks.inject._target_=tests.support.faults.inject.Inject",
            *(f"+callbacks.inject.{name}={value}" for name, value in inject.items()),
        ]

    def variables(self) -> dict[str, str]:
        variables = running.environment(
            ARMATURE_CACHE=str(self.session.folder / "cache"),
            PYTHONPATH=running.PYTHONPATH,
            FAULTS_FOLDER=str(self.folder),  # identifies the run's processes
            DS_ACCELERATOR="cpu",
        )
        # otherwise every start compiles all Python files again
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        return variables

    def start(self, words: Sequence[str] | None = None, **variables: str) -> "Command":
        """Start the command.

        Args:
            words: another command than `self.words()`.
        """
        output = self.folder / f"output.{len(self.commands)}.txt"
        self.commands.append(
            Command(words or self.words(), self.folder, self.variables() | variables, output)
        )
        return self.commands[-1]

    def output(self) -> str:
        """Return the output of all commands, including log files of ranks."""
        files = [
            *sorted(self.folder.glob("output.*.txt")),
            *sorted(self.directory.glob("logs/*.log")),
        ]
        return "\n".join(file.read_text(errors="replace") for file in files)

    # ------------------------------------------------------------ the journal
    def journal(self) -> dict[int, list[tuple[float, str, int, int]]]:
        """Return entries by rank: (time, start or step, step, process id)."""
        found = {}
        for file in self.folder.glob("journal.*"):
            lines = [line.split() for line in file.read_text().splitlines()]
            entries = [(float(t), kind, int(step), int(pid)) for t, kind, step, pid in lines]
            found[int(file.suffix[1:])] = entries
        return found

    def pids(self) -> list[int]:
        """Return the newest process of each rank."""
        return [entries[-1][3] for entries in self.journal().values()]

    def living_ranks(self) -> list[int]:
        return [p.pid for p in self.processes() if p.pid in self.pids()]

    def repeated(self) -> int:
        """Return the number of steps that a rank repeated, the maximum over ranks."""
        of_ranks = [
            [step for _, kind, step, _ in entries if kind == "step"]
            for entries in self.journal().values()
        ]
        return max((len(steps) - len(set(steps)) for steps in of_ranks), default=0)

    def struck_at(self) -> float | None:
        """Return the time of the fault in seconds since 1970, or None."""
        with suppress(OSError, ValueError):
            return float((self.folder / "struck").read_text().split()[0])
        return None

    def at_stake(self) -> int:
        """Return the number of steps between the last checkpoint and the fault."""
        struck = self.struck_at()
        if struck is None:
            return 0
        name = (self.folder / "struck").read_text().split()[1]
        steps = [
            (when, step)
            for of_rank in self.journal().values()
            for when, kind, step, _ in of_rank
            if kind == "step"
        ]
        return max(step for when, step in steps if when <= struck) - int(name.removeprefix("step="))

    def recovered_after(self) -> float | None:
        """Return the seconds from the fault to the first new step of processes started after it.

        If none was started, because the run continued: the seconds to the next step.
        """
        struck = self.struck_at()
        entries = [entry for of_rank in self.journal().values() for entry in of_rank]
        if struck is None:
            return None
        old = {pid for when, kind, _, pid in entries if kind == "start" and when <= struck}
        steps = [(when, step, pid) for when, kind, step, pid in entries if kind == "step"]
        came_after = any(pid not in old for _, _, pid in steps)
        done = max(
            (step for when, step, pid in steps if pid in old and (came_after or when <= struck)),
            default=0,
        )
        beyond = [when for when, step, pid in steps if step > done and when > struck]
        return min(beyond) - struck if beyond else None

    def note_strike(self, *, seconds_ago: float = 0.0) -> None:
        """Record the time of a fault from outside."""
        note_strike(self.folder, self.checkpoints, seconds_ago=seconds_ago)

    def release(self) -> None:
        """Release the rank that waits for the fault."""
        (self.folder / "acted").touch()

    # ------------------------------------------------------------ leftovers
    def processes(self) -> list[psutil.Process]:
        """Return all processes of this run, wherever they were started."""
        return [process for process in psutil.process_iter() if _belongs(process, self.folder)]

    def orphans(self) -> list[psutil.Process]:
        """Return the processes that are alive a few seconds after the commands ended."""
        end = time.monotonic() + ORPHANS_WITHIN
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return left

    def kill(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for command in self.commands:
            command.process.wait()

    def half_checkpoints(self) -> list[str]:
        """Return the names of what is in the checkpoint folder and is not an intact checkpoint."""
        found = [
            path.name
            for path in self.checkpoints.iterdir()
            if path.name.endswith((".part", ".old"))
        ]
        for path in resume.candidates(self.checkpoints):
            problem = directory.problem(path) or directory.checksum_problem(path)
            if problem is not None:
                found.append(f"{path.name}: {problem}")
        return found

    def difference(self, other: "Run") -> str | None:
        """Return what differs in the last checkpoint or metrics.csv, or None if both are equal bit
        for bit.
        """
        found = compare.first(compare.compare(other.directory, self.directory, exact=True))
        return None if found is None else f"step {found.step}, {found.what}"


class Command:
    """One start of a run, whose output goes to a file."""

    def __init__(
        self, words: Sequence[str], folder: Path, variables: dict[str, str], output: Path
    ) -> None:
        with output.open("w") as file:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if it has not ended in time; it then keeps running."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Return whether a condition became true while the command was running."""
        return (
            wait_until(lambda: condition() or self.process.poll() is not None, seconds)
            and condition()
        )

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.process.pid, number)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition became true in that time."""
    end = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return true


def _belongs(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process was started for a cell in a folder."""
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        cell = process.environ().get("FAULTS_FOLDER")
        return cell is not None and Path(cell).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False
