"""The faults: what strikes a run, and what it must end like."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests import running
from tests.support.faults.inject import EVERY_RANK
from tests.support.faults.runs import LIMIT, STEPS, WITHIN, Command, Run, wait_until
from tests.support.two_hosts import RUN, Host, ip, two_hosts

HANG_TIMEOUT = 6  # seconds without a step; then the ranks count as hung
ON_CABLE = 10  # seconds that a collective may take over a network
PORT = 29512


@dataclass(frozen=True)
class Fault:
    """What strikes, and what is allowed after it.

    Args:
        inject: method of `Inject` that strikes at `at_step`.
        rank: the one that it strikes, or EVERY_RANK; None: the last one.
        codes: allowed exit codes of the first command; 0 if the run must finish by itself.
        lost: steps that may be repeated; None: those since the last checkpoint.
        act: strikes from outside once a rank waits for it.
        flow: replaces `usual`; returns the problems.
        within: seconds from the fault to the first new step.
    """

    name: str
    inject: str = "none"
    at_step: int = 5
    rank: int | None = None
    codes: tuple[int, ...] = (0,)
    lost: int | None = None
    act: Callable[[Run, Command], None] | None = None
    overrides: tuple[str, ...] = ()
    flow: "Callable[[Fault, Run], list[str]] | None" = None
    within: float = WITHIN

    def arm(self, run: Run) -> None:
        """Set up this fault in the run."""
        run.fault, run.at_step = self.inject, self.at_step
        run.rank = run.ranks - 1 if self.rank is None else self.rank
        run.overrides = [*run.overrides, *self.overrides]


def strike(fault: Fault, run: Run) -> list[str]:
    """Run to the end, with the fault; return the problems."""
    run.session.reference(run.strategy)
    try:
        return (fault.flow or usual)(fault, run)
    finally:
        run.kill()


# ---------------------------------------------------------------- how a run goes
def usual(fault: Fault, run: Run) -> list[str]:
    """Start the run, let the fault strike, and finish: by itself or with a second start of the same
    command.
    """
    if fault.act is None:
        fault.arm(run)
        command = run.start()
    else:
        command = started(fault, run)
        fault.act(run, command)
    return finish(fault, run, command)


def started(fault: Fault, run: Run) -> Command:
    """Start the run, and wait until a rank waits for what comes from outside."""
    fault.arm(run)
    command = run.start()
    waits = command.wait_until(lambda: run.struck_at() is not None, LIMIT)
    assert waits, f"ended or was stuck before the fault\n{run.output()[-3000:]}"
    return command


def finish(fault: Fault, run: Run, command: Command) -> list[str]:
    """Wait for the first command, and start it a second time if the run has not finished."""
    code = command.wait(LIMIT)
    problems = []
    if code is None:
        problems.append(f"stuck, killed after {LIMIT:.0f} s")
        run.kill()
    elif code not in fault.codes:
        problems.append(f"exit code {code} instead of {' or '.join(map(str, fault.codes))}")
    problems += left_behind(run)
    if code != 0 or not finished(run):
        problems += start_again(run)
    return [*problems, *judge(fault, run)]


def start_again(run: Run) -> list[str]:
    code = run.start().wait(LIMIT)
    return [] if code == 0 else [f"typed again: exit code {code} (None: stuck)"]


def left_behind(run: Run) -> list[str]:
    left = len(run.orphans())
    run.kill()
    return [f"{left} orphans"] if left else []


def finished(run: Run) -> bool:
    exists = (run.directory / "summary.json").exists()
    summary = running.summary(run.directory) if exists else {}
    return (summary.get("stop_reason"), summary.get("global_step")) == ("finished", STEPS)


def judge(fault: Fault, run: Run) -> list[str]:
    """Return what is wrong with a run at its end: what differs from the undisturbed one, steps done
    again, a late start, processes and files left behind.
    """
    problems = left_behind(run)
    if finished(run):
        difference = run.difference(run.session.reference(run.strategy))
        problems += [*([difference] if difference else []), *run.half_checkpoints()]
    else:
        problems.append("did not come to its end")
    lost = run.at_stake() if fault.lost is None else fault.lost
    if (repeated := run.repeated()) > lost:
        problems.append(f"{repeated} steps done again instead of {lost}")
    if (seconds := run.recovered_after() or 0.0) > fault.within:
        problems.append(f"{seconds:.0f} s until the first new step")
    return problems


# ---------------------------------------------------------------- strikes from outside
def kill_agent(run: Run, command: Command) -> None:
    """The ranks keep waiting: any step they still made would be repeated."""
    run.note_strike()
    command.send(signal.SIGKILL)


def signal_all(run: Run, command: Command, *, number: int = signal.SIGUSR1) -> None:
    run.note_strike()
    for pid in {command.process.pid, *run.pids()}:
        os.kill(pid, number)
    run.release()


def press_ctrl_c(run: Run, command: Command) -> None:
    run.note_strike()
    command.send(signal.SIGINT, group=True)
    run.release()


# ---------------------------------------------------------------- other hands in the run directory
def typed_twice(fault: Fault, run: Run) -> list[str]:
    """Start the same command a second time while the first one trains."""
    command = started(fault, run)
    code, refused = run.start().wait(LIMIT), "is in use by process" in run.output()
    problems = [] if (code, refused) == (2, True) else [f"typed twice: {code}"]
    run.note_strike()
    run.release()
    if command.wait(LIMIT) != 0:
        problems.append("the first one failed")
    return [*problems, *judge(fault, run)]


# ---------------------------------------------------------------- damage
def stopped(run: Run) -> None:
    """Make the run a copy of one that SIGTERM stopped after step 5 or 6, with checkpoints of that
    step and of step 4.
    """

    def make() -> tuple[Run, float]:
        first = Run(run.session, run.strategy, f"stopped {run.strategy}")
        BY_NAME["sigterm_rank"].arm(first)
        code = first.start().wait(LIMIT)
        struck, ended = first.struck_at(), time.time()
        assert struck is not None, f"not stopped\n{first.output()[-3000:]}"
        assert (code, left_behind(first)) == (143, [])
        return first, ended - struck

    first, seconds = run.session.once(f"stopped {run.strategy}", make)
    shutil.rmtree(run.folder)
    shutil.copytree(first.folder, run.folder)
    run.fault, run.at_step, run.rank = first.fault, first.at_step, first.rank
    run.note_strike(seconds_ago=seconds)


def terminated(fault: Fault, run: Run) -> list[str]:
    """Resume the stopped run, which is shared with those whose files are damaged."""
    stopped(run)
    return [*start_again(run), *judge(fault, run)]


def without_power(fault: Fault, run: Run) -> list[str]:
    """Empty the files that were written last, as a file system may after a loss of power."""
    stopped(run)
    newest = run.checkpoints / (run.checkpoints / "last").read_text().strip()
    others = [run.checkpoints / "last", run.directory / "summary.json"]
    for file in [*newest.iterdir(), *others]:
        os.truncate(file, 0)
    run.note_strike()
    problems = start_again(run)
    if f"{newest.name} is skipped" not in run.output():
        problems.append(f"did not say that it passed {newest.name} over")
    return [*problems, *judge(fault, run)]


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "faults", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True)


def on_a_small_disk(fault: Fault, run: Run) -> list[str]:
    """Fill the disk before a save, and free it two steps later or after the command's end."""
    outputs = run.folder / "outputs"
    with small_disk(outputs):
        fault.arm(run)
        command = run.start()
        command.wait(LIMIT)
        (outputs / "filler").unlink(missing_ok=True)
        problems = finish(fault, run, command)
        if "could not be saved" not in run.output():
            problems.append("did not say that a checkpoint could not be saved")
        return problems


