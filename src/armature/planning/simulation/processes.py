"""Each simulation in a process of its own, since it replaces functions of torch. Torch-free.

A server imports torch once, and forks for each simulation (Python's `forkserver`).
"""

import dataclasses
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig

from armature import hardware
from armature.errors import ConfigError
from armature.planning.devices import Device
from armature.planning.simulation.report import Report, extrapolated
from armature.planning.simulation.settings import of_depth

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK", "TORCHELASTIC_", "SLURM_", "ARMATURE_")
KEPT = ("ARMATURE_CACHE",)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["armature.planning.simulation.job"])


class SimulationFailed(Exception):
    """The run itself raised an error in the simulation. The text is its traceback."""


@dataclass(frozen=True)
class Boundary:
    """What the first stage of a pipeline sends, which only a simulation of it knows."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rank of one configuration.

    Attributes:
        depths: numbers of layers (`model.layers`) to simulate instead, and to extrapolate linearly.
        record: return all communication too, and validate before the training step.
        boundary: of a pipeline's stages; None: simulate the first stage up to it.
    """

    cfg: DictConfig
    rank: int
    device: Device
    depths: tuple[int, int] | None = None
    record: bool = False
    boundary: Boundary | None = None


Result = Report | ConfigError | SimulationFailed


def simulate_all(requests: Sequence[Request]) -> list[Result]:
    """Simulate one optimizer step of many ranks and layouts, as many at once as there are cores.

    Return errors in the place of reports: ConfigError for the configuration's mistakes, as train.py
    reports them, SimulationFailed for what the model or the strategy raised.
    """
    _start_server()
    with ThreadPoolExecutor(hardware.cpu_count()) as pool:
        pending = [
            [
                pool.submit(_simulated, _of_depth(request, layers))
                for layers in request.depths or [None]
            ]
            for request in requests
        ]
        results = [[each.result() for each in parts] for parts in pending]
    return [_joined(*pair) for pair in zip(requests, results, strict=True)]


def _of_depth(request: Request, layers: int | None) -> Request:
    if layers is None:
        return request
    return dataclasses.replace(request, cfg=of_depth(request.cfg, layers))


def _joined(request: Request, found: list[Result]) -> Result:
    wrong = next((each for each in found if isinstance(each, Exception)), None)
    if wrong is not None or request.depths is None:
        return wrong or found[0]
    return extrapolated(found[0], found[1], depths=request.depths, depth=request.cfg.model.layers)  # pyright: ignore[reportArgumentType]


def _start_server() -> None:
    """Start the server, unless it runs, without what a launcher has set for this process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) or k in KEPT}
    kept |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, kept, clear=True):
        forkserver.ensure_running()


def _simulated(request: Request) -> Any:
    result = _in_process(request)
    if isinstance(result, Boundary):
        return _in_process(dataclasses.replace(request, boundary=result))
    return result


def _in_process(request: Request) -> Any:
    receiving, sending = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_answer, args=(request, sending), daemon=True)
    process.start()
    sending.close()  # so that the end of the process ends `recv`
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        return SimulationFailed(f"The simulation ended with status {process.exitcode}.")


def _answer(request: Request, sending: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    from armature.planning.simulation import job

    sending.send(job.answer(request))
    sending.close()
    os._exit(0)  # without the clean-up of a run that stopped in its middle


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
