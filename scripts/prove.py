"""Prove that your experiment gives the same result after a stop, a kill, and under every layout.

    python scripts/prove.py experiment=mine
    python scripts/prove.py --steps 20 --layouts ddp:2,fsdp:4 experiment=mine
    python scripts/prove.py experiment=mine strategy=ddp trainer.devices=2   # stops under ddp
    python scripts/prove.py --against outputs/RUN       # another commit or another torch

It trains a few steps in one process without a stop. Then it stops the run (SIGTERM), kills it
(SIGKILL) after a save at a validation, and resumes: all must be equal bit for bit. Then it trains
under each layout that the model and this machine can take: all must agree within 1e-5 (gradient
norms: 1e-4), in fp32. For what differs it repeats the run and names the first step, module and
tensor, and a likely cause. The exit code is 1 if something differs that docs/contract.md promises.
"""

import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from omegaconf import DictConfig

from armature import cli
from armature.errors import EXIT_CONFIG, ConfigError
from armature.launcher import environment
from armature.proof import compare, locate
from armature.proof.compare import BOUND, COLUMNS, METRICS, Cell
from armature.sweeps.trials import newest_start
from armature.validation import signatures
from armature.validation.checks import check

FEWEST_STEPS = 4  # two validations, and a stop between them
VALIDATION_BATCHES = 4  # over all ranks, so that every layout validates on the same samples
DEFAULT_LAYOUTS = ("micro", "ddp:2", "fsdp:2", "tensor:2", "pipeline:2", "context:2", "expert:2")
MICRO = "micro"  # one process, two micro-batches
SINGLE = ("strategy=single", "trainer.devices=1", "trainer.num_nodes=1")
DECIDED = ("run.name", "run.root", "logger", "resume")  # by this script, beside what `base` lists
TRAIN = "from armature.launcher.train import command; command()"
TRACE = "+callbacks.trace={{_target_:armature.callbacks.trace.Trace,steps:{steps}}}"
STOP = "+callbacks.stop_at={{_target_:armature.callbacks.stop_at.StopAt,signals:{{{name}:{step}}}}}"
DOUBLE = "trainer.precision=64-true"
NUDGE = "+callbacks.nudge={_target_:armature.callbacks.trace.Nudge}"
ROUNDING = 10  # times what weights that are nudged by one rounding change
OWN = "own"  # in the table: a value that each rank logs for itself


