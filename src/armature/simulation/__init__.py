"""One rank of a GPU run of any size, on a CPU: memory, communication, host synchronizations and
seconds.

    from armature import simulation
    report = simulation.simulate(cfg, rank=0, device=devices.named("h100_80gb"))

Importing this package is cheap and changes nothing. What replaces functions of torch does so in
processes of its own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armature.simulation.processes import Request, SimulationFailed, simulate, simulate_all
    from armature.simulation.report import Report, Volume, text

__all__ = ["Report", "Request", "SimulationFailed", "Volume", "simulate", "simulate_all", "text"]


# the modules of this package are imported by one another, so not at once
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from armature.simulation import processes, report

    return getattr(processes if hasattr(processes, name) else report, name)
