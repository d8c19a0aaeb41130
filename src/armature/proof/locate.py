"""Find the first place at which two traced runs part, and a likely cause."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armature.run_dir import TRACE

TOLERANCE = 1e-6  # relative, of sums in runs in float64 whose inputs may be of fp32
NOISE = 1e-6  # of the largest tensor of its kind: a gradient that is zero but for rounding
NORMS = ("BatchNorm", "SyncBatchNorm")
# to what a module logs under the name of a column of ours, metrics.csv appends one of these
RENAMED = ("_step", "_epoch", "_module")
OWN_STATE = (
    "Use register_buffer, or on_save_checkpoint and on_load_checkpoint (state_dict and "
    "load_state_dict in a callback or data module)."
)
OWN_GENERATOR = (
    "Use the generators of torch, numpy.random or random, whose state is saved; in a data set, "
    "`augment(sample, generator)`."
)


@dataclass(frozen=True)
class Found:
    """The first difference of two runs.

    Attributes:
        where: module and tensor, by their names in the user's code.
        cause: a likely one, in a sentence or two.
        exempt: whether the contract names this as an exception.
    """

    step: int
    where: str
    cause: str
    exempt: bool = False

    def __str__(self) -> str:
        return f"step {self.step}: {self.where}\n  likely cause: {self.cause}"


Step = dict[str, Any]  # the records of all ranks of one step, added up


def read(run: Path) -> dict[int, list[Step]]:
    """Return the record of each rank by step; of a step that was repeated, the last."""
    ranks = []
    for file in sorted((run / TRACE).glob("rank_*.jsonl")):
        steps: dict[int, Step] = {}
        for line in file.read_text().splitlines():
            record = json.loads(line)
            known = steps.get(record["step"], {})
            logged = known.get("logged", {}) | record["logged"]
            steps[record["step"]] = (known | record) | {"logged": logged}
        ranks.append(steps)
    common = set.intersection(*map(set, ranks)) if ranks else set()
    return {
        step: [each[step] for each in ranks]
        for step in sorted(common)
        if all("pieces" in each[step] for each in ranks)
    }


def own_values(run: Path) -> set[str]:
    """Return the names of logged values that differ between ranks, which did not average them."""
    names: set[str] = set()
    for ranks in read(run).values():
        for name in set.intersection(*(set(each["logged"]) for each in ranks)):
            values = [each["logged"][name] for each in ranks]
            if max(values) - min(values) > 1e-9 * max(map(abs, values)):
                names.add(name)
    return names


def own_columns(run: Path, columns: Iterable[str]) -> set[str]:
    """Return which of these columns of metrics.csv hold such values."""
    own = own_values(run)
    endings = ("", *RENAMED)
    return {c for c in columns if any(c == f"{name}{each}" for name in own for each in endings)}


def locate(
    reference: Path, other: Path, *, exact: bool, tolerance: float = TOLERANCE
) -> Found | None:
    """Return the first difference of two recorded runs, or None if no step shows one.

    Args:
        exact: of the same layout, equal bit for bit.
        tolerance: relative, of sums and of norms, unless `exact`.
    """
    runs = read(reference), read(other)
    steps = sorted(runs[0].keys() & runs[1].keys())
    search = _Search(runs, exact=exact, tolerance=tolerance)
    return next((found for step in steps if (found := search.first_in(step))), None)


class _Search:
    """Looks through a step in the order in which it is computed."""

    def __init__(
        self, runs: tuple[dict[int, list[Step]], ...], *, exact: bool, tolerance: float
    ) -> None:
        self.runs, self.exact, self.tolerance = runs, exact, tolerance
        self.step = 0

    def first_in(self, step: int) -> Found | None:
        self.step = step
        self.ranks = [run[step] for run in self.runs]
        return self._samples() or self._weights() or self._modules() or self._gradients()

    def _found(self, where: str, cause: str, *, exempt: bool = False) -> Found:
        return Found(self.step, where, cause, exempt)

    # ------------------------------------------------------------ samples
    def _samples(self) -> Found | None:
        pieces = [[piece for rank in ranks for piece in rank["pieces"]] for ranks in self.ranks]
        shapes = [{piece["shape"] for piece in each} for each in pieces]
        if shapes[0] != shapes[1] or len(shapes[0]) > 1:
            return None  # padded to another length, or a part of each sample
        one, two = ([sample for piece in each for sample in piece["samples"]] for each in pieces)
        if (one == two) if self.exact else (set(one) == set(two)):
            return None
        i = next((i for i, sample in enumerate(one) if sample not in two), 0)
        return self._found(
            f"sample {i} of {len(one)} of the batch", self._cause_of_samples(one, two)
        )

    def _cause_of_samples(self, one: list[str], two: list[str]) -> str:
        if not self.exact:
            return (
                "the data depend on the rank: a data set or sampler that divides itself, or "
                "random numbers that it draws from a generator of its own"
            )
        if set(one) == set(two):
            return "the order of samples is not a function of seed and epoch"
        return (
            "samples change when they are read again: random numbers drawn from a generator of "
            f"its own, or data whose order differs between starts. {OWN_GENERATOR}"
        )

    # ------------------------------------------------------------ weights
    def _weights(self) -> Found | None:
        one, two = (_summed([rank["weights"] for rank in ranks]) for ranks in self.ranks)
        name = self._first_apart(one, two)
        if name is None:
            return None
        if self.step == min(self.runs[0]):
            cause = (
                "initial weights that depend on the process: drawn in a hook, from a generator of "
                "their own, or by code that ranks run differently"
            )
        elif "running_" in name or "num_batches" in name:
            cause = BATCHNORM
        else:
            cause = (
                f"the gradients of step {self.step - 1} agree, so it is the update: a schedule, "
                "an optimizer's state, or a hook that changes weights by what this rank alone has"
            )
        return self._found(f"weight {name} at the start of the step", cause)

    # ------------------------------------------------------------ forward
    def _modules(self) -> Found | None:
        one, two = (_modules_of(ranks) for ranks in self.ranks)
        for name in one:
            if name not in two:
                continue
            kind = one[name]["class"]
            # a loss of each micro-batch; it is looked at with the gradients
            loss = one[name]["output"][0] <= sum(len(rank["pieces"]) for rank in self.ranks[0])
            if loss or self._same(one[name]["output"], two[name]["output"]):
                continue  # an input may count within the batch, as the edges of a batch of graphs
            if not self._same(one[name]["input"], two[name]["input"]):
                return self._apart(self._outermost_input(name, one, two), kind="")
            return self._apart(f"the output of {name} ({kind}); its input agrees", kind=kind)
        return None

    def _outermost_input(self, name: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
        """Return in words the outermost module, around this one, whose input differs as well."""
        while True:
            parent = name.rpartition(".")[0]
            if parent not in one or self._same(one[parent]["input"], two[parent]["input"]):
                break
            name = parent
        caller = parent if parent in one else "training_step or forward"
        return f"the input of {name} ({one[name]['class']}), which {caller} passes to it"

    def _apart(self, where: str, *, kind: str) -> Found:
        if any(word in kind for word in NORMS):
            return self._found(where, BATCHNORM, exempt=not self.exact and len(self.ranks[1]) == 1)
        advanced = self._advanced_generators()
        if advanced and not self.exact:
            return self._found(
                where,
                f"a draw from a generator of its own, {', '.join(advanced)}: each rank and each "
                "micro-batch draws numbers that one process does not draw",
            )
        if self._draws():
            text = "random numbers are drawn in the step"
            if self.exact:
                return self._found(where, f"{text}, and a resume does not draw the same")
            text += ": each rank draws its own, as for dropout. Set it to 0 to compare layouts"
            return self._found(where, text, exempt=True)
        if self.exact:
            return self._found(
                where,
                "something that no checkpoint holds: a draw from a generator of its own, the "
                f"clock, an iterator, or state in a closure. {OWN_STATE}",
            )
        return self._found(
            where,
            "a value of this rank's batch alone (its mean, largest value or size), a draw from a "
            "generator of its own, or a plan that splits fused queries, keys and values",
        )

    def _draws(self) -> bool:
        return any(piece["draws"] for rank in self.ranks[0] for piece in rank["pieces"])

    # ------------------------------------------------------------ loss and backward
    def _gradients(self) -> Found | None:
        one, two = (_summed([rank["gradients"] for rank in ranks]) for ranks in self.ranks)
        name = self._first_apart(one, two, reverse=True)
        if name is None:
            return None
        losses = [[_loss_of(rank) for rank in ranks] for ranks in self.ranks]
        if self.exact and losses[0] == losses[1]:
            return self._found(
                f"the gradient of {name}; all outputs and the loss agree",
                "a hook that changes gradients by state that no checkpoint holds",
            )
        where = f"the loss, which training_step computes from outputs that agree ({name}.grad)"
        if self.exact:
            return self._apart(where, kind="")
        if cause := self._cause_of_loss():
            return self._found(where, cause)
        return self._apart(where, kind="")

    def _cause_of_loss(self) -> str | None:
        """Return what the losses of the parts of a batch say about the loss of the whole."""
        whole, parts = ([p for rank in ranks for p in rank["pieces"]] for ranks in self.ranks)
        losses = [piece.get("loss") for piece in (*whole, *parts)]
        if len(whole) != 1 or len(parts) < 2 or None in losses:
            return None
        if math.isclose(sum(losses[1:]), losses[0], rel_tol=1e-5):
            return "the loss is a sum over the batch. Divide it by the number of samples"
        counts = [piece["targets"] for piece in parts]
        if None in counts or len(set(counts)) == 1:
            return None
        weighed = sum(loss * n for loss, n in zip(losses[1:], counts, strict=True)) / sum(counts)
        if not math.isclose(weighed, losses[0], rel_tol=1e-5):
            return None
        return (
            f"a mean of means: the parts of the batch count {', '.join(map(str, counts))} targets, "
            "and each part's mean weighs the same. Batches that are a dictionary with whole "
            'numbers in "targets" (-100: not counted) are weighed by their number; or divide by a '
            "number that is the same for every part"
        )

    def _advanced_generators(self) -> list[str]:
        """Return the generators in attributes that the step draws from in the reference."""
        later = self.runs[0].get(self.step + 1)
        now, after = self.ranks[0][0]["generators"], later[0]["generators"] if later else {}
        names = [name for name in now if after.get(name, now[name]) != now[name]]
        return [f"self.{name.removeprefix('module.')}" for name in names]

    # ------------------------------------------------------------ numbers
    def _first_apart(
        self, one: Mapping[str, list], two: Mapping[str, list], *, reverse: bool = False
    ) -> str | None:
        names = [name for name in one if name in two]
        scale = max((_rms(value) for value in one.values()), default=0.0)
        for name in reversed(names) if reverse else names:
            if not self._same(one[name], two[name], scale=scale):
                return name
        return None

    def _same(self, one: list[float], two: list[float], *, scale: float = 0.0) -> bool:
        """Return whether two statistics agree, where ranks may hold several copies of a tensor."""
        if self.exact:
            return one == two
        if not one[0] or not two[0]:
            return True
        copies = two[0] / one[0]
        ratio = max(copies, 1 / copies)
        if abs(ratio - round(ratio)) > TOLERANCE:
            return True  # padded to another length: nothing can be said
        return _close(one, [value / copies for value in two], scale, self.tolerance)


BATCHNORM = (
    "BatchNorm computes its statistics over a part of the batch. Type "
    "strategy.sync_batchnorm=true; within a rank, data.micro_batch_size=auto, since a micro-batch "
    "is normalized by itself"
)


def _close(one: list[float], two: list[float], scale: float, tolerance: float) -> bool:
    """Return whether sums and sums of squares agree. `scale`: of the largest tensor of the kind."""
    if not all(map(math.isfinite, (*one, *two))):
        return [math.isfinite(value) for value in one] == [math.isfinite(value) for value in two]
    count, total, squares = one
    noise = (NOISE * scale) ** 2 * count
    of_sum = math.sqrt(max(tolerance**2 * squares, noise) * count)
    of_squares = max(2 * tolerance * squares, noise)
    return abs(total - two[1]) <= of_sum and abs(squares - two[2]) <= of_squares


def _rms(value: list[float]) -> float:
    return math.sqrt(value[2] / value[0]) if value[0] and math.isfinite(value[2]) else 0.0


def _summed(ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for each in ranks for name in each)
    return {
        name: [sum(column) for column in zip(*(e[name] for e in ranks if name in e), strict=True)]
        for name in names
    }


def _modules_of(ranks: list[Step]) -> dict[str, dict[str, Any]]:
    """Return the modules in the order in which they end, inputs and outputs added up."""
    found: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        for name, entry in rank["modules"].items():
            if name not in found:
                found[name] = entry
                continue
            known = found[name]
            found[name] = known | {
                key: [a + b for a, b in zip(known[key], entry[key], strict=True)]
                for key in ("input", "output")
            }
    return found


def _loss_of(rank: Step) -> list[float | None]:
    return [piece.get("loss") for piece in rank["pieces"]]
