"""One rank of a GPU run of any size, on a CPU: memory, communication, host synchronizations and
seconds.

Importing this package is cheap and changes nothing. What replaces functions of torch does so in
processes of its own.
"""

from armature.planning.simulation.processes import Request, SimulationFailed, simulate_all
from armature.planning.simulation.report import Report, Volume, text

__all__ = ["Report", "Request", "SimulationFailed", "Volume", "simulate_all", "text"]