# ---------------------------------------------------------------- a cable
def cut_cable(fault: Fault, run: Run) -> list[str]:
    """Cut the cable between two machines (network namespaces) until the ranks have ended, reconnect
    it and start the commands again.
    """
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no network namespaces here")
        fault.arm(run)
        sides = [start_side(run, host, hosts[0]) for host in hosts]
        sides[0].wait_until(lambda: run.struck_at() is not None, LIMIT)
        run.note_strike()
        set_cable(hosts, "down")
        run.release()
        problems = []
        # torchrun on the other machine cannot end yet: it asks the first one's store for ever
        if not wait_until(
            lambda: not run.living_ranks() and sides[0].process.poll() is not None, LIMIT
        ):
            problems.append("stuck")
            run.kill()
        set_cable(hosts, "up")
        if sides[1].wait(LIMIT) is None:
            problems.append("torchrun stuck after the cable was reconnected")
            run.kill()
        if not finished(run):
            sides = [start_side(run, host, hosts[0]) for host in hosts]
            if (codes := [side.wait(LIMIT) for side in sides]) != [0, 0]:
                problems.append(f"typed again: exit codes {codes}")
        return [*problems, *judge(fault, run)]


def set_cable(hosts: list[Host], state: str) -> None:
    for host in hosts:
        ip("-netns", host.namespace, "link", "set", host.interface, state)


def start_side(run: Run, host: Host, head: Host) -> Command:
    """Start one machine."""
    inside = ["ip", "netns", "exec", host.namespace, str(RUN)]
    return run.start(
        [*inside, *run.arguments(), *run.overrides],
        PYTHON=sys.executable,
        HEAD=f"{head.address}:{PORT}",
        NODES="2",
        DEVICES="1",
        INTERFACE=host.interface,
    )


def hang_after(seconds: int) -> tuple[str, ...]:
    return (f"launch.hang_timeout={seconds}",)


FAULTS = (
    Fault("sigkill_rank", "at_signal:SIGKILL"),
    Fault("sigstop_rank", "at_signal:SIGSTOP", overrides=hang_after(HANG_TIMEOUT)),
    Fault("sigkill_agent", "at_hold", rank=EVERY_RANK, codes=(-9,), act=kill_agent),
    Fault("sigterm_rank", "at_signal:SIGTERM", lost=0, flow=terminated),
    Fault("sigusr1_all", "at_hold", rank=EVERY_RANK, codes=(138,), lost=0, act=signal_all),
    Fault("ctrl_c", "at_hold", rank=EVERY_RANK, codes=(130,), lost=0, act=press_ctrl_c),
    Fault(
        "sighup",  # what a closed terminal sends
        "at_hold",
        rank=EVERY_RANK,
        codes=(129,),
        lost=0,
        act=partial(signal_all, number=signal.SIGHUP),
        # so that the process of the command is the only one under single
        overrides=("launch.max_restarts=0",),
    ),
    Fault("kill_in_save", "in_save", 4, rank=0),
    Fault("kill_before_pointer", "in_pointer", 4, rank=0),
    Fault("power_loss", lost=2, flow=without_power),
    Fault("full_disk", "at_full_disk", rank=0, codes=(0, 1), flow=on_a_small_disk),
    Fault("hang", "at_hang", overrides=hang_after(HANG_TIMEOUT)),
    Fault("exception", "in_training_step"),
    Fault("exception_background", "in_training_step", overrides=("checkpoint.background=true",)),
    Fault("twice", "at_hold", rank=0, flow=typed_twice),
    Fault(
        "network_cut",
        "at_hold",
        rank=EVERY_RANK,
        overrides=hang_after(ON_CABLE),
        flow=cut_cable,
        within=90,
    ),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
