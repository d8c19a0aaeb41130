"""Seconds of operators and collectives on a device, from its published rates.

An operator takes the longer of its arithmetic and its memory traffic. A collective takes the time
of a ring over its slowest link. docs/predicting.md compares the result with published runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from armature.planning.devices import MATRIX_SHARE, MEMORY_SHARE, Device


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The seconds of one rank.

    `tf32`: products of fp32 matrices may round their inputs (trainer.matmul_precision).
    """

    device: Device
    rank: int = 0
    tf32: bool = True

    def operator(self, flops: float, size: float, kind: str) -> float:
        """Return the seconds of an operator that does `flops` in a type and moves `size` bytes."""
        rate = self.peak(kind) * MATRIX_SHARE
        return max(flops / rate, size / (self.device.memory_bytes_per_second * MEMORY_SHARE))

    def peak(self, kind: str) -> float:
        """Return the FLOP/s of matrix products in a type, as torch names it; one that the device
        lacks runs in the next larger one.
        """
        if kind == "float64":
            return self.device.peak(kind)
        wanted = ["float8"] if kind.startswith("float8") else []
        wanted += ["bfloat16" if kind == "bfloat16" else "float16"] if kind != "float32" else []
        wanted += ["tf32"] if self.tf32 else []
        return self.device.peak(*wanted)

    def collective(self, kind: str, size: float, members: Sequence[int]) -> float:
        """Return the seconds of a collective of `size` bytes (of the gathered or reduced tensor)
        among ranks.
        """
        rate = self._rate(members)
        if kind == "send":
            return size / rate
        share = (len(members) - 1) / len(members) * (2 if kind == "all_reduce" else 1)
        return share * size / rate

    def _rate(self, members: Sequence[int]) -> float:
        """Return bytes per second of one rank: its link, or its machine's network divided among its
        members there.
        """
        machine = self.device.devices_per_machine
        here = sum(member // machine == self.rank // machine for member in members)
        return self.device.link_rate(ranks=len(members), here=max(1, here))
