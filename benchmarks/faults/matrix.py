"""The faults, and what each cell of their table does and requires."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.faults import tiny_run
from benchmarks.faults.cells import STEPS, WITHIN, Column, Command, Run, Session
from benchmarks.faults.damage import flip_byte, lose_power, remove_shard, small_disk, truncate

STOCK = ("stock single", "stock ddp")
HANG_TIMEOUT = 6  # seconds without a step; then the ranks count as hung


@dataclass
class Cell:
    """Result of one fault under one column."""

    fault: str
    column: str
    text: str
    ok: bool = True
    seconds: float = 0.0
    output: str = field(default="", repr=False)


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Args:
        inject: method of `Inject` that strikes at `at_step`; `stock` names another one for a stock
            script.
        codes: allowed exit codes of the first command; 0 if the run must finish by itself.
        lost: steps that may be repeated; None: those since the last checkpoint.
        act: strikes from outside once a rank waits for it.
        overrides: additional ones for our runs.
        flow: replaces `usual`.
        without: columns that the fault does not apply to, with the reason.
        within: seconds from the fault to the first new step.
        lane: cells of one lane share a number of threads.
    """

    name: str
    title: str
    inject: str = "none"
    stock: str | None = None
    at_step: int = 5
    every_rank: bool = False
    first_rank: bool = False
    codes: tuple[int, ...] = (0,)
    lost: int | None = None
    act: Callable[[Run, Command], None] | None = None
    overrides: tuple[str, ...] = ()
    flow: "Callable[[Fault, Run], Cell] | None" = None
    without: dict[str, str] = field(default_factory=dict)
    within: float = WITHIN
    lane: str = ""

    def arm(self, run: Run) -> None:
        """Set up this fault in the run."""
        run.fault = self.stock if run.column.stock and self.stock else self.inject
        run.at_step = self.at_step
        run.rank = -1 if self.every_rank else 0 if self.first_rank else run.column.victim
        run.overrides = [] if run.column.stock else [*run.overrides, *self.overrides]


def cell(fault: Fault, column: Column, session: Session) -> Cell:
    """Run one cell. An error in it becomes the cell's text."""
    if column.name in fault.without:
        return Cell(fault.name, column.name, f"– {fault.without[column.name]}")
    started = time.monotonic()
    run = Run(session, column, f"{fault.name} {column.name}")
    try:
        session.reference(column)
        result = (fault.flow or usual)(fault, run)
    except Exception as error:
        result = Cell(
            fault.name, column.name, f"{type(error).__name__}: {str(error)[-2000:]}", ok=False
        )
    finally:
        run.kill()
    result.seconds = time.monotonic() - started
    result.output = "" if result.ok else run.output()
    return result


# ---------------------------------------------------------------- how a cell runs
def usual(fault: Fault, run: Run) -> Cell:
    """Start the run, let the fault strike, and finish: by itself or with a second start of the same
    command.
    """
    fault.arm(run)
    command = run.start()
    if fault.act is not None:
        if not command.wait_until(lambda: run.struck_at() is not None, run.column.limit):
            return judge(fault, run, ["ended or was stuck before the fault"])
        fault.act(run, command)
    return finish(fault, run, command)


def finish(fault: Fault, run: Run, command: Command) -> Cell:
    """Wait for the first command, and start it a second time if the run has not finished."""
    remarks = []
    code = command.wait(run.column.limit)
    if code is None:
        remarks.append(f"stuck, killed after {run.column.limit:.0f} s")
        run.kill()
    elif not run.column.stock and code not in fault.codes:
        remarks.append(f"exit code {code} instead of {' or '.join(map(str, fault.codes))}")
    if left := run.orphans():
        remarks.append(f"{len(left)} orphan{'s' * (len(left) > 1)}")
        run.kill()
    return (
        judge(fault, run, remarks)
        if code == 0 and finished(run)
        else start_again(fault, run, remarks)
    )


def start_again(fault: Fault, run: Run, remarks: list[str]) -> Cell:
    again = run.start()
    code = again.wait(run.column.limit)
    if code is None:
        remarks.append(f"stuck when typed again, killed after {run.column.limit:.0f} s")
        run.kill()
    elif code != 0:
        remarks.append(f"typed again: exit code {code}, {last_line(again, run)}")
    return judge(fault, run, remarks)


def finished(run: Run) -> bool:
    if run.column.stock:
        return any(step == STEPS for entries in run.journal().values() for _, _, step, _ in entries)
    summary = tiny_run.summary(run.directory) if (run.directory / "summary.json").exists() else {}
    return (summary.get("stop_reason"), summary.get("global_step")) == ("finished", STEPS)


def last_line(command: Command, run: Run) -> str:
    lines = (
        (run.folder / f"output.{run.commands.index(command)}.txt")
        .read_text(errors="replace")
        .strip()
        .splitlines()
    )
    return (
        lines[-1].removeprefix("[rank0]: ").partition(". ")[0][:80] if lines else "without a word"
    )


