"""The report about a hang: who waits where, and who never came. Torch-free."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

REQUEST = "hang"  # a file in the folder of heartbeats that asks the ranks
ANSWER = "blocked.{rank}"
SECONDS = 2.5  # that the ranks have to answer: they look once per second
REPORT = "hang.txt"  # in the folder of logs
FRAMES = 6
_COMMUNICATION = f"{os.sep}torch{os.sep}distributed{os.sep}"
Records = Mapping[int, Mapping[str, Any]]


def ask(folder: Path, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return what each rank says that it is doing; one that does not answer is missing."""
    (folder / REQUEST).touch()
    answers = {rank: folder / ANSWER.format(rank=rank) for rank in ranks}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not all(file.exists() for file in answers.values()):
        time.sleep(0.05)
    found = {}
    for rank, file in answers.items():
        with suppress(OSError, ValueError):
            found[rank] = json.loads(file.read_text())
    clear(folder)
    return found


def clear(folder: Path) -> None:
    """Remove the question and the answers, which must not reach the next attempt."""
    for file in [folder / REQUEST, *folder.glob(ANSWER.format(rank="*"))]:
        file.unlink(missing_ok=True)


def verdict(records: Records, *, ranks: Sequence[int]) -> str:
    """Return which ranks wait in which collective, which never came to it, and what to type; empty
    if unknown.
    """
    return " ".join(filter(None, [_verdict(records, ranks=ranks), _remedy(records, ranks=ranks)]))


def _remedy(records: Records, *, ranks: Sequence[int]) -> str:
    """Return what to type if only some ranks use a sharded weight, log a value that all reduce, or
    make a step.
    """
    if (logs := _only_some(records, "logging", ranks=ranks)) is not None:
        here, place = logs
        verb = "waits" if len(here) == 1 else "wait"
        return (
            f"{named(here).capitalize()} {verb} in self.log at {place}, which reduces the value "
            "over all ranks at once "
            "(on_step=True, sync_dist=True). If it is inside a condition that differs between "
            "ranks, take it out, or "
            "type on_step=False, on_epoch=True: values of an epoch may be logged on some ranks "
            "only."
        )
    if (steps := _only_some(records, "stepping", ranks=ranks)) is not None:
        here, place = steps
        makes = f"{named(here).capitalize()} make{'s' * (len(here) == 1)}"
        return (
            f"{makes} the optimizer's step at {place}. If others leave it out, decide by what all "
            "ranks know, such as "
            "self.all_gather(loss).mean(); or type trainer.on_nan=skip, which leaves out the steps "
            "whose loss or "
            "gradient is not finite."
        )
    if (sharded := _only_some(records, "sharded", ranks=ranks)) is None:
        return ""
    here, place = sharded
    does, verb = (named(here).capitalize(), "computes" if len(here) == 1 else "compute")
    return (
        f"{does} {verb} with a sharded weight at {place}, which gathers it from all ranks. If "
        "this is inside `if self.trainer.is_global_zero:`, compute it on all ranks and only use "
        "the result on one: "
        '`norm = self.net.weight.norm()`, then `self.log("norm", norm, rank_zero_only=True)`.'
    )


def _only_some(records: Records, key: str, *, ranks: Sequence[int]) -> tuple[list[int], str] | None:
    """Return the ranks that wait at the first place of user code that records name under a key, if
    not all do.
    """
    places = {
        rank: place for rank, record in records.items() if (place := record.get(key)) is not None
    }
    here = [rank for rank, place in places.items() if place == next(iter(places.values()))]
    return (here, places[here[0]]) if here and len(here) < len(ranks) else None


