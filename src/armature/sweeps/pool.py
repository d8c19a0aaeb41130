"""Trials one after the other in this process, or side by side: each in a process of its own, on
devices of its own (`sweep.parallel`).

The pool gives a trial the GPUs that it asks for (trainer.devices), or its share of the cores, and
waits for its process. Each process ends with the pool, however that ended; each trial is claimed by
a lease (`launcher.lock`), so any number of pools, on any machines that share the directory, divide
a sweep among them. The output of a process is logs/output.log in its run directory.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from armature import config, hardware
from armature.checkpoint import resume
from armature.errors import EXIT_CONFIG, LOG_NOTE, ConfigError, RunFailed, masked
from armature.launcher import environment, lock, rank, run_state
from armature.launcher.supervise import EXIT_CODES, SIGNALS
from armature.sweeps import conclude
from armature.sweeps import trials as files
from armature.validation import checks

CLAIMS = ".claims"
LOG = Path("logs") / "output.log"  # in a trial's run directory
POLL_SECONDS = 0.1
STOPPED = {*EXIT_CODES.values()}  # a trial that the same command resumes


@dataclass(frozen=True)
class Trial:
    number: int
    overrides: Sequence[str]
    claim: lock.Lock


@dataclass
class Result:
    """How a trial ended: with a metric, or an error."""

    trial: Trial
    metric: float | None = None
    error: Exception | None = None

    @property
    def is_refused(self) -> bool:
        return isinstance(self.error, RunFailed) and self.error.exit_code == EXIT_CONFIG

    @property
    def is_resumable(self) -> bool:
        """Whether a signal ended it."""
        code = self.error.exit_code if isinstance(self.error, RunFailed) else 0
        return code < 0 or code in STOPPED


def claim(folder: Path, number: int) -> lock.Lock | None:
    """Return the lease on a trial, or None if a process holds it, or the trial's run directory."""
    place = folder / CLAIMS / str(number)
    if lock.is_held(place) or lock.is_held(folder / str(number)):
        return None
    place.mkdir(parents=True, exist_ok=True)
    taken = lock.Lock(place)
    try:
        taken.acquire()
    except ConfigError:  # another process was faster
        return None
    return taken


def run_grid(launcher: Any, overrides: Sequence[Sequence[str]], *, first: int) -> None:
    """Run all trials that no other process runs.

    Raises:
        RunFailed: what ended trials; the others have run.
        SystemExit: a signal, or a directory that holds trials of other values.
    """
    folder = Path(str(launcher.config.hydra.sweep.dir))
    others = []

    def claimed() -> Iterator[Trial]:
        for number, typed in enumerate(overrides, start=first):
            if (taken := claim(folder, number)) is None:
                others.append(str(number))
            else:
                yield Trial(number, typed, taken)

    failed = []
    begun = {path.name for path in files.begun(folder)}
    for result in launcher.results(claimed(), asked=first + len(overrides)):
        if result.is_refused and str(result.trial.number) in begun:
            sys.exit(EXIT_CONFIG)  # its message names both values
        if result.error:
            failed.append(result)
    if others:
        print(f"Other processes run trial {', '.join(others)} of {folder}.", file=sys.stderr)
    raise_failed(failed, len(overrides))


def raise_failed(failed: list[Result], count: int) -> None:
    """Raise a RunFailed that lists the trials that failed, if any of `count` did."""
    if failed:
        ended = "\n".join(f"  trial {each.trial.number}: {_told(each)}" for each in failed)
        raise RunFailed(
            f"{len(failed)} of {count} trials failed:\n{ended}",
            EXIT_CONFIG if all(each.is_refused for each in failed) else 1,
        )


def _told(result: Result) -> str:
    text = str(result.error).strip().replace("\n", "\n    ")
    return "refused, see above" if result.is_refused else text or "failed"


