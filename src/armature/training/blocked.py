"""What this rank is doing when it hangs: its stack, and the collectives that it has begun and not
finished.

The process that watches the ranks asks for it with a file (`armature.launcher.hang`). torch's
flight recorder knows the collectives, of NCCL and of gloo alike; TORCH_FR_BUFFER_SIZE, set by the
launcher, turns it on.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch

from armature import files
from armature.errors import is_users, own_frames
from armature.launcher import environment, hang

POLL_SECONDS = 1.0
FRAMES = 12
PACKAGES, TENSORS = (
    f"{os.sep}site-packages{os.sep}",
    os.path.join("torch", "distributed", "tensor") + os.sep,
)
OURS = str(Path(__file__).parents[1]) + os.sep
DTENSORS = os.path.join(OURS, "parallel", "dtensors.py")  # within an operation of a sharded weight
LOG = os.path.join("lightning", "pytorch", "core", "module.py")
CLOSURE = os.path.join("lightning", "pytorch", "loops", "optimization", "automatic.py")
REPORTED = 64  # collectives of a rank, in the report about a hang


def answer_requests(folder: Path, *, place: Callable[[], str]) -> None:
    """Start a thread that answers requests in the folder of heartbeats.

    `place` says where the run is.
    """
    threading.Thread(target=_wait, args=(folder, place), daemon=True).start()


def _wait(folder: Path, place: Callable[[], str]) -> None:
    while not (folder / hang.REQUEST).exists():
        time.sleep(POLL_SECONDS)
    answer = folder / hang.ANSWER.format(rank=environment.rank())
    files.replace(answer, json.dumps(record(place=place())))


def record(*, place: str) -> dict[str, Any]:
    """Return this rank's place, the stack of its main thread, its collectives, and its use of a
    sharded weight.
    """
    main = threading.main_thread().ident
    assert main is not None
    frame = sys._current_frames().get(main)
    frames = list(reversed(traceback.extract_stack(frame))) if frame is not None else []
    shown = frames[:1] + own_frames(frames[1:])  # torch and Lightning say little here
    stack = [f"{each.filename}:{each.lineno} {each.name}" for each in shown[:FRAMES]]
    return {"place": place, "stack": stack, "collectives": collectives(), **reductions(frames)}


def reductions(frames: Sequence[FrameSummary]) -> dict[str, str | None]:
    """Return the lines of user code, if any, that wait for others: with a sharded weight, in
    `self.log`, in a step.
    """
    return {
        "sharded": sharded_use(frames),
        "logging": logging_call(frames),
        "stepping": own_step(frames),
    }


def own_step(frames: Sequence[FrameSummary]) -> str | None:
    """Return the line of the user's `optimizer_step` that makes the step, once the loss is
    computed, or None.

    Args:
        frames: a stack, innermost first.
    """
    within = [
        *takewhile(
            lambda each: not (each.name == "optimizer_step" and is_users(each.filename)), frames
        )
    ]
    if len(within) == len(frames) or any(each.filename.endswith(CLOSURE) for each in within):
        return None
    step = frames[len(within)]
    return f"{step.filename}:{step.lineno} {step.name}"


def logging_call(frames: Sequence[FrameSummary]) -> str | None:
    """Return the line of user code that logs a value which is reduced at once, or None.

    Args:
        frames: a stack, innermost first.
    """
    calls = [
        i
        for i, each in enumerate(frames)
        if each.filename.endswith(LOG) and each.name in ("log", "log_dict")
    ]
    caller = frames[calls[-1] + 1] if calls and calls[-1] + 1 < len(frames) else None
    return f"{caller.filename}:{caller.lineno} {caller.name}" if caller is not None else None


def sharded_use(frames: Sequence[FrameSummary]) -> str | None:
    """Return the line of user code that computes with a sharded weight, which gathers it from all
    ranks, or None.

    Args:
        frames: a stack, innermost first.
    """
    within = [
        *takewhile(lambda each: PACKAGES in each.filename or each.filename == DTENSORS, frames)
    ]
    caller = frames[len(within)] if len(within) < len(frames) else None
    if caller is None or caller.filename.startswith(OURS):
        return None  # what the library computes, all ranks compute
    uses = any(TENSORS in each.filename or each.filename == DTENSORS for each in within)
    return f"{caller.filename}:{caller.lineno} {caller.name}" if uses else None


def recorded() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder, oldest first."""
    recorder: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(recorder, name, None)) is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get(
                "entries", []
            )
    return entries


def collectives() -> list[dict[str, Any]]:
    """Return the newest collectives, oldest first: group, its description, number in it, name,
    sizes, done.
    """
    return [
        {
            # each backend of a group counts its calls on its own
            "group": " ".join(
                [entry["process_group"][0], entry["profiling_name"].partition(":")[0]]
            ),
            "description": entry["process_group"][1],
            "number": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            "name": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            "sizes": entry["input_sizes"],
            "done": entry["retired"] or entry["state"] == "completed",
            "pairwise": entry["is_p2p"],
        }
        for entry in _newest(recorded())
    ]


def _newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest of each backend, and all since its first that is not done."""
    found = []
    for backend in dict.fromkeys(each["profiling_name"].partition(":")[0] for each in entries):
        own = [each for each in entries if each["profiling_name"].partition(":")[0] == backend]
        pending = (
            i for i, each in enumerate(own) if not (each["retired"] or each["state"] == "completed")
        )
        found += own[min(next(pending, len(own)), max(0, len(own) - REPORTED)) :]
    return found
