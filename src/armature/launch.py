"""From a checked configuration to running ranks.

one process                  the worker runs in this process, unless it is to be restarted
                             (launch.max_restarts)
several processes            `supervise`: torch's elastic agent (the engine of torchrun) starts
                             and watches them
under torchrun or srun       this process is one of the ranks and joins the others
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from armature import config, run_dir
from armature.checkpoint import resume
from armature.errors import ConfigError
from armature.finetune import check as pretrained
from armature.launcher import environment, lock, rank, run_state, slurm, supervise
from armature.layout import Layout
from armature.planning import auto
from armature.sweeps import trials
from armature.training.limits import Limits
from armature.validation import checks, memory, micro_batch, resize

log = logging.getLogger(__name__)


def launch(cfg: DictConfig, overrides: list[str]) -> float | None:
    """Train and return the monitored metric (what a sweep optimizes).

    RunFailed: a signal or an error ended the run.
    """
    joined = join(cfg)
    if (stop_at := slurm.stop_at(cfg.launch.stop_minutes_before_limit)) is not None:
        environment.set_deadline(stop_at)
    layout = Layout.of(cfg)
    _check_built(cfg, layout)
    if environment.rank() == 0:
        cfg.run.micro_batch_size = _micro_batch_size(cfg, layout)
        _warn_of_memory(cfg, layout)
    if joined:
        if cfg.launch.min_ranks is not None:
            log.warning(
                "launch.min_ranks=%s is not used: another launcher started these ranks.",
                cfg.launch.min_ranks,
            )
        if environment.is_under_agent():
            rank.end_with_parent()
    elif (finished := _finished_message(cfg)) is not None:
        print(finished, file=sys.stderr)
        return trials.metric(Path(cfg.run.dir), cfg.checkpoint.monitor)
    else:
        _check_fewer(cfg)
    if joined and layout.world_size > 1:
        from armature import worker

        cfg = worker.join(cfg, overrides)  # rank 0 decides the run directory for all
    else:
        _run(
            cfg, overrides, alone=layout.world_size == 1 and (joined or not cfg.launch.max_restarts)
        )
    summary = run_state.read_summary(Path(cfg.run.dir))
    # the other ranks may look before rank 0 has written its summary
    if environment.rank() == 0 and summary.get("stop_reason") in supervise.EXIT_CODES:
        raise supervise.stopped(cfg, summary["stop_reason"], step=summary["global_step"])
    return trials.metric(Path(cfg.run.dir), cfg.checkpoint.monitor)


def join(cfg: DictConfig) -> bool:
    """Join the ranks that torchrun or srun has started, and return whether there are any.

    ConfigError: they are not those that the configuration asks for, or could not meet: they would
    wait for ever.
    """
    environment.forget_lone_rank()
    slurm.join(cfg)
    devices, nodes, started = cfg.trainer.devices, cfg.trainer.num_nodes, environment.world_size()
    asked = f"trainer.devices={devices} × trainer.num_nodes={nodes}"
    left_over = (
        "If no launcher started this command, type unset RANK WORLD_SIZE LOCAL_RANK "
        "LOCAL_WORLD_SIZE."
    )
    problems = []
    if not (joined := environment.is_joined()):
        if nodes > 1 and not cfg.launch.rdzv_endpoint:
            problems.append(
                f"trainer.num_nodes={nodes}, but this command starts ranks on one machine. "
                "Start it with torchrun (scripts/multinode/) or under Slurm (scripts/slurm/), "
                "or type launch.rdzv_endpoint=HOST:PORT on each machine."
            )
        elif not cfg.launch.rdzv_endpoint and environment.is_under_mpirun():
            problems.append(
                "mpirun started several processes, each of which would be a run of its own. Leave "
                "out mpirun: this command starts its ranks itself; or take srun or torchrun."
            )
    elif environment.rank() >= started:
        problems.append(
            f"RANK={environment.rank()}: must be less than WORLD_SIZE={started}. {left_over}"
        )
    elif started != devices * nodes:
        local = max(1, environment.local_world_size())
        problems.append(
            f"{asked} asks for {devices * nodes} processes, but the launcher started {started}. "
            f"Type trainer.devices={local} trainer.num_nodes={started // local or 1}. {left_over}"
        )
    if problems:
        raise ConfigError(problems)
    return joined


def _run(cfg: DictConfig, overrides: list[str], *, alone: bool) -> None:
    """Train in this process if it is to be alone, else in ranks of its own."""
    several = cfg.trainer.num_nodes > 1  # then rank 0 holds the lock, on whichever machine it is
    if several:
        lock.check(cfg)
    with nullcontext() if several else lock.hold(cfg):
        sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
        begun = (Path(cfg.run.dir) / "config.yaml").is_file()
        if sweep and begun:  # a sweep of this name has begun this trial, whose values it compares
            _require_same_settings(cfg, "holds a trial that was begun")
        if not begun and trials.begun(Path(cfg.run.dir)):
            raise ConfigError(
                f"{cfg.run.dir} holds a sweep, not a run. Type another run.name, or -m before the "
                "values to try."
            )
        run_dir.write(cfg, overrides)
        if alone:
            from armature import worker

            worker.run(run_dir.read(Path(cfg.run.dir)))
        else:
            supervise.run(cfg)


def _check_built(cfg: DictConfig, layout: Layout) -> None:
    """Check plan, adapters and folder against the model itself.

    Building it on the meta device takes torch, but no process.
    """
    if pretrained.named_by(cfg) is not None:
        from armature.finetune import built

        if found := built.problems(cfg):
            raise ConfigError(found)
    plan = layout.plan if layout.kind == "mesh" and layout.world_size > 1 else None
    adapter: Any = pretrained.adapter_of(cfg)
    if plan is None and (adapter is None or not cfg.model.get("_partial_")):
        return
    from armature.finetune.lora import Lora
    from armature.parallel import plan_check
    from armature.validation.composing import instantiate

    make, adapter = instantiate(cfg.model), instantiate(adapter)
    found = plan_check.problems(make, plan, layout.axes) if plan is not None else []
    if isinstance(adapter, Lora) and not found:
        found = plan_check.adapter_problems(make, adapter, layout)
    if found:
        raise ConfigError(found)


def _micro_batch_size(cfg: DictConfig, layout: Layout) -> int | None:
    """Return what data.micro_batch_size=auto is, and say so; None: a rank's whole share."""
    if not micro_batch.is_auto(cfg):
        return None
    if (size := micro_batch.recorded(cfg)) is not None:
        log.info(
            "data.micro_batch_size=auto: %s samples, as this run's earlier starts found.", size
        )
        return size
    found = auto.micro_batch_size(cfg, layout, memory_bytes=auto.device_memory_bytes(cfg))
    if found is None or checks.layout_problems(micro_batch.with_size(cfg, found[0])):
        return None
    log.info(found[1])
    return found[0]