def judge(fault: Fault, run: Run, remarks: list[str]) -> Cell:
    """Return the cell: problems, differing weights, seconds to recover and repeated steps."""
    if left := run.orphans():
        remarks.append(f"{len(left)} orphan{'s' * (len(left) > 1)}")
    repeated, recovered = run.repeated(), run.recovered_after()
    if not finished(run):
        remarks.append("did not come to its end")
    else:
        difference = run.difference(run.session.reference(run.column))
        if difference is not None:
            remarks.append(difference)
        remarks += run.half_checkpoints()
    starts = [
        step
        for entries in run.journal().values()
        for _, kind, step, _ in entries
        if kind == "start"
    ]
    if starts.count(0) > run.column.ranks:
        remarks.append("trains from step 0")
    elif not run.column.stock and repeated > (
        lost := run.at_stake() if fault.lost is None else fault.lost
    ):
        remarks.append(f"{repeated} steps done again instead of {lost}")
    if recovered is not None and recovered > fault.within:
        remarks.append(f"{recovered:.0f} s")
    result = f"{recovered:.1f} s, {repeated}" if recovered is not None else ""
    if not remarks:
        return Cell(fault.name, run.column.name, f"= {result}")
    parts = [*remarks, result] if run.column.stock and result else remarks
    return Cell(fault.name, run.column.name, "; ".join(parts), ok=False)


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
def without_metrics(fault: Fault, run: Run) -> Cell:
    """Remove metrics.csv while the run trains: the rest of it must be complete, and the loss
    reported.
    """
    fault.arm(run)
    command = run.start()
    if not command.wait_until(lambda: run.struck_at() is not None, run.column.limit):
        return judge(fault, run, ["ended or was stuck before the fault"])
    file = run.directory / "metrics.csv"
    file.unlink()
    run.release()
    command.wait(run.column.limit)
    reference = run.session.reference(run.column).directory
    found, expected = tiny_run.rows(run.directory), tiny_run.rows(reference)
    remarks = [] if found and found == expected[-len(found) :] else ["metrics.csv differs"]
    shutil.copy(reference / "metrics.csv", file)
    return judge(fault, run, remarks)


def typed_twice(fault: Fault, run: Run) -> Cell:
    """Start the same command a second time while the first one trains."""
    fault.arm(run)
    command = run.start()
    if not command.wait_until(lambda: run.struck_at() is not None, run.column.limit):
        return judge(fault, run, ["ended or was stuck before the fault"])
    second = run.start()
    code, refused = second.wait(run.column.limit), "is in use by process" in run.output()
    remarks = (
        [] if (code, refused) == (2, True) else [f"typed twice: {code}, {last_line(second, run)}"]
    )
    run.note_strike()
    run.release()
    if command.wait(run.column.limit) != 0:
        remarks.append("the first one failed")
    return judge(fault, run, remarks)


# ---------------------------------------------------------------- damage
@dataclass(frozen=True)
class Stopped:
    """A run stopped after step 5 or 6, with checkpoints of that step and of step 4 (stock: only of
    step 4).

    Attributes:
        code: exit code of the command, or None if it was stuck.
        left: number of processes still alive.
        seconds: from the fault to the command's end.
    """

    run: Run
    code: int | None
    left: int
    seconds: float

    def copy_to(self, run: Run) -> None:
        """Copy everything except the commands; keep the time since the fault."""
        shutil.rmtree(run.folder)
        shutil.copytree(self.run.folder, run.folder)
        run.fault, run.at_step, run.rank = self.run.fault, self.run.at_step, self.run.rank
        run.note_strike(seconds_ago=self.seconds)


def stopped(session: Session, column: Column) -> Stopped:
    """Return the stopped run of a column. It is made once, and cells copy it."""

    def make() -> Stopped:
        run = Run(session, column, f"stopped {column.name}")
        BY_NAME["sigkill_rank" if column.stock else "sigterm_rank"].arm(run)
        code = run.start().wait(column.limit)
        struck, ended = run.struck_at(), time.time()
        assert struck is not None, f"{column.name}: not stopped\n{run.output()[-3000:]}"
        left = len(run.orphans())
        run.kill()
        return Stopped(run, code, left, ended - struck)

    return session.once(f"stopped {column.name}", make)


def terminated(fault: Fault, run: Run) -> Cell:
    """Resume the stopped run, which is shared with the cells whose files are damaged."""
    if run.column.stock:
        return usual(fault, run)
    before = stopped(run.session, run.column)
    remarks = (
        []
        if before.code in fault.codes
        else [f"exit code {before.code} instead of {fault.codes[0]}"]
    )
    if before.left:
        remarks.append(f"{before.left} orphans")
    before.copy_to(run)
    return start_again(fault, run, remarks)


