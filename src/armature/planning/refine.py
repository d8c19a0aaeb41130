"""The best layouts of a ranking, simulated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from omegaconf import DictConfig

from armature.errors import ConfigError, error_line
from armature.planning import layouts, ranking
from armature.planning.devices import Device
from armature.planning.ranking import Candidate

log = logging.getLogger(__name__)
MOST = 3  # layouts that are simulated
# layers of the two models that are simulated for one with many; the rest lies on a straight line
DEPTHS = (3, 5)


def simulated(cfg: DictConfig, device: Device, runs: Sequence[Candidate]) -> list[Candidate]:
    """Return the ranking with the first layouts' memory and throughput as simulated; as it was if
    that fails.
    """
    chosen = [each for each in runs if each.setup.kind != "deepspeed"][:MOST]
    if device.accelerator == "cpu" or not chosen:
        return list(runs)
    from armature.planning import simulation

    requests = []
    for each in chosen:
        changed = layouts.applied(cfg, each.choice, devices=each.devices, num_nodes=each.num_nodes)
        changed.data.micro_batch_size, changed.data.global_batch_size = (
            each.setup.micro,
            each.setup.global_batch_size,
        )
        changed.strategy.activation_checkpointing = each.setup.recompute
        if each.setup.axes["pipe"] > 1:
            changed.strategy.microbatches = each.setup.microbatches
        deep = each.setup.cost.blocks > 2 * DEPTHS[1] and each.setup.axes["pipe"] == 1
        rank = 0 if each.setup.axes["pipe"] == 1 else each.world_size - 1
        depths = DEPTHS if deep else None
        requests.append(simulation.Request(cfg=changed, rank=rank, device=device, depths=depths))
    try:
        results = simulation.simulate_all(requests)
    except (ConfigError, simulation.SimulationFailed, OSError) as error:
        # no compiler, a CUDA build of torch, …
        log.warning(
            "The best layouts are not simulated, and the formulas stand: %s", error_line(error)
        )
        return list(runs)
    found = {id(each): result for each, result in zip(chosen, results, strict=True)}
    for each in chosen:
        if isinstance(result := found[id(each)], Exception):
            log.warning(
                "%s was not simulated: %s",
                each.choice.name,
                error_line(result),
            )
    return ranking.sort(_with(each, found.get(id(each))) for each in runs)


def _with(each: Candidate, result: object) -> Candidate:
    if result is None or isinstance(result, Exception):
        return each
    return replace(each, peak_bytes=result.needed, units_per_second=result.rate, simulated=True)  # pyright: ignore[reportAttributeAccessIssue]
