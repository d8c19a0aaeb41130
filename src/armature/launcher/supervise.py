"""Start the ranks of this machine, and restart them from the last checkpoint after a failure.

On one machine, each attempt is a call of torch's elastic agent, and this module decides what
follows:

a rank was killed or hangs            all ranks restart, up to `launch.max_restarts` times
a Python error in a rank              the same, if a checkpoint was saved since the attempt began;
                                      else the run ends
two attempts without a checkpoint     the run ends: it would fail for ever
memory runs out in a rank             all ranks restart with a smaller micro-batch if
                                      data.micro_batch_size=auto, which does not count as a restart
a signal to this process              the run ends, also between two attempts

Between several machines (`launch.rdzv_endpoint`) the agents agree on restarts among themselves.
"""

import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.utils import env_override
from omegaconf import DictConfig

from armature import hardware, project, run_dir
from armature.checkpoint import directory, resume
from armature.errors import (
    ConfigError,
    EndedByCode,
    MicroBatchTooLarge,
    NotFinite,
    NotSaved,
    RunFailed,
    brief,
)
from armature.launcher import environment, hang, heap, run_state
from armature.launcher.watch import SHUTDOWN_SECONDS, RankWatcher
from armature.validation import memory, micro_batch, resize

EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138, "time_limit": 138}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
ATTEMPTS_WITHOUT_CHECKPOINT = 2
JOIN_SECONDS = 600  # for all machines to come
SHOWN_RANKS = 8  # of a hang, in the error; hang.txt has all of this machine
# never caused by the loss of another rank
CRASHES = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
# so torch ends a rank that receives another size, or nothing
UNLIKE = (
    " If it speaks of a collective, ranks have called unlike parts of the model: call each part, "
    "also an expert or layer that one may skip, on all ranks (its result times 0)."
)
# in errors caused by another rank's end
LOST_CONNECTION = ("by peer", "Broken pipe", "remote process exited")


@dataclass(frozen=True)
class Failure:
    what: str  # one line, such as "rank 1 was killed by SIGKILL"
    text: str  # all that is known, with the traceback if there is one
    is_error: bool = False  # a Python error
    # memory ran out, and the rank has recorded a smaller micro-batch to continue with
    too_large: bool = False


def run(cfg: DictConfig) -> None:
    """Train in ranks of their own.

    Raise RunFailed if a signal or a failure ends the run, and a rank's ConfigError.
    """
    with Stop(grace_seconds=cfg.launch.grace_seconds) as stop:
        try:
            with tempfile.TemporaryDirectory(prefix="armature-") as folder:
                _Attempts(cfg, Path(folder), stop).run()
        except Exception:
            if stop.received is None:
                raise
            if not run_state.read_summary(Path(cfg.run.dir)):
                raise stopped(cfg, stop.received.name) from None
            # else the ranks finished and wrote a summary, which the caller reads


def stopped(cfg: DictConfig, name: str, *, step: int | None = None) -> RunFailed:
    """Return the error of a stopped run.

    Its exit code tells a batch script whether to queue the run again.
    """
    after = f" after step {step}" if step is not None else ""
    how = "Stopped before the job's time limit" if name == "time_limit" else f"Stopped by {name}"
    return RunFailed(f"{how}{after}.", EXIT_CODES.get(name, 1), run_name=cfg.run.name)