def damaged(harm: Callable[[Path, bool], None]) -> Callable[[Fault, Run], Cell]:
    """Return the flow of a cell that damages a file of the newest checkpoint while nothing runs."""

    def flow(fault: Fault, run: Run) -> Cell:
        stopped(run.session, run.column).copy_to(run)
        if run.column.stock:
            newest = run.checkpoints / "last.ckpt"
        else:
            newest = run.checkpoints / (run.checkpoints / "last").read_text().strip()
        harm(newest, run.column.stock)
        run.note_strike()
        command = run.start()
        code = command.wait(run.column.limit)
        remarks = []
        if code is None:
            remarks.append(f"stuck, killed after {run.column.limit:.0f} s")
            run.kill()
        elif code != 0:
            if run.column.stock:
                return Cell(
                    fault.name,
                    run.column.name,
                    f"crash at load: {last_line(command, run)}",
                    ok=False,
                )
            remarks.append(f"exit code {code}, {last_line(command, run)}")
        elif not run.column.stock and f"{newest.name} is skipped" not in run.output():
            remarks.append(f"did not say that it passed {newest.name} over")
        return judge(fault, run, remarks)

    return flow


def on_a_small_disk(fault: Fault, run: Run) -> Cell:
    """Fill the disk before a save, and free it two steps later or after the command's end."""
    outputs = run.folder / "outputs"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(small_disk(outputs))
        except (OSError, subprocess.CalledProcessError):
            return Cell(fault.name, run.column.name, "– no mount here")
        fault.arm(run)
        command = run.start()
        command.wait(run.column.limit)
        (outputs / "filler").unlink(missing_ok=True)
        result = finish(fault, run, command)
        if result.ok and "could not be saved" not in run.output():
            result.ok, result.text = False, "did not say that a checkpoint could not be saved"
        shutil.copytree(outputs, run.folder / "kept")
        return result


FAULTS = (
    Fault("sigkill_rank", "SIGKILL a rank", "at_kill"),
    Fault(
        "sigstop_rank",
        "SIGSTOP a rank",
        "at_stop",
        overrides=(f"launch.hang_timeout={HANG_TIMEOUT}",),
    ),
    Fault(
        "sigkill_agent",
        "SIGKILL the agent",
        "at_hold",
        every_rank=True,
        codes=(-9,),
        act=kill_agent,
    ),
    Fault(
        "sigterm_rank", "SIGTERM one rank", "at_terminate", codes=(143,), lost=0, flow=terminated
    ),
    Fault(
        "sigusr1_all",
        "SIGUSR1 all",
        "at_hold",
        every_rank=True,
        codes=(138,),
        lost=0,
        act=signal_all,
    ),
    Fault("ctrl_c", "Ctrl-C", "at_hold", every_rank=True, codes=(130,), lost=0, act=press_ctrl_c),
    Fault(
        "sighup",
        "SIGHUP",
        "at_hold",
        every_rank=True,
        codes=(129,),
        lost=0,
        act=partial(signal_all, number=signal.SIGHUP),  # what a closed terminal sends
        overrides=(
            "launch.max_restarts=0",
        ),  # so that the process of the command is the only one under single
    ),
    Fault(
        "kill_in_save",
        "killed in the middle of a save",
        "in_save",
        "in_stock_save",
        4,
        first_rank=True,
    ),
    Fault(
        "kill_before_pointer",
        "killed between save and pointer",
        "in_pointer",
        "in_stock_pointer",
        4,
        first_rank=True,
    ),
    Fault("truncated", "truncated file", lost=2, flow=damaged(truncate)),
    Fault("flipped_byte", "flipped byte", lost=2, flow=damaged(flip_byte)),
    Fault("missing_shard", "missing shard", lost=2, flow=damaged(remove_shard)),
    Fault("power_loss", "files emptied by a power loss", lost=2, flow=damaged(lose_power)),
    Fault(
        "full_disk",
        "full disk",
        "at_full_disk",
        first_rank=True,
        codes=(0, 1),
        flow=on_a_small_disk,
    ),
    Fault(
        "hang",
        "hang in a collective",
        "at_hang",
        overrides=(f"launch.hang_timeout={HANG_TIMEOUT}",),
    ),
    Fault("exception", "exception on one rank", "in_training_step"),
    Fault(
        "exception_background",
        "exception on one rank, background saves",
        "in_training_step",
        overrides=("checkpoint.background=true",),
        without=dict.fromkeys(STOCK, "it saves in the foreground"),
    ),
    Fault(
        "no_metrics",
        "metrics.csv deleted",
        "at_hold",
        first_rank=True,
        flow=without_metrics,
        without=dict.fromkeys(STOCK, "it has no such file"),
    ),
    Fault(
        "twice",
        "the same command twice",
        "at_hold",
        first_rank=True,
        flow=typed_twice,
        without=dict.fromkeys(STOCK, "it has no name for a run"),
    ),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