def _verdict(records: Records, *, ranks: Sequence[int]) -> str:
    waiting = {
        rank: each for rank, record in records.items() if (each := _pending(record)) is not None
    }
    if not waiting:
        return _by_stacks(records, ranks=ranks)
    group, number = min((each["group"], each["number"]) for each in waiting.values())
    here = [
        rank for rank, each in waiting.items() if (each["group"], each["number"]) == (group, number)
    ]
    each = waiting[here[0]]
    absent = [rank for rank in ranks if rank not in here and not _reached(records.get(rank), each)]
    names = {_name(waiting[rank]) for rank in here}
    if len(names) > 1:
        called = ", ".join(f"rank {rank} {_name(waiting[rank])}" for rank in here)
        return f"The ranks made different calls as collective {number} of {_group(each)}: {called}."
    came = (
        f"{named(here)} wait{'s' * (len(here) == 1)} in {_name(each)}, collective {number} of "
        f"{_group(each)}"
    )
    if not absent:
        return f"{came}; all ranks came, so the network or a device hangs."
    return f"{came}; {named(absent)} never came{_places(records, absent)}."


def _by_stacks(records: Records, *, ranks: Sequence[int]) -> str:
    """Return which ranks wait within torch.distributed: gloo's sends and receives (a pipeline) are
    not recorded.
    """
    innermost = {rank: record["stack"][0] for rank, record in records.items() if record["stack"]}
    inside = {rank: frame for rank, frame in innermost.items() if _COMMUNICATION in frame}
    absent = [rank for rank in ranks if rank not in inside]
    if not inside or not absent:
        return ""
    here = [*inside]
    came = (
        f"{named(here)} wait{'s' * (len(here) == 1)} for another rank in "
        f"{inside[here[0]].rpartition(os.sep)[2]}"
    )
    return (
        f"{came}; {named(absent)} {'does' if len(absent) == 1 else 'do'} "
        f"not{_places(records, absent)}."
    )


def report(records: Records, *, ranks: Sequence[int], seconds: float) -> str:
    """Return the whole report: the verdict, then what each rank does."""
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), f"No step was made for {seconds:.0f} s."]
    lines += [verdict(records, ranks=ranks) or "No rank is known to wait in a collective."]
    for rank in ranks:
        record = records.get(rank)
        lines.append("")
        if record is None:
            lines.append(
                f"rank {rank} did not answer: it was stopped, or runs code that never lets other "
                "threads run."
            )
            continue
        pending = _pending(record)
        waits = (
            f", in {_name(pending)}, collective {pending['number']} of {_group(pending)}"
            if pending
            else ""
        )
        last = next((each for each in reversed(record["collectives"]) if each["done"]), None)
        done = (
            f"; its last finished one is {_name(last)}, {last['number']} of {_group(last)}"
            if last
            else ""
        )
        lines.append(f"rank {rank}: {record['place']}{waits}{done}")
        lines += [f"    {frame}" for frame in record["stack"][:FRAMES]]
    return "\n".join(lines) + "\n"


def _pending(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the first collective that a rank has begun and not finished."""
    return next((each for each in (record or {}).get("collectives", []) if not each["done"]), None)


def _reached(record: Mapping[str, Any] | None, each: Mapping[str, Any]) -> bool:
    """Return whether a rank has begun this collective, or is not in its group as far as it is
    known.
    """
    if record is None:
        return False
    mine = [entry for entry in record["collectives"] if entry["group"] == each["group"]]
    mine = [entry["number"] for entry in mine if entry["pairwise"] == each["pairwise"]]
    return max(mine) >= each["number"] if mine else each["description"] != "default_pg"


def _name(each: Mapping[str, Any]) -> str:
    sizes = " + ".join("×".join(map(str, size)) for size in each["sizes"] if size)
    return each["name"] + (f" of {sizes}" if sizes else "")


def _group(each: Mapping[str, Any]) -> str:
    return (
        "all ranks"
        if each["description"] == "default_pg"
        else f"group {each['description']} ({each['group']})"
    )


def _places(records: Records, ranks: Sequence[int]) -> str:
    record = records.get(ranks[0])
    return f" (rank {ranks[0]} is at {record['stack'][0]})" if record and record["stack"] else ""


def named(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
