"""Random kills and signals, other numbers of ranks, and secrets: what the table of exact steps
leaves out.
"""

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from benchmarks.faults import tiny_run
from benchmarks.faults.cells import COLUMNS, LIMIT, Run, Session, final_tensors
from benchmarks.faults.matrix import finished

TOLERANCE = (
    1e-5  # relative, of losses and weights when the layout changes; benchmarks/parity has the same
)
SIGTERM_WITHIN = 15.0  # seconds for a run to end with a checkpoint


@dataclass
class Summary:
    """Result of a number of trials."""

    title: str
    rows: dict[str, str]
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"| {self.title} | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in self.rows.items()),
        ]
        return "\n".join(lines)


# ---------------------------------------------------------------- SIGKILL at any time
class Plain(Run):
    """A small run of one process with the default data, optimizer and launcher."""

    STEPS = 40

    def arguments(self) -> list[str]:
        small = [
            "model.width=32",
            "model.layers=2",
            "model.heads=2",
            "data.context=32",
            "data.global_batch_size=8",
        ]
        small += [
            "trainer.limit_val_batches=2",
            "trainer.limit_test_batches=2",
            "task.preview_tokens=0",
        ]
        return [
            *small,
            f"trainer.max_steps={self.STEPS}",
            "trainer.val_every_n_steps=16",
            "checkpoint.every_n_steps=4",
            "model.dropout=0.1",
            *self.common(),
        ]

    def words(self) -> list[str]:
        return [word for word in super().words() if not word.startswith("launch.max_restarts=")]


def kills(session: Session, number: int, *, seed: int, jobs: int = 2) -> Summary:
    """Kill a run at a random moment of its duration, start it again, and compare the weights."""
    draw = random.Random(seed)
    Plain(session, COLUMNS["single"], "prepares the corpus").start().wait(300)
    reference = Plain(session, COLUMNS["single"], "undisturbed plain")
    started = time.monotonic()
    assert reference.start().wait(300) == 0, reference.output()[-3000:]
    duration = time.monotonic() - started
    moments = [draw.uniform(0, duration * 1.1) for _ in range(number)]

    def trial(numbered: tuple[int, float]) -> tuple[str, str | None]:
        index, moment = numbered
        run = Plain(session, COLUMNS["single"], f"killed {index}")
        command = run.start()
        phase = "after the end" if command.wait(moment) is not None else _phase(run)
        run.kill()
        code = 0 if phase == "after the end" else run.start().wait(LIMIT)
        problem = None
        if code != 0:
            problem = f"typed again: exit code {code}\n{run.output()[-2000:]}"
        elif left := [*run.orphans(), *run.half_checkpoints()]:
            problem = f"left behind: {left}"
        else:
            problem = run.difference(reference)
        run.kill()
        return phase, problem and f"killed after {moment:.2f} s ({phase}): {problem}"

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(trial, enumerate(moments)))
    phases = Counter(phase for phase, _ in results)
    problems = [problem for _, problem in results if problem]
    rows = {
        "seed": str(seed),
        "undisturbed": f"{duration:.1f} s, {Plain.STEPS} steps, a checkpoint every 4",
        "killed": ", ".join(f"{phase}: {count}" for phase, count in sorted(phases.items())),
        "the same final weights and metrics.csv": f"{number - len(problems)} of {number}",
    }
    return Summary(f"{number} SIGKILLs at random moments, one process", rows, problems)


def _phase(run: Run) -> str:
    """Return the phase in which a run was killed."""
    steps = [
        step for entries in run.journal().values() for _, kind, step, _ in entries if kind == "step"
    ]
    if run.checkpoints.is_dir() and any(
        path.name.endswith(".part") for path in run.checkpoints.iterdir()
    ):
        return "in a save"
    if not steps:
        return "in the start"
    return "training" if max(steps) < Plain.STEPS else "in the test"


# ---------------------------------------------------------------- SIGTERM at any time
class Endless(Run):
    """Two ranks under ddp that train until a signal stops them."""

    def __init__(self, session: Session, name: str) -> None:
        super().__init__(session, COLUMNS["ddp"], name)
        self.pause = 0.02
        self.steps = 1_000_000

    def arguments(self) -> list[str]:
        return [
            *super().arguments(),
            f"trainer.max_steps={self.steps}",
            "trainer.val_every_n_steps=40",
            "checkpoint.every_n_steps=10",
            "scheduler=constant",  # does not depend on the number of steps
        ]


def sigterms(session: Session, number: int, *, seed: int, jobs: int = 2) -> Summary:
    """Send SIGTERM to one rank at a random moment after the first step, and start the same command
    again, many times.

    The command must end with exit code 143 and a checkpoint of its last step, and leave no process.
    """
    shares = [number // jobs + (i < number % jobs) for i in range(jobs)]

    def chain(index: int) -> tuple[list[float], list[str]]:
        draw = random.Random(f"{seed}/{index}")
        run = Endless(session, f"terminated {index}")
        took, problems = [], []
        for i in range(shares[index]):
            seconds, problem = _terminate(run, rank=draw.randrange(2), after=draw.uniform(0, 1.5))
            took.append(seconds)
            if problem is not None:
                problems.append(f"chain {index}, signal {i}: {problem}")
                run.kill()
        problems += _end_of_chain(session, run, index)
        return took, problems

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(chain, range(jobs)))
    took = sorted(seconds for times, _ in results for seconds in times)
    problems = [problem for _, found in results for problem in found]
    rows = {
        "seed": str(seed),
        "exit code 143, a checkpoint of the last step, no orphan": f"{number - len(problems)} of "
        f"{number}",
        "seconds from the signal to the end": f"{took[len(took) // 2]:.1f} (median), "
        f"{took[-1]:.1f} (longest)",
        "at the end": "the same weights and metrics.csv as without a stop"
        if not problems
        else "see above",
    }
    return Summary(
        f"{number} SIGTERMs to a random rank of two (ddp), each run from its first step on",
        rows,
        problems,
    )