def _warn_of_memory(cfg: DictConfig, layout: Layout) -> None:
    found = auto.warning(
        micro_batch.decided(cfg), layout, memory_bytes=auto.device_memory_bytes(cfg)
    )
    if found is not None:
        line, peak = found
        kinds = {
            name: peak.bytes_by_kind.get(name, 0.0)
            for name in ("parameters", "gradients", "optimizer state")
        }
        kinds["activations and other"] = peak.total_bytes - sum(kinds.values())
        log.warning("%s%s", line, memory.remedy(cfg, kinds=kinds))


def _check_fewer(cfg: DictConfig) -> None:
    devices, least = cfg.trainer.devices, cfg.launch.min_ranks
    if least is not None and least < devices:
        found = resize.fewer(cfg, most=devices - 1, least=least)
        if isinstance(found, str):
            message = (
                f"launch.min_ranks={least}: the run cannot continue on fewer than {devices} "
                f"ranks: {found}."
            )
            raise ConfigError(message)


def _finished_message(cfg: DictConfig) -> str | None:
    summary = run_state.read_summary(Path(cfg.run.dir))
    if summary.get("stop_reason") != "finished" or cfg.resume == "never":
        return None
    resume.require_used(cfg, Path(cfg.run.dir))
    samples, batch = summary["samples_per_epoch"], summary["global_batch_size"]
    limits = Limits.of(cfg, samples_per_epoch=samples, global_batch_size=batch)
    steps, planned = summary["global_step"], summary["planned_steps"]
    if limits.global_batches > planned:  # the limits were raised
        return None
    limit = "max_epochs" if cfg.trainer.max_steps is None else "max_steps"
    remedy, of = f"raise trainer.{limit}", ""
    if steps < planned:
        if _other_settings(cfg, ["callbacks"]):
            return None
        remedy, of = "change the callback that ended it, or leave it out", f" of {planned}"
    _require_same_settings(cfg, "is finished, and was trained")
    return (
        f"{cfg.run.dir} is finished ({steps}{of} steps). To train it further, {remedy}; to start "
        "from step 0, type another run.name."
    )


def _require_same_settings(cfg: DictConfig, state: str) -> None:
    """Raise ConfigError if settings that decide the result differ from those of the run in the
    directory.
    """
    found = _other_settings(cfg, resume.RESULT_GROUPS)
    if other := [f"{key}={there} there, {here} here" for key, (here, there) in found.items()]:
        more = f"; and {len(other) - 3} more" if len(other) > 3 else ""
        raise ConfigError(
            f"{cfg.run.dir} {state} with other settings: {'; '.join(other[:3])}{more}. Type "
            "another run.name."
        )


def _other_settings(cfg: DictConfig, groups: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Return what differs from the run in the directory: by key, here and there."""
    recorded = run_dir.read(Path(cfg.run.dir))
    return resume.differences(config.without_secrets(cfg), config.without_secrets(recorded), groups)
