"""Simulations in processes of their own, since they replace functions of torch. Torch-free.

One warm process (serve.py) imports torch once, and forks for each simulation.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature import hardware
from armature.errors import ConfigError
from armature.finetune import check as pretrained
from armature.planner.devices import Device
from armature.simulation import fake_cuda, settings
from armature.simulation.report import Report, extrapolated

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_",
    "SLURM_",
    "ARMATURE_",
)
KEPT = ("ARMATURE_CACHE",)


class SimulationFailed(Exception):
    """The run itself raised an error in the simulation. The text is its traceback."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rank of one configuration.

    `depths`: extrapolate from two numbers of layers, instead of simulating all.

    `expert_load`: tokens of this rank's experts, over the mean of all ranks.
    """

    cfg: DictConfig
    rank: int
    device: Device
    depths: tuple[int, int] | None = None
    expert_load: float = 1.0
    record: bool = False  # return all communication too, and validate before the training step


@dataclass(frozen=True)
class Recorded:
    """What one rank issues to others in a validation and an optimizer step, as JSON
    (`order.issued_from`).
    """

    report: Report
    record: list[dict[str, Any]]
    # host synchronizations of the validation's batches, by line of code
    validation_syncs: dict[str, int]


def simulate(
    cfg: DictConfig, *, rank: int = 0, device: Device, depths: tuple[int, int] | None = None
) -> Report:
    """Simulate one optimizer step of one rank of a composed configuration on `device`, whatever
    this machine has.

    Args:
        depths: simulate models of these numbers of layers (`model.layers`) instead, and extrapolate
            linearly.

    Raises:
        ConfigError: the configuration's mistakes, as train.py reports them; no compiler for the
            fake device.
        SimulationFailed: the model or the strategy raised.
    """
    (result,) = simulate_all([Request(cfg=cfg, rank=rank, device=device, depths=depths)])
    if isinstance(result, Exception):
        raise result
    return result


def simulate_all(requests: Sequence[Request]) -> list[Report | ConfigError | SimulationFailed]:
    """Simulate many ranks and layouts, as many at once as there are cores.

    Errors are returned in the place of reports.

    Raises:
        ConfigError: no compiler for the fake device.
    """
    jobs: list[dict[str, Any]] = []
    several = {id(request.cfg): request.cfg for request in requests if request.depths}
    filled = {key: pretrained.fill(cfg) for key, cfg in several.items()}
    for request in requests:
        cfg = filled[id(request.cfg)] if request.depths else request.cfg
        jobs += [_job(request, cfg, layers) for layers in request.depths or (None,)]
    replies = iter(_server().run(jobs))
    results: list[Report | ConfigError | SimulationFailed] = []
    for request in requests:
        found = [next(replies) for _ in request.depths or (None,)]
        wrong = next((each for each in found if isinstance(each, Exception)), None)
        if wrong is not None:
            results.append(wrong)
        elif request.depths is None:
            results.append(found[0])  # pyright: ignore[reportArgumentType]
        else:
            small, large = found
            depth = filled[id(request.cfg)].model.layers
            results.append(extrapolated(small, large, depths=request.depths, depth=depth))  # pyright: ignore[reportArgumentType]
    return results


def _job(request: Request, cfg: DictConfig, layers: int | None) -> dict[str, Any]:
    cfg = cfg if layers is None else settings.of_depth(cfg, layers)
    device = {**dataclasses.asdict(request.device), "peak_flops": dict(request.device.peak_flops)}
    return {
        "cfg": OmegaConf.to_container(cfg, resolve=False), "rank": request.rank, "device": device,
        "expert_load": request.expert_load, "record": request.record,
    }  # fmt: skip


class _Server:
    """The warm process. It ends when this process does."""

    def __init__(self) -> None:
        fake_cuda.compiled()  # its errors are reported here
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) or k in KEPT
        }
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "armature.simulation.serve", str(hardware.cpu_count())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        atexit.register(self.close)

    def run(self, jobs: Sequence[dict[str, Any]]) -> list[Report | ConfigError | SimulationFailed]:
        try:
            return self._run(jobs)
        except BaseException:
            # what it still answers to these jobs must not be taken for answers to others
            _server.cache_clear()
            self.process.kill()
            raise

    def _run(self, jobs: Sequence[dict[str, Any]]) -> list[Report | ConfigError | SimulationFailed]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for number, job in enumerate(jobs):
            self.process.stdin.write(json.dumps({**job, "number": number}) + "\n")
        self.process.stdin.write("\n")  # the end of these jobs
        self.process.stdin.flush()
        replies: dict[int, Report | ConfigError | SimulationFailed] = {}
        while len(replies) < len(jobs):
            if not (line := self.process.stdout.readline()):
                raise SimulationFailed(
                    "The process of the simulator has ended. Its messages are above."
                )
            reply = json.loads(line)
            replies[reply["number"]] = _result(reply)
        return [replies[number] for number in range(len(jobs))]

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended before it read all
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def _result(reply: dict[str, Any]) -> Any:
    if "record" in reply:
        return Recorded(
            Report.from_dict(reply["report"]), reply["record"], reply["validation_syncs"]
        )
    if "report" in reply:
        return Report.from_dict(reply["report"])
    return (
        ConfigError(reply["problems"])
        if "problems" in reply
        else SimulationFailed(reply["failure"])
    )


@cache
def _server() -> _Server:
    return _Server()