def _terminate(run: Run, *, rank: int, after: float) -> tuple[float, str | None]:
    """Return the seconds to the end, and the problem or None."""
    before = {pid for entries in run.journal().values() for *_, pid in entries}

    def new_step() -> bool:
        last = [entries[-1] for entries in run.journal().values()]
        return len(last) == 2 and all(
            kind == "step" and pid not in before for _, kind, _, pid in last
        )

    command = run.start()
    if not command.wait_until(new_step, LIMIT):
        return (
            0.0,
            f"no step after the start, exit code {command.process.poll()}\n{run.output()[-2000:]}",
        )
    time.sleep(after)
    os.kill(run.journal()[rank][-1][3], signal.SIGTERM)
    signaled = time.monotonic()
    code = command.wait(SIGTERM_WITHIN)
    seconds = time.monotonic() - signaled
    if code is None:
        return seconds, f"rank {rank}: stuck for {SIGTERM_WITHIN:.0f} s"
    summary = tiny_run.summary(run.directory)
    saved = (run.checkpoints / "last").read_text().strip()
    found = (code, summary["stop_reason"], saved, run.orphans())
    if found != (143, "SIGTERM", f"step={summary['global_step']:06d}", []):
        return (
            seconds,
            f"rank {rank}, step {summary['global_step']}: exit code, reason, checkpoint, orphans: "
            f"{found}",
        )
    return seconds, None


def _end_of_chain(session: Session, run: Endless, index: int) -> list[str]:
    """Finish a run that was stopped many times, and compare it with one that was not stopped."""
    summary = tiny_run.summary(run.directory)
    undisturbed = Endless(session, f"not terminated {index}")
    for each in (run, undisturbed):
        each.steps, each.pause = summary["global_step"] + 5, 0.0
        if (code := each.start().wait(300)) != 0:
            return [f"chain {index}: exit code {code} at the end\n{each.output()[-2000:]}"]
    difference = run.difference(undisturbed)
    return [] if difference is None else [f"chain {index}: {difference} at the end"]


# ---------------------------------------------------------------- other numbers of ranks
ONE, TWO, FOUR, MESH = ("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp_tensor", 4)
CHANGES = ((TWO, ONE), (ONE, TWO), (FOUR, TWO), (TWO, MESH), (MESH, TWO))


class Changing(Run):
    """A run whose second start may use another layout."""

    def __init__(self, session: Session, name: str, layout: tuple[str, int]) -> None:
        super().__init__(session, COLUMNS["ddp"], name)
        self.strategy, self.ranks = layout

    def arguments(self) -> list[str]:
        return [*super().arguments(), "model.dropout=0.0", "optimizer=adamw", "optimizer.eps=1e-6"]


def layouts(session: Session) -> Summary:
    """Stop a run half-way, resume it under another layout, and compare it with one process that was
    not stopped.
    """
    reference = Changing(session, "undisturbed layout", ONE)
    assert reference.start().wait(LIMIT) == 0, reference.output()[-3000:]
    rows, problems = {}, []
    for first, second in CHANGES:
        name = " → ".join(f"{strategy} {ranks}" for strategy, ranks in (first, second))
        run = Changing(session, f"from {first[0]} {first[1]} to {second[0]} {second[1]}", first)
        run.fault, run.at_step = "at_terminate", 5
        codes = [run.start().wait(LIMIT)]
        run.strategy, run.ranks = second
        codes.append(run.start().wait(LIMIT))
        if codes != [143, 0] or not finished(run):
            rows[name] = f"exit codes {codes} instead of [143, 0]"
            problems.append(f"{name}: {rows[name]}\n{run.output()[-2000:]}")
            continue
        loss, weights = distance(run, reference)
        rows[name] = f"loss {loss:.1e}, weights {weights:.1e}"
        if max(loss, weights) > TOLERANCE:
            problems.append(f"{name}: {rows[name]}, above {TOLERANCE:.0e}")
    title = (
        "Stopped and resumed under another layout: largest relative differences, tolerance "
        f"{TOLERANCE:.0e}"
    )
    return Summary(title, rows, problems)


def distance(run: Run, reference: Run) -> tuple[float, float]:
    """Return the largest relative difference of a step's loss, and that of the final weights as a
    whole.
    """
    losses = zip(tiny_run.losses(run.directory), tiny_run.losses(reference.directory), strict=True)
    here, there = (
        {
            n: v.double()
            for n, v in final_tensors(r.checkpoints).items()
            if not n.startswith(".optimizer_states.")
        }
        for r in (run, reference)
    )
    moved = sum(torch.square(here[name] - there[name]).sum() for name in there)
    size = sum(torch.square(value).sum() for value in there.values())
    return max(abs(a - b) / abs(b) for a, b in losses), float(moved / size) ** 0.5


# ---------------------------------------------------------------- a secret
def with_secret(session: Session) -> Summary:
    """Search every file of every run directory for the session's secrets."""
    found, files = [], 0
    for directory in session.folder.glob("*/outputs"):
        for path in directory.rglob("*"):
            if path.is_file():
                files += 1
                if session.secret.encode() in path.read_bytes():
                    found.append(str(path))
    rows = {
        "files in all run directories": str(files),
        "of these with the secret in them": str(len(found)),
    }
    return Summary(
        "A secret in the environment and one in .env, referred to by an override", rows, found
    )