def results(launcher: Any, trials: Iterator[Trial], *, asked: int) -> Iterator[Result]:
    """Run the trials and yield how each has ended. The next ones are taken as places become free.

    Args:
        asked: the most trials that there will be.

    Raises:
        SystemExit: a signal has ended the sweep.
    """
    cfg = launcher.config
    conclude.asked[Path(str(cfg.hydra.sweep.dir))] = asked
    if cfg.sweep.parallel != 1:
        yield from _Pool(launcher, asked).results(trials)
        return
    for trial in trials:
        job = launcher.run_here(trial.number, trial.overrides)
        result = Result(trial)
        try:
            result.metric = job.return_value
        except Exception as error:
            result.error = error
        yield result
        trial.claim.release()


@dataclass
class _Process:
    trial: Trial
    cfg: DictConfig
    devices: list[str] = field(default_factory=list)
    begun: float = 0.0
    process: Any = None
    log_begin: int = 0  # of this start in the file of its output


class _Pool:
    def __init__(self, launcher: Any, asked: int) -> None:
        self.launcher, self.asked, cfg = launcher, asked, launcher.config
        self.folder = Path(str(cfg.hydra.sweep.dir))
        self.script = os.path.abspath(sys.modules["__main__"].__file__ or "")
        self.on_gpus = checks.for_this_machine(cfg).trainer.accelerator == "gpu"
        self.free = gpus() if self.on_gpus else [str(i) for i in range(hardware.cpu_count())]
        self.places, self.most = len(self.free), cfg.sweep.parallel
        self.running: list[_Process] = []
        self.ended = 0
        self.received: str | None = None  # the name of the signal that ends the sweep

    def results(self, trials: Iterator[Trial]) -> Iterator[Result]:
        with self._signals():
            try:
                yield from self._results(trials)
            finally:  # an error, or the sweep is refused
                for each in self.running:
                    each.process.terminate()
                for each in self.running:
                    each.process.wait()
        if self.received is not None:
            name = os.path.relpath(self.folder, self.launcher.config.run.root)
            print(
                f"Stopped by {self.received}. The same command with run.name={name} resumes it.",
                file=sys.stderr,
            )
            sys.exit(EXIT_CODES.get(self.received, 1))

    def _results(self, trials: Iterator[Trial]) -> Iterator[Result]:
        waiting: _Process | None = None
        while True:
            while self.received is None and (self.most == "auto" or len(self.running) < self.most):
                if waiting is None and (trial := next(trials, None)) is not None:
                    waiting = _Process(trial, self._composed(trial), begun=time.monotonic())
                if waiting is not None and _is_finished(self._run_dir(waiting), waiting.cfg):
                    each, waiting = waiting, None
                    yield self._finished(each)
                    each.trial.claim.release()
                    continue
                # a trial of more devices than there are is refused by its own check
                if waiting is None or (self.running and len(self.free) < self._needed(waiting.cfg)):
                    break
                self._start(waiting)
                waiting = None
            if not self.running:
                return
            for each in [each for each in self.running if each.process.poll() is not None]:
                self.running.remove(each)
                self.free += each.devices
                yield self._result(each)
                each.trial.claim.release()
            time.sleep(POLL_SECONDS)

    def _composed(self, trial: Trial) -> DictConfig:
        loader = self.launcher.hydra_context.config_loader
        cfg = loader.load_sweep_config(self.launcher.config, list(trial.overrides))
        with open_dict(cfg):
            cfg.hydra.job.id, cfg.hydra.job.num = str(trial.number), trial.number
            cfg.hydra.sweep.dir = str(self.folder)  # it may name the time of this start
        return cfg

    def _needed(self, cfg: DictConfig) -> int:
        return _devices(cfg) if self.on_gpus or self.most == "auto" else 0

    def _start(self, each: _Process) -> None:
        from armature import cli

        needed = self._needed(each.cfg)
        each.devices, self.free = self.free[:needed], self.free[needed:]
        each.begun = time.monotonic()
        log = self._run_dir(each) / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            each.log_begin = stream.tell()
            each.process = subprocess.Popen(
                [sys.executable, "-u", self.script, cli.TRIAL_OPTION, str(self._run_dir(each))],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._environment(each),
                start_new_session=True,  # Ctrl-C reaches it once, through this process
            )
        with suppress(BrokenPipeError), each.process.stdin as pipe:
            pickle.dump((os.getpid(), each.cfg), pipe)
        self.running.append(each)
        where = f" on GPU {','.join(each.devices)}" if self.on_gpus else ""
        self._say(each, f"started{where}")

    def _environment(self, each: _Process) -> dict[str, str]:
        from armature import cli

        here = environment.of_lone_process()
        if not cli.full_error:
            here.pop("HYDRA_FULL_ERROR", None)
        if self.on_gpus:
            here["CUDA_VISIBLE_DEVICES"] = ",".join(each.devices)
        ranks = _devices(each.cfg)
        many = max(1, self.places // ranks) if self.most == "auto" else self.most
        threads = hardware.cpu_count() // (min(many, self.asked) * ranks)
        here.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
        return here

    def _result(self, each: _Process) -> Result:
        code = each.process.returncode
        if code == 0:
            return self._finished(each)
        self.ended += 1
        if code == EXIT_CODES["time_limit"]:  # it comes for all
            self.received = self.received or "SIGUSR1"
        if code in STOPPED or code < 0:
            name = signal.Signals(-code if code < 0 else code - 128).name
            text = f"{'killed' if code < 0 else 'stopped'} by {name}; the same command resumes it"
        else:
            log = self._run_dir(each) / LOG
            written = log.read_bytes()[each.log_begin :].decode("utf-8", "replace")
            written = written.partition(LOG_NOTE)[0].strip()
            text = f"{written.splitlines()[-1].strip() if written else 'failed'} ({log})"
            if code == EXIT_CONFIG:
                text = f"refused: {written.partition(' was refused: ')[2] or written}"
        self._say(each, text)
        return Result(each.trial, error=RunFailed(text, code))

    def _finished(self, each: _Process) -> Result:
        self.ended += 1
        monitor = each.cfg.checkpoint.monitor
        metric = files.metric(self._run_dir(each), monitor)
        self._say(each, f"{monitor} {'–' if metric is None else f'{metric:.5g}'}")
        return Result(each.trial, metric)

    def _run_dir(self, each: _Process) -> Path:
        return self.folder / str(each.trial.number)

    def _say(self, each: _Process, text: str) -> None:
        fixed = self.launcher.config.hydra.overrides.task
        keys = [key.lstrip("+") for key in each.trial.overrides if key not in fixed]
        values = ", ".join(key for key in keys if not key.startswith(files.OWN))
        if each not in self.running:
            seconds = time.monotonic() - each.begun
            text += f" [{self.ended} of {self.asked}, {seconds:.0f} s]"
        print(masked(f"trial {each.trial.number} ({values}): {text}"), file=sys.stderr)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass each signal on to the trials, once, and start no more of them after the first."""
        previous = {}
        for number in SIGNALS:
            # ignored: under nohup
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, self._pass_on)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: object) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            os.write(2, b"\nEnding all trials after their step. Again: at once, without a save.\n")
        for each in self.running:
            with suppress(ProcessLookupError):
                os.kill(each.process.pid, number)


def _is_finished(run_dir: Path, cfg: DictConfig) -> bool:
    """Return whether a run of these very settings has finished. If in doubt its process decides."""
    if cfg.resume == "never" or run_state.read_summary(run_dir).get("stop_reason") != "finished":
        return False
    recorded = config.load(run_dir / "config.yaml")
    checks.forget_unused_groups(cfg)
    here, there = map(config.without_secrets, (cfg, recorded))
    found = resume.differences(here, there, resume.RESULT_GROUPS)
    return all(now == "auto" for now, _ in found.values()) and all(
        recorded.trainer[key] in (None, cfg.trainer[key])  # null: another limit was typed instead
        for key in ("max_steps", "max_epochs", "max_time")
    )


def _devices(cfg: DictConfig) -> int:
    return checks.for_this_machine(cfg).trainer.devices


def gpus() -> list[str]:
    """Return the names by which CUDA_VISIBLE_DEVICES selects each of the visible GPUs."""
    named = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    count = hardware.gpu_count()
    return named[:count] if any(named) else [str(i) for i in range(count)]


def receive() -> DictConfig:
    """Return the configuration of the trial that this process is to run, and end with the pool."""
    pool, cfg = pickle.load(sys.stdin.buffer)
    rank.end_with_parent()
    if os.getppid() != pool:  # it ended during the imports
        sys.exit(1)
    return cfg
