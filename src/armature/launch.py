"""From a checked configuration to running ranks: in this process, through torch's elastic agent, or as a rank already.

one process                  the worker runs here
several processes            torch's elastic agent (the engine of torchrun) starts and watches them
under torchrun or srun       this process is one of the ranks and joins the others
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from armature import hardware, run_dir, slurm
from armature.errors import ConfigError, RunFailed
from armature.parallel import checks as parallel_checks
from armature.validation.checks import beside, plain, world_size

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}


def launch(cfg: DictConfig, overrides: list[str]) -> float | None:
    """Trains and returns the monitored metric (what a sweep optimises).

    Raises:
        RunFailed: when the run was stopped by a signal or by an error in a rank.
    """
    slurm.join(cfg)
    _check_built(cfg)
    if joined := "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _check_world(cfg)
    elif cfg.trainer.num_nodes > 1 and not cfg.launch.rdzv_endpoint:
        raise ConfigError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}, but this command starts ranks on one machine. "
            "Start it with torchrun (scripts/multinode/) or under Slurm (scripts/slurm/), "
            "or type launch.rdzv_endpoint=HOST:PORT on each machine."
        )
    elif (finished := _finished(cfg)) is not None:
        print(finished, file=sys.stderr)
        return _metric(cfg)
    if joined and world_size(cfg) > 1:
        from armature import worker

        cfg = worker.join(cfg, overrides)  # rank 0 decides the run directory for all
    else:
        run_dir.write(cfg, overrides)
        if world_size(cfg) == 1:
            from armature import worker

            worker.run(run_dir.read(Path(cfg.run.dir)))
        else:
            _start_ranks(cfg)
    if int(os.environ.get("RANK", "0")) == 0:  # the others may look before this one has written
        _raise_if_stopped(cfg)
    return _metric(cfg)


def _check_built(cfg: DictConfig) -> None:
    """What only the model itself can tell of its plan. Building it without memory takes torch, but no process."""
    plan = beside(cfg.model._target_, "plan")
    sizes = parallel_checks.axes(plain(cfg.strategy), world_size=world_size(cfg))
    if plan is None or sizes is None or world_size(cfg) == 1:
        return
    from hydra.utils import instantiate

    from armature.parallel import built

    if found := built.problems(instantiate(cfg.model), plan.PLAN, sizes):
        raise ConfigError(found)


def _check_world(cfg: DictConfig) -> None:
    """The launcher outside must have started what the configuration asks for, or ranks would wait for each other."""
    started, asked = int(os.environ["WORLD_SIZE"]), cfg.trainer.devices * cfg.trainer.num_nodes
    if started != asked:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", started))
        raise ConfigError(
            f"trainer.devices={cfg.trainer.devices} × trainer.num_nodes={cfg.trainer.num_nodes} asks for {asked} "
            f"processes, but the launcher started {started}. "
            f"Type trainer.devices={local} trainer.num_nodes={started // local}."
        )


def _finished(cfg: DictConfig) -> str | None:
    """What to say of a run that had come to its end already; None for one that has steps left."""
    summary = run_dir.read_summary(Path(cfg.run.dir))
    if summary is None or summary["stop_reason"] != "finished" or cfg.resume == "never":
        return None
    if cfg.trainer.max_steps is not None and cfg.trainer.max_steps > summary["global_step"]:
        return None
    return (
        f"{cfg.run.dir} is finished ({summary['global_step']} steps). To train it further, raise trainer.max_steps; "
        "to start anew, type another run.name."
    )


def _start_ranks(cfg: DictConfig) -> None:
    import logging

    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    devices, nodes = cfg.trainer.devices, cfg.trainer.num_nodes
    # a restarted rank must not read the addresses that the failed attempt left in the agent's own store
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, hardware.cpu_count() // devices)))
    source = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(cfg.launch.grace_seconds)
    with tempfile.TemporaryDirectory(prefix="armature-") as folder:
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=devices,
            run_id=Path(cfg.run.dir).name,
            rdzv_backend="c10d",
            rdzv_endpoint=cfg.launch.rdzv_endpoint or "localhost:0",
            max_restarts=cfg.launch.max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            local_addr=None if cfg.launch.rdzv_endpoint else "localhost",
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "armature.worker", cfg.run.dir)
        except ChildFailedError as error:
            raise RunFailed(_first_failure(error, Path(cfg.run.dir))) from None
        except SignalException as error:
            name = error.sigval.name
            raise RunFailed(f"Stopped by {name}. {_how_to_go_on(cfg)}", EXIT_CODES.get(name, 1)) from None


def _first_failure(error: Exception, folder: Path) -> str:
    failures: dict[int, Any] = error.failures  # pyright: ignore[reportAttributeAccessIssue]
    rank, failure = min(failures.items(), key=lambda item: _failed_at(item[1]))
    data = failure.error_file_data.get("message", {}) if isinstance(failure.error_file_data, dict) else {}
    text = data.get("extraInfo", {}).get("py_callstack") if isinstance(data, dict) else None
    file = folder / "logs" / f"rank_{rank:04d}.log"
    head = f"Rank {rank} failed first (exit code {failure.exitcode}); its log is {file}."
    return f"{text or failure.message}\n{head}"


def _failed_at(failure: Any) -> float:
    """The time of a failure, in seconds. The agent knows whole ones only, in which several ranks may fail."""
    file = Path(failure.error_file)
    return file.stat().st_mtime if file.is_file() else float(failure.timestamp)


def _raise_if_stopped(cfg: DictConfig) -> None:
    summary = run_dir.read_summary(Path(cfg.run.dir))
    if summary is not None and summary["stop_reason"] in EXIT_CODES:
        name = summary["stop_reason"]
        raise RunFailed(
            f"Stopped by {name} after step {summary['global_step']}. {_how_to_go_on(cfg)}", EXIT_CODES[name]
        )


def _how_to_go_on(cfg: DictConfig) -> str:
    return f"The same command with run.name={cfg.run.name} goes on from the last checkpoint."


def _metric(cfg: DictConfig) -> float | None:
    summary = run_dir.read_summary(Path(cfg.run.dir))
    return summary["metrics"].get(cfg.checkpoint.monitor) if summary is not None else None