class Stop:
    """While entered, raise the first signal as an exception.

    Ctrl-C after it kills all ranks at once.
    """

    def __init__(self, *, grace_seconds: float) -> None:
        # how long the agent waits for the ranks to end before it kills them
        self.grace_seconds = grace_seconds
        # the first; later ones do not change why the run stops
        self.received: signal.Signals | None = None
        self.watcher: RankWatcher | None = None  # of the current attempt
        self._previous: dict[int, Any] = {}
        self._previous_hook = sys.unraisablehook
        self._lost = False  # the exception was raised where Python drops it

    def __enter__(self) -> "Stop":
        sys.unraisablehook = self._raise_again
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.unraisablehook = self._previous_hook
        self._lost = False
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _raise_again(self, dropped: Any) -> None:
        """Repeat the signal if it came within a finalizer or a weak reference's callback, whose
        exceptions are lost.
        """
        if self.received is None or type(dropped.exc_value).__name__ != "SignalException":
            self._previous_hook(dropped)
            return
        self._lost = True
        threading.Timer(0.02, self._repeat).start()

    def _repeat(self) -> None:
        if (
            self._lost
            and self.received is not None
            and (main := threading.main_thread().ident) is not None
        ):
            signal.pthread_kill(main, self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._lost:
            self._lost = False
            self._raise()
        if self.received is not None:
            if number == signal.SIGINT and self.watcher is not None:
                self.watcher.kill()
            return
        self.received = signal.Signals(number)
        if self.watcher is not None:
            self.watcher.set_kill_deadline(seconds=self.grace_seconds + SHUTDOWN_SECONDS)
        if number == signal.SIGINT:  # print() is not safe here: its buffer may be in use
            os.write(
                2, b"\nEnding after this step. Ctrl-C again ends at once, without a checkpoint.\n"
            )
        self._raise()

    def _raise(self) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        assert self.received is not None
        raise SignalException(f"got {self.received.name}", sigval=self.received)


def start_ranks(
    cfg: DictConfig,
    watcher: RankWatcher,
    module: str,
    folder: str,
    *,
    variables: dict[str, str],
    attempt: int = 0,
    max_restarts: int = 0,
    logs: Path | None = None,
    join_seconds: int = JOIN_SECONDS,
) -> None:
    """Run `python -m module folder` as each rank of this machine, by a call of the elastic agent.

    Args:
        watcher: entered. The agent's own files are beside its folder.
        variables: of the ranks, besides those that every rank needs.
        logs: a folder for what the ranks print, else it is printed here.
        join_seconds: for all machines to come.

    Raises:
        ChildFailedError: a rank has failed.
        RunFailed: a machine has not come.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # it reports failures, which we describe ourselves
    agent_log = logging.getLogger("torch.distributed.elastic")
    agent_log.handlers, agent_log.propagate = [logging.NullHandler()], False
    temporary, devices = watcher.folder.parent, cfg.trainer.devices
    nodes, endpoint = cfg.trainer.num_nodes, cfg.launch.rdzv_endpoint
    # torch 2.11 has no such option, and waits for 30 s
    takes = "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}
    grace: Any = {"shutdown_timeout": cfg.launch.grace_seconds} if takes else {}
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=devices,
        run_id=Path(cfg.run.name or "doctor").name,  # on all machines the same
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint or str(temporary / f"rendezvous{attempt}"),
        # on one machine in files, in a folder that only this user can open: torch unpickles what it
        # reads from a store, and its TCP store listens on all interfaces
        rdzv_configs={"join_timeout": join_seconds} if endpoint else {"store_type": "file"},
        local_addr=None if endpoint else "localhost",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        **grace,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs or temporary), redirects=Std.ALL if logs else Std.NONE
        ),
        signals_to_handle="",  # our handlers stay, also after the agent has returned
    )
    needed = {
        **process_variables(devices),
        # a restarted rank must not read addresses of the failed attempt in the agent's own store
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **({} if endpoint else loopback_variables()),
        **environment.rank_variables(
            attempt=attempt,
            heartbeats=watcher.folder,
            store=None if endpoint else temporary / f"store{attempt}",
        ),
        **variables,
    }
    try:
        if endpoint:
            environment.wait_for_endpoint(endpoint, seconds=join_seconds)
        with env_override(needed):  # and after it as before: a sweep's next trial starts here
            elastic_launch(config, sys.executable)("-u", "-P", "-m", module, folder)
    except RendezvousError as error:
        raise RunFailed(
            f"trainer.num_nodes={nodes}: the machines did not meet at launch.rdzv_endpoint="
            f"{endpoint} within {join_seconds} s. Type the same command on each of them."
        ) from error


class _Attempts:
    def __init__(self, cfg: DictConfig, folder: Path, stop: Stop) -> None:
        self.cfg, self.folder, self.stop = cfg, folder, stop
        # as in the run directory; cfg is for the next attempt, perhaps on fewer ranks
        self.asked = cfg

    def run(self) -> None:
        environment.raise_open_files()
        launch = self.cfg.launch
        # agents of several machines restart the ranks themselves
        here, agents = (
            (0, launch.max_restarts) if launch.rdzv_endpoint else (launch.max_restarts, 0)
        )
        first: Failure | None = None  # first failure since the last new checkpoint
        restarts = without_checkpoint = 0
        before = self._last_checkpoint_step()
        for number in itertools.count():
            failure = self.attempt(number, max_restarts=agents)
            if failure is None:
                return
            if failure.too_large and not launch.rdzv_endpoint:  # this is no restart
                self._take_recorded_micro_batch()
                message = f"{failure.what} The run resumes from {self._resume_point()}."
                print(message, file=sys.stderr, flush=True)
                continue
            progress = (now := self._last_checkpoint_step()) > before
            before = now
            without_checkpoint, first = (
                (0, None) if progress else (without_checkpoint + 1, first or failure)
            )
            if restarts == here > 0:
                raise RunFailed(f"{failure.text}\nlaunch.max_restarts={here}: no restart remains.")
            if restarts == here or (failure.is_error and not progress):
                raise RunFailed(failure.text)
            if first is not None and without_checkpoint == ATTEMPTS_WITHOUT_CHECKPOINT:
                raise RunFailed(
                    f"{first.text}\nno progress: {without_checkpoint} attempts in a row ended "
                    f"without a new checkpoint, this one first; in the last, {failure.what}."
                )
            change = self._resize(failure, progress=progress)
            restarts += 1
            remaining = here - restarts
            message = (
                f"restart {restarts} of {here}: {failure.what}; "
                f"the run resumes from {self._resume_point()}{change}; "
                f"{remaining or 'no'} more restart{'s' * (remaining != 1)} after this one"
            )
            print(message, file=sys.stderr, flush=True)

    def _take_recorded_micro_batch(self) -> None:
        self.cfg = self.cfg.copy()
        self.cfg.run.micro_batch_size = run_dir.read(Path(self.cfg.run.dir)).run.micro_batch_size

    def attempt(self, number: int, *, max_restarts: int) -> Failure | None:
        """Run the ranks once, by a call of the elastic agent.

        Return None if they finished. Raise what no restart would mend, as `describe`.
        """
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        cfg, oom_kills = self.cfg, _oom_kills()
        watcher = RankWatcher(self.folder / "heartbeats", ranks=cfg.trainer.devices)
        with watcher:
            self.stop.watcher = watcher
            try:
                start_ranks(
                    cfg,
                    watcher,
                    "armature.launcher.rank",
                    cfg.run.dir,
                    attempt=number,
                    max_restarts=max_restarts,
                    variables={
                        **heap.rank_variables(cfg.trainer.accelerator),
                        "ARMATURE_RESIZED": resize.difference(self.asked, cfg),
                    },
                )
            except ChildFailedError as error:
                return describe(error.failures, watcher, cfg, oom=_oom_kills() > oom_kills)
            finally:
                self.stop.watcher = None
        return None

    def _last_checkpoint_step(self) -> int:
        checkpoint = resume.last_checkpoint(Path(self.cfg.run.dir), self.cfg)
        step = directory.step_of(checkpoint) if checkpoint is not None else None
        return -1 if step is None else step

    def _resume_point(self) -> str:
        if (step := self._last_checkpoint_step()) >= 0:
            return f"step {step}"
        return "the start" if self.cfg.resume in resume.MODES else self.cfg.resume

    def _resize(self, failure: Failure, *, progress: bool) -> str:
        """Choose the number of ranks for the next attempt.

        Return the change in words, for the restart message.
        """
        cfg, devices, least = self.cfg, self.cfg.trainer.devices, self.cfg.launch.min_ranks
        available = _gpus_now() if cfg.trainer.accelerator == "gpu" else devices
        if available < (least or devices):
            asked = f"launch.min_ranks={least}" if least else f"trainer.devices={devices}"
            raise RunFailed(
                f"{failure.text}\nThis machine has {available} GPUs now, fewer than {asked}."
            )
        if least is None or (progress and available >= devices):
            return ""
        found = resize.fewer(cfg, most=min(devices - 1, available), least=least)
        if isinstance(found, str):
            return f" (on the same number of ranks: {found})" if devices > least else ""
        self.cfg = found
        micro, before = (micro_batch.decided(each).data.micro_batch_size for each in (found, cfg))
        kept = f", data.micro_batch_size={micro}" if micro != before else ""
        return (
            f" on {found.trainer.devices} rank{'s' * (found.trainer.devices > 1)} instead of "
            f"{devices}{kept}"
        )


def describe(
    failures: dict[int, Any], watcher: RankWatcher, cfg: DictConfig, *, oom: bool
) -> Failure:
    """Return the failure of the rank that failed first; the others failed because of it.

    Args:
        oom: whether the system has killed processes for lack of memory during the attempt.

    Raises:
        ConfigError, RunFailed: no restart would help; the text needs no traceback.
    """
    folder = Path(cfg.run.dir)
    if watcher.hung:
        return _hang(watcher, folder)
    for failure in failures.values():
        kind, _, line = _error(failure)[0].partition(": ")
        if kind == MicroBatchTooLarge.__name__:
            return Failure(line, line, is_error=True, too_large=True)
    rank, failure = min(failures.items(), key=lambda item: _cause_key(item[0], item[1], watcher))
    log = f"its log is {folder / 'logs' / f'rank_{rank:04d}.log'}."
    if _was_killed(failure):
        name = signal.Signals(-failure.exitcode).name
        if -failure.exitcode in SIGNALS:  # it reached the rank before its handler was installed
            raise stopped(cfg, name)
        guess, advice = "", UNLIKE if name == "SIGABRT" else ""
        if name == "SIGKILL" and oom:
            guess, advice = ", since the machine ran out of memory", memory.remedy(cfg)
        what = f"rank {rank} was killed by {name}{guess}"
        return Failure(what, f"R{what[1:]}; {log}{advice}")
    message, text = _error(failure)
    kind, _, rest = message.partition(": ")
    if kind == ConfigError.__name__:
        raise ConfigError(rest.splitlines())
    if kind in (NotFinite.__name__, NotSaved.__name__, EndedByCode.__name__):
        raise RunFailed(rest)
    text = brief(text or "", points=False) or failure.message
    return Failure(
        f"rank {rank} failed with "
        f"{message.splitlines()[0] if message else f'exit code {failure.exitcode}'}",
        f"{text}\nRank {rank} failed first (exit code {failure.exitcode}); {log}",
        is_error=True,
    )


def _hang(watcher: RankWatcher, folder: Path) -> Failure:
    ranks, seconds = sorted(watcher.hung), max(watcher.hung.values())
    several = len(ranks) > 1
    log = folder / "logs" / ("rank_*.log" if several else f"rank_{ranks[0]:04d}.log")
    why = f"{'their' if several else 'its'} stacks are in {log}"
    what = f"{hang.named(ranks)} made no step for {seconds:.0f} s ({why})"
    file = folder / "logs" / hang.REPORT
    lines, text = hang.report(watcher.folder, folder / "logs", ranks=watcher.alive)
    with suppress(OSError):
        file.write_text(text)
    limits = "launch.hang_timeout limits a step, a validation batch and a save."
    shown = "\n".join([f"R{what[1:]}. {limits} {file} has the stacks.", *lines[:SHOWN_RANKS]])
    return Failure(what, shown)


def _cause_key(rank: int, failure: Any, watcher: RankWatcher) -> tuple[bool, bool, float]:
    """Return a sort key that puts the likely first failure first."""
    # a killed process loses its connections before it is gone: another's error about them can be
    # older than its death
    killed = _was_killed(failure)
    crashed = (
        killed and signal.Signals(-failure.exitcode).name in CRASHES and rank not in watcher.ended
    )
    follows = not killed and any(words in _error(failure)[0] for words in LOST_CONNECTION)
    return not crashed, follows, _failed_at(rank, failure, watcher)


def _was_killed(failure: Any) -> bool:
    return failure.exitcode < 0 and not Path(failure.error_file).is_file()


def _error(failure: Any) -> tuple[str, str | None]:
    """Return a rank's Python error (`ArithmeticError: …`) and its traceback; empty if it left
    none.
    """
    data = failure.error_file_data["message"]
    if isinstance(data, str):  # it says that there is none
        return "", None
    return str(data["message"]), data["extraInfo"]["py_callstack"]


def _failed_at(rank: int, failure: Any, watcher: RankWatcher) -> float:
    """Return the Unix time of a failure.

    The agent knows whole seconds only, in which several ranks may fail.
    """
    file = Path(failure.error_file)
    if file.is_file():
        return file.stat().st_mtime
    return watcher.deaths.get(rank, float(failure.timestamp))


def process_variables(devices: int) -> dict[str, str]:
    """Return what processes of this machine need: modules of the project and of the script, and a
    share of the cores.

    And one order of Python's sets, which the users' data may depend on, for all ranks and restarts.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    of_script = script and str(Path(script).resolve().parent)
    known = [*project.IMPORTED, of_script, os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, known))
    own = {"PYTHONPATH": path, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0"}
    threads = {"OMP_NUM_THREADS": str(max(1, hardware.cpu_count() // devices))}
    return {**own, **(threads if devices > 1 and "OMP_NUM_THREADS" not in os.environ else {})}


def loopback_variables() -> dict[str, str]:
    """Return what keeps the connections of gloo and NCCL within this machine, unless an interface
    is chosen.
    """
    name = "lo" if sys.platform == "linux" else "lo0"
    return {
        key: name for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if key not in os.environ
    }


def _oom_kills() -> int:
    """Return how many processes Linux has killed for lack of memory since boot (containers
    included); 0 where it does not count them.
    """
    try:
        return int(
            dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())["oom_kill"]
        )
    except (OSError, KeyError):
        return 0


def _gpus_now() -> int:
    """Return the number of GPUs, found by a new process: the driver's answer never changes within a
    process.
    """
    command = [
        sys.executable,
        "-P",
        "-c",
        "from armature import hardware; print(hardware.gpu_count())",
    ]
    environ = {**os.environ, **process_variables(1)}
    return int(
        subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    )