@dataclass
class Row:
    """A row of the table: a run that is compared with the straight one.

    Attributes:
        title: first cell of the table.
        overrides: of the layout.
        stop: signal and step of a stop, after which the run is resumed; then all must be equal.
        skipped: why it cannot run.
        notes: what is printed below the table.
    """

    title: str
    overrides: tuple[str, ...]
    stop: tuple[str, int] | None = None
    skipped: str | None = None
    cells: dict[str, Cell | str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    broken: bool = False

    @property
    def exact(self) -> bool:
        return self.stop is not None


def main() -> None:
    parser = cli.train_parser(__doc__)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run (8)")
    parser.add_argument(
        "--layouts",
        metavar="NAME[:DEVICES],…",
        help="strategies to compare with one process, as ddp:2,fsdp_tensor:4; micro: one process "
        f"and two micro-batches; none: only stops ({','.join(DEFAULT_LAYOUTS)}, as far as the "
        "model and this machine can take them)",
    )
    parser.add_argument("--against", type=Path, metavar="RUN", help="compare with a finished run")
    parser.add_argument("--keep", action="store_true", help="keep the runs even if all is equal")
    args, typed = cli.parse_overrides(parser, purpose=" as for train.py")
    root = Path("outputs") / time.strftime("prove-%Y%m%d-%H%M%S")
    try:
        proof = (
            Against(root, typed, args.steps, args.against)
            if args.against is not None
            else Proof(root, typed, args.steps, args.layouts)
        )
        proved = proof.prove()
    except ConfigError as error:
        cli.refuse(error.problems)
    except KeyboardInterrupt:
        print(f"Stopped. The runs so far are in {root}.", file=sys.stderr)
        sys.exit(130)
    if proved and not args.keep:
        shutil.rmtree(root, ignore_errors=True)
    else:
        print(f"The runs and their output: {root}/")
    sys.exit(0 if proved else 1)


class Runs:
    """Starts train.py below one folder."""

    def __init__(self, root: Path, base: Sequence[str]) -> None:
        self.root, self.base = root, list(base)
        environment.share_sources()

    def train(self, name: str, *overrides: str, stopped: bool = False) -> str | None:
        """Train to the end, or to a stop. Return the message if the configuration is refused.

        Raises ConfigError, with the end of the output, if the run fails.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        keys = {each.partition("=")[0] for each in overrides}
        base = [each for each in self.base if each.partition("=")[0] not in keys]
        words = [*base, *overrides, f"run.name={name}"]
        with (self.root / f"{name}.log").open("a+") as log:
            begin = log.tell()
            command = [sys.executable, "-P", "-c", TRAIN, *words]
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode
            log.seek(begin)
            output = log.read()
        if code == EXIT_CONFIG:  # what is refused comes after the warnings
            return re.split(r"^\d+ problems?:\n  - ", output, flags=re.MULTILINE)[-1].strip()
        if (code == 0) == stopped:
            was = "ended before its stop" if stopped else f"failed with exit code {code}"
            end = "\n".join(output.splitlines()[-30:])
            raise Failed(f"the run {name} {was}. Its output, {self.root}/{name}.log, ends:\n{end}")
        return None

    def stop_and_resume(self, name: str, stop: tuple[str, int], *overrides: str) -> None:
        signal = STOP.format(name=stop[0], step=stop[1])
        self.train(name, *overrides, signal, stopped=True)
        self.train(name, *overrides, signal)


class Failed(ConfigError):
    """A run that ended in another way than it should."""


class Proof:
    """The runs of one experiment, and the table of what they show."""

    def __init__(self, root: Path, typed: list[str], steps: int, layouts: str | None) -> None:
        if steps < FEWEST_STEPS:
            raise ConfigError(f"--steps {steps}: type at least {FEWEST_STEPS}.")
        self.root, self.steps = root, steps
        self._made: dict[str, ConfigError | None] = {}  # runs; the error of one that failed
        # a validation before the stop, and another one before the kill
        self.every = max(1, (steps - 1) // 3)
        self.stops = (("SIGTERM", self.every + 1), ("SIGKILL", 2 * self.every + 1))
        decided = [
            f"run.root={root}",
            "run.report=false",
            "logger=none",
            f"trainer.max_steps={steps}",
            "trainer.max_epochs=null",
            "trainer.max_time=null",
            "trainer.precision=32-true",
            "trainer.test_at_end=false",
            f"trainer.limit_val_batches={VALIDATION_BATCHES}",
            "trainer.log_every_n_steps=1",
            f"trainer.val_every_n_steps={self.every}",
            f"checkpoint.every_n_steps={self.every}",
            "checkpoint.root=null",
            "checkpoint.at_end=true",
            "launch.max_restarts=0",
        ]
        keys = {each.partition("=")[0] for each in decided} | set(DECIDED)
        own = [each for each in typed if each.lstrip("+~").partition("=")[0] not in keys]
        unused = [each for each in typed if each not in own]
        layout = ("strategy=", "strategy.", "trainer.devices=", "trainer.num_nodes=")
        self.typed_layout = tuple(each for each in own if each.startswith(layout))
        self.experiment = [each for each in own if each not in self.typed_layout]
        if unused:
            print(f"{', '.join(unused)}: not used, since this script decides that.")
        self.decided = decided
        self.runs = Runs(root, [*self.experiment, *decided])
        self._checked: dict[tuple[str, ...], DictConfig] = {}
        self.check(SINGLE)  # a mistake in the experiment is one of every row
        self.rows = self._rows(layouts)

    def check(self, overrides: tuple[str, ...]) -> DictConfig:
        """Return the checked configuration of a layout. ConfigError: it is refused."""
        if overrides not in self._checked:
            logging.disable(logging.WARNING if self._checked else logging.NOTSET)
            try:  # each layout would say what the first check has said
                cfg = cli.compose([*self.experiment, *self.decided, *overrides])
                self._checked[overrides] = check(cfg, prepare=False, overrides=self.decided)
            finally:
                logging.disable(logging.NOTSET)
        return self._checked[overrides]

    def _rows(self, typed: str | None) -> list[Row]:
        base, title = self.typed_layout or SINGLE, ""
        (term, stop), (kill, end) = self.stops
        rows = []
        if self.typed_layout:
            values = dict(word.split("=", 1) for word in self.typed_layout)
            devices = values.get("trainer.devices", "1")
            title = f"{values.get('strategy', 'auto')} {devices} as typed"
            rows.append(self._row(title, self.typed_layout, chosen=True))
        rows += [
            Row(f"{title or 'single 1'}, {kind} at {step}", base, (signal, step))
            for kind, signal, step in (("stopped", term, stop), ("killed", kill, end))
        ]
        names = DEFAULT_LAYOUTS if typed is None else [n for n in typed.split(",") if n != "none"]
        problems, chosen = [], typed is not None
        for name in names:
            try:
                rows.append(self._row_of(name, chosen=chosen))
            except ConfigError as error:
                problems += [f"--layouts {name}: {each}" for each in error.problems]
        if problems:
            raise ConfigError(problems)
        return rows

    def _row_of(self, name: str, *, chosen: bool) -> Row:
        strategy, _, devices = name.partition(":")
        if strategy == MICRO:
            size = self._global_batch_size
            if size is None or size % 2:
                return Row("2 micro-batches", SINGLE, skipped="a batch of odd or unknown size")
            micro = f"++data.micro_batch_size={size // 2}"
            return self._row("2 micro-batches", (*SINGLE, micro), chosen=chosen)
        count = cli.whole_number(f"{name}: the devices of {strategy}", devices or "2")
        if count is None:
            raise ConfigError("type a number of devices, as in ddp:2.")
        words = (f"strategy={strategy}", f"trainer.devices={count}", "trainer.num_nodes=1")
        return self._row(f"{strategy} {count}", words, chosen=chosen)

    def _row(self, title: str, overrides: tuple[str, ...], *, chosen: bool) -> Row:
        """Return the row of a layout; skipped if the checks refuse it and nobody `chosen` it."""
        try:
            self.check(overrides)
        except ConfigError as error:
            if chosen:
                raise
            # without the key, which the title says
            return Row(title, overrides, skipped=error.problems[0].split(": ", 1)[-1])
        return Row(title, overrides)

    @cached_property
    def _global_batch_size(self) -> int | None:
        data = self.check(SINGLE).data
        given = signatures.defaults_of(data._target_) | {**data}  # a user's class may have one
        size = given.get("global_batch_size") or given.get("batch_size")
        return size if isinstance(size, int) else None

    # ------------------------------------------------------------ runs
    def prove(self) -> bool:
        """Make the runs, print the table, and return whether the contract holds."""
        print(
            f"{self.steps} steps per run, in fp32; validation and a save every {self.every} steps."
        )
        self.straight = self._straight(SINGLE, "straight")
        for row in self.rows:
            if row.skipped is None:
                self._run(row)
        self._print_table()
        return not any(row.broken for row in self.rows)

    def _straight(self, layout: tuple[str, ...], name: str, *more: str) -> Path:
        return self._go(name, *layout, *more)

    def _go(self, name: str, *overrides: str) -> Path:
        """Make a run, unless it has been made. ConfigError: it is refused."""
        if name not in self._made:
            began = time.monotonic()
            try:
                message = self.runs.train(name, *overrides)
                self._made[name] = ConfigError(message) if message else None
                print(f"  {name:<32}{time.monotonic() - began:6.1f} s", flush=True)
            except Failed as error:
                self._made[name] = error
        if (refused := self._made[name]) is not None:
            raise refused
        return self.root / name

    def _try(self, name: str, *overrides: str) -> Path | None:
        """Make a run, or return None if it is refused or fails."""
        try:
            return self._go(name, *overrides)
        except ConfigError:
            return None

    def _run(self, row: Row) -> None:
        name = row.title.replace(" ", "-").replace(",", "").replace("=", "-")
        began = time.monotonic()
        try:
            if row.stop is not None:
                reference = self._reference_of_stops()
                self.runs.stop_and_resume(name, row.stop, *row.overrides)
            else:
                reference = self.straight
                message = self.runs.train(name, *row.overrides)
                if message:
                    row.skipped = message.splitlines()[0]
                    return
        except Failed as error:
            row.broken = True
            row.notes.append(error.problems[0])
            row.cells = dict.fromkeys(COLUMNS, "FAILED")
            return
        row.cells = dict(compare.compare(reference, self.root / name, exact=row.exact))
        print(f"  {row.title:<32}{time.monotonic() - began:6.1f} s", flush=True)
        cells: dict[str, Cell] = dict(row.cells)  # pyright: ignore[reportAssignmentType]
        if name.startswith("2-micro"):
            row.cells[METRICS] = cells[METRICS] = compare.NOT_COMPARED  # of the last micro-batch
        if (found := compare.first(cells)) is not None:
            self._explain(row, name, cells, found)

    def _reference_of_stops(self) -> Path:
        if not self.typed_layout:
            return self.straight
        return self._straight(self.typed_layout, "straight-in-that-layout")

    # ------------------------------------------------------------ where first
    def _explain(self, row: Row, name: str, cells: dict[str, Cell], first: Cell) -> None:
        """Repeat both runs and record them; add what is found to the row's notes."""
        trace = TRACE.format(steps=self.steps)
        row.broken = True
        try:
            if row.exact:
                self._explain_resume(row, name, trace)
            else:
                self._explain_layout(row, name, cells, trace)
        except ConfigError as error:
            row.notes.append(f"the repeated run shows nothing more: {error.problems[0]}")
        if row.broken:
            what = f"first at step {first.step}, {first.what}" if first.step else first.what
            row.notes.insert(0, f"differs {what}")

    def _explain_resume(self, row: Row, name: str, trace: str) -> None:
        layout = (*row.overrides, trace)
        assert row.stop is not None
        again = self._go("straight-again", *layout)
        itself = compare.compare(self._reference_of_stops(), again, exact=True)
        if (unstable := compare.first(itself)) is not None:
            row.notes.append(
                f"two runs without a stop differ too, {unstable.what}: GPU kernels that sum in "
                "another order each time, or a seed taken from the clock. Type "
                "trainer.deterministic=true, which names such kernels."
            )
            return
        self.runs.stop_and_resume(f"{name}-recorded", row.stop, *layout)
        found = locate.locate(again, self.root / f"{name}-recorded", exact=True)
        row.notes.append(str(found) if found else NOTHING_FOUND)

    def _explain_layout(self, row: Row, name: str, cells: dict[str, Cell], trace: str) -> None:
        """Repeat both runs in float64, which no rounding reaches, and record them.

        Sharded strategies and some models refuse float64. There the runs are recorded in fp32, and
        what differs counts as rounding only as far as `_rounding` shows.
        """
        double = self._try("straight-float64", *SINGLE, DOUBLE, trace)
        wide = double and self._try(f"{name}-float64", *row.overrides, DOUBLE, trace)
        if double and wide:
            straight, other = double, wide
            beyond = compare.compare(straight, other, exact=False)
            if cells[METRICS] is compare.NOT_COMPARED:
                beyond[METRICS] = compare.NOT_COMPARED
            left = {column for column, cell in beyond.items() if cell.broken}
            unsynced = set(beyond[METRICS].names)
        else:
            straight = self._straight(SINGLE, "straight-recorded", trace)
            other = self._go(f"{name}-recorded", *row.overrides, trace)
            rounding = self._rounding()
            left = {
                column
                for column, cell in cells.items()
                if cell.broken and (cell.largest or 0) > ROUNDING * (rounding[column].largest or 0)
            }
            unsynced = set(cells[METRICS].names) - set(rounding[METRICS].names)
            unsynced |= locate.own_columns(other, cells[METRICS].names)
            left = left | {METRICS} if unsynced else left - {METRICS}
        own = locate.own_columns(other, unsynced)
        if METRICS in left and unsynced == own:
            left.remove(METRICS)
        if own:
            if METRICS not in left:
                row.cells[METRICS] = OWN
            row.notes.append(
                f"own: {', '.join(sorted(own))}: logged without sync_dist=True, so that each rank "
                "has the value of its own samples, and rank 0's is in metrics.csv"
            )
        if not left - {METRICS}:
            self._excuse_rounding(row, cells, left)
        if not left:
            row.broken = False
            return
        if left == {METRICS}:
            row.notes.append(AVERAGES.format(names=", ".join(sorted(unsynced - own))))
            return
        tolerance = locate.TOLERANCE if wide else BOUND
        found = locate.locate(straight, other, exact=False, tolerance=tolerance)
        if found is not None:
            row.notes.append(str(found))
            row.broken = not found.exempt
            if found.exempt:
                row.notes.append("docs/contract.md names this exception: nothing else is judged")
        else:
            row.notes.append(NOTHING_FOUND)

    def _rounding(self) -> dict[str, Cell]:
        """Return what rounding alone changes in fp32: in a run whose first weights are nudged."""
        nudged = self._try("straight-nudged", *SINGLE, NUDGE)
        if nudged is None:
            return {column: Cell() for column in COLUMNS}
        return compare.compare(self.straight, nudged, exact=False)

    def _excuse_rounding(self, row: Row, cells: dict[str, Cell], left: set[str]) -> None:
        rounded = [c for c, cell in cells.items() if cell.broken and c not in left]
        rounded = [column for column in rounded if row.cells[column] != OWN]
        for column in rounded:
            row.cells[column] = f"{cells[column].largest:.1e}*"
        if rounded:
            row.notes.append(
                "* rounding of fp32 that training amplifies, such as the gradient of a bias before "
                "BatchNorm, which is zero but for rounding: in float64 it is gone, or weights that "
                "are nudged by one rounding change as much"
            )

    # ------------------------------------------------------------ table
    def _print_table(self) -> None:
        width = max(len(row.title) for row in self.rows) + 2
        print("\n" + " " * width + "".join(f"{column:>13}" for column in COLUMNS))
        for row in (row for row in self.rows if row.skipped is None):
            print(f"{row.title:<{width}}" + "".join(f"{row.cells[c]!s:>13}" for c in COLUMNS))
        print(
            f"\nequal: bit for bit. A number: the largest relative difference, allowed up to "
            f"{BOUND:.0e} (gradient norm: {compare.NORM_BOUND:.0e}). –: not compared."
        )
        for why in dict.fromkeys(row.skipped for row in self.rows if row.skipped is not None):
            titles = [row.title for row in self.rows if row.skipped == why]
            print(f"not run: {', '.join(titles)}: {why}")
        for row in self.rows:
            for note in row.notes:
                print(f"\n{row.title}: {note}")
        broken = [row.title for row in self.rows if row.broken]
        print(f"\nNOT proved: {'; '.join(broken)}" if broken else "\nproved")


NOTHING_FOUND = (
    "no module, weight or gradient of the recorded steps differs: the value is computed outside of "
    "them, in a hook or a callback"
)
AVERAGES = (
    "{names}: losses, gradient norms and weights agree, so it is how the metric is averaged: "
    "a mean of means over batches or ranks of unequal size, or of a value that is no mean over "
    "samples. Log with batch_size=…, or use a torchmetrics object"
)


class Against:
    """Compare a finished run with what its command computes now.

    Its command is run again for its first steps: with other code, another torch, or with other
    settings that are typed here, such as a layout.
    """

    def __init__(self, root: Path, typed: list[str], steps: int, run: Path) -> None:
        file = run / "overrides.txt"
        if not file.is_file() or not (run / "metrics.csv").is_file():
            raise ConfigError(
                f"--against {run}: there is no overrides.txt or no metrics.csv. Name the directory "
                "of a run, such as outputs/<run.name>."
            )
        self.run, self.root, self.typed = run, root, typed
        rows = compare.read_rows(run / "metrics.csv")
        if not rows:
            raise ConfigError(f"--against {run}: it has no finished step. Name another run.")
        last = int(rows[-1]["step"])
        self.steps = min(steps, last)
        self.ends = self.steps == last  # then the checkpoints are of the same step
        # one step later, since a stop leaves the step's validation to the resumed run
        self.stop = self.steps + 1 if self.steps + 1 < last else None
        recorded = [
            each for each in newest_start(run) if each.lstrip("+").partition("=")[0] not in DECIDED
        ]
        keys = {each.lstrip("+").partition("=")[0] for each in typed}
        self.command = [w for w in recorded if w.lstrip("+").partition("=")[0] not in keys]
        decided = [f"run.root={root}", "run.report=false", "logger=none", "checkpoint.root=null"]
        self.runs = Runs(root, [*self.command, *typed, *decided, "launch.max_restarts=0"])
        folder = [word for word in typed if word.startswith("hydra.searchpath")]
        self.recorded = Runs(root, [*folder, *recorded, *decided, "launch.max_restarts=0"])
        check(cli.compose(self.runs.base), prepare=False, overrides=self.runs.base)

    def prove(self) -> bool:
        """Make the run, print the table, and return whether both agree."""
        print(f"the first {self.steps} steps of the command of {self.run}, now")
        self._repeat(self.runs, "now")
        cells = self._compare("now")
        width = len(str(self.run)) + 2
        print("\n" + " " * width + "".join(f"{column:>13}" for column in COLUMNS))
        print(f"{self.run!s:<{width}}" + "".join(f"{cells[c]!s:>13}" for c in COLUMNS))
        found = compare.first(cells)
        if found is None:
            print(f"\nboth agree within {BOUND:.0e}")
            return True
        print(f"\ndiffers first at step {found.step}, {found.what}")
        print(self._explanation())
        return False

    def _repeat(self, runs: Runs, name: str, *more: str) -> None:
        stop = () if self.stop is None else (STOP.format(name="SIGTERM", step=self.stop),)
        message = runs.train(name, *more, *stop, stopped=bool(stop))
        if message:
            raise ConfigError(message.strip().removeprefix("1 problem:\n  - "))

    def _compare(self, name: str) -> dict[str, Cell]:
        last = None if self.ends else self.steps
        return compare.compare(self.run, self.root / name, exact=False, last_step=last)

    def _explanation(self) -> str:
        """Return the first sample, module or weight that differs, if both runs are recorded."""
        trace = TRACE.format(steps=self.steps)
        reference = self.run
        if not locate.read(self.run):
            self._repeat(self.recorded, "recorded", trace)
            if compare.first(self._compare("recorded")) is not None:
                words = " ".join([*self.command, f"'{trace}'"])
                return (
                    "The module is found if the other run is recorded too. In the other checkout "
                    f"type python train.py {words} run.name=recorded, and here --against that run."
                )
            reference = self.root / "recorded"
        self._repeat(self.runs, "now-recorded", trace)
        found = locate.locate(reference, self.root / "now-recorded", exact=False)
        return str(found) if found else NOTHING_FOUND


if __name__ == "__main__":
    main()
