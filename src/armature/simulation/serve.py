"""The warm process of the simulator: reads jobs, one JSON line each up to an empty line, and forks
for each of them.
"""

from armature.launcher import rank
from armature.simulation import fake_cuda

if __name__ == "__main__":
    rank.end_with_parent(any_thread=True)
    fake_cuda.install()  # before the first import of torch

import gc
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any


def main() -> None:
    # on import it warns that triton is missing
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    # one watches the parent
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    from armature.simulation import job  # noqa: F401  # the import that every simulation would pay for

    gc.freeze()
    at_once, replies = int(sys.argv[1]), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints is no reply
    while batch := _batch():
        running: dict[int, tuple[int, Path]] = {}
        while batch or running:
            while batch and len(running) < at_once:
                each = batch.pop(0)
                with tempfile.NamedTemporaryFile(
                    prefix="armature-simulation-", delete=False
                ) as file:
                    reply = Path(file.name)
                if (child := os.fork()) == 0:
                    _simulate(each, reply)
                running[child] = each["number"], reply
            child, status = os.wait()
            number, reply = running.pop(child)
            text = reply.read_text() or json.dumps(
                {"failure": f"The simulation ended with status {status}."}
            )
            reply.unlink()
            replies.write(json.dumps({**json.loads(text), "number": number}) + "\n")
            replies.flush()


def _batch() -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    for line in sys.stdin:
        if not line.strip():
            return jobs
        jobs.append(json.loads(line))
    return jobs


def _simulate(each: dict[str, Any], reply: Path) -> None:
    """Write the reply and end this process, without the clean-up of a run that stopped in its
    middle.
    """
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        reply.write_text(json.dumps(_answer(each)))
    except BaseException:
        reply.write_text(json.dumps({"failure": traceback.format_exc()}))
    finally:
        os._exit(0)


def _answer(each: dict[str, Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    from armature.errors import ConfigError
    from armature.planner.devices import Device
    from armature.simulation import job, operators

    gc.enable()
    cfg, device = OmegaConf.create(each["cfg"]), Device(**each["device"])
    if device.capability is not None:
        device = replace(device, capability=tuple(device.capability))  # JSON has lists alone
    try:
        if each["record"]:
            return job.record(cfg, rank=each["rank"], device=device)  # pyright: ignore[reportArgumentType]
        report = job.run(cfg, rank=each["rank"], device=device, expert_load=each["expert_load"])  # pyright: ignore[reportArgumentType]
        return {"report": report.to_dict()}
    except ConfigError as error:
        return {"problems": error.problems}
    except Exception as error:
        if (explained := operators.explained(error)) is None:
            raise
        return {"problems": explained.problems}


if __name__ == "__main__":
    main()
