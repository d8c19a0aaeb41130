"""The device that a plan is for: a file of configs/hardware/, or what this machine has."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field

from armature import hardware
from armature.config import Count, Positive
from armature.errors import ConfigError, error_line
from armature.project import CONFIGS, options
from armature.validation.values import answer_to


def _with_fp32(rates: dict[str, float]) -> dict[str, float]:
    assert "float32" in rates
    return rates


FOLDER = CONFIGS / "hardware"  # of the project; the shipped files are known as well
GIB = 2**30
THIS = "this"  # the name of the machine that asks
FP32_FLOPS_PER_CYCLE = 32  # of one CPU core: two fused multiply-adds of eight numbers
CPU_BYTES_PER_SECOND = 20e9  # of one core; no file of the system has the rate of its memory
TYPES = ("float8", "bfloat16", "float16", "tf32", "float32", "float64")
SHEET = {  # the keys of a file
    "accelerator": Literal["gpu", "cpu"],
    "memory_gib": Positive,
    "memory_gb_per_second": Positive,
    "link_gb_per_second": Positive,
    "network_gb_per_second": Positive,
    "devices_per_machine": Count,
    "peak_tflops": Annotated[
        dict[Literal[TYPES], Positive],  # pyright: ignore[reportInvalidTypeForm]
        AfterValidator(_with_fp32),
        Field(description=f"a number above 0 for each type of {', '.join(TYPES)}; float32 always"),
    ],
}
OF_A_GPU = {
    "capability": Annotated[
        list[int], Field(min_length=2, max_length=2, description="two whole numbers")
    ]
}
# shares of the published rates that real kernels reach, chosen before any comparison with measured
# runs
MATRIX_SHARE = 0.7  # of the peak of dense matrix products
MEMORY_SHARE = 0.8  # of the memory's rate
LINK_SHARE, NETWORK_SHARE = 0.8, 0.9  # of the links within a machine, and between machines


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device and its links. Rates are per device and, for links, in one direction.

    Attributes:
        peak_flops: FLOP/s of dense matrix products by type (float8, bfloat16, float16, tf32,
            float32, float64).
        capability: CUDA's compute capability; None: not a GPU.
        link_bytes_per_second: to the other devices of its machine; `network_…`: to other machines.
    """

    name: str
    accelerator: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    devices_per_machine: int
    capability: tuple[int, int] | None = None

    @property
    def precision(self) -> str:
        """What trainer.precision=auto becomes on it."""
        return "bf16-mixed" if "bfloat16" in self.peak_flops else "32-true"

    @property
    def slow_in_fp32(self) -> str | None:
        """Return what is faster than `precision`, with what to type, if that is fp32 for want of
        bfloat16.
        """
        fast, slow = self.peak_flops.get("float16", 0.0), self.peak_flops["float32"]
        if self.precision != "32-true" or fast <= slow:
            return None
        return (
            f"hardware={self.name} has no bfloat16, so this is a plan for fp32 "
            "(trainer.precision=auto). Type "
            f"trainer.precision=16-mixed for products that are {fast / slow:.0f} × as fast, with a "
            "loss scaler."
        )

    def too_many(self, devices: int) -> str | None:
        """Return what is wrong with so many devices in one machine, or None."""
        most = self.devices_per_machine
        if devices <= most or self.accelerator != "gpu":
            return None
        return (
            f"trainer.devices={devices}: a machine of hardware={self.name} has {most}. Type "
            f"trainer.devices={most} "
            f"trainer.num_nodes={-(-devices // most)}."
        )

    def peak(self, *types: str) -> float:
        """Return the FLOP/s of matrix products in the first of these types that the device has,
        else in fp32.
        """
        return next(
            (self.peak_flops[name] for name in types if name in self.peak_flops),
            self.peak_flops["float32"],
        )

    def link_rate(self, *, ranks: int, here: int) -> float:
        """Return bytes per second of one of `ranks`, `here` of them on its machine, whose network
        these share.
        """
        link, network = (
            self.link_bytes_per_second * LINK_SHARE,
            self.network_bytes_per_second * NETWORK_SHARE,
        )
        return link if here == ranks else min(link, here * network)

    def shared_by(self, processes: int) -> "Device":
        """Return one process's part of a CPU machine on which `processes` run; a GPU is never
        shared.
        """
        if self.accelerator != "cpu" or processes <= self.devices_per_machine:
            return self
        part = self.devices_per_machine / processes
        return replace(
            self,
            memory_bytes=int(self.memory_bytes * part),
            peak_flops={kind: rate * part for kind, rate in self.peak_flops.items()},
            memory_bytes_per_second=self.memory_bytes_per_second * part,
            devices_per_machine=processes,
        )


def names() -> list[str]:
    """Return what may be typed as hardware=…"""
    return [*options("hardware"), THIS]


def take_name(typed: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the last hardware=NAME of a command line, None if it has none, and the other words."""
    chosen = [each for each in typed if each.lstrip("+").startswith("hardware=")]
    others = [each for each in typed if each not in chosen]
    return (chosen[-1].partition("=")[2] if chosen else None), others


def named(name: str) -> Device:
    """Return a device by the name of its file, or `this`.

    Raises ConfigError for an unknown name, with the known.
    """
    if name == THIS:
        return this()
    if name not in names():
        begin = [known for known in names() if known.startswith(name)]
        near = begin or difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"Did you mean hardware={near[0]}? " if near else ""
        raise ConfigError(
            f"hardware={name}: there is no such file in {FOLDER}. {hint}Known: "
            f"{', '.join(names())}."
        )
    return _read(options("hardware")[name])


def _read(file: Path) -> Device:
    values = _load(file)
    gpu = values.get("accelerator") != "cpu"
    found = {
        key: answer
        for key, kind in {**SHEET, **(OF_A_GPU if gpu else {})}.items()
        if (answer := answer_to(key, kind, values.get(key, "missing"))) is not None
    }
    if found:
        raise ConfigError(
            [f"{file}: {key}={values.get(key, 'missing')}: {found[key]}" for key in found]
        )
    return Device(
        name=file.stem,
        accelerator=values["accelerator"],
        memory_bytes=int(values["memory_gib"] * GIB),
        peak_flops={kind: rate * 1e12 for kind, rate in values["peak_tflops"].items()},
        memory_bytes_per_second=values["memory_gb_per_second"] * 1e9,
        link_bytes_per_second=values["link_gb_per_second"] * 1e9,
        network_bytes_per_second=values["network_gb_per_second"] * 1e9,
        devices_per_machine=values["devices_per_machine"],
        capability=tuple(values["capability"]) if gpu else None,
    )


def _load(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"hardware={file.stem}: {file} cannot be read ({error_line(error)}). Correct it."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"hardware={file.stem}: {file} holds no keys. Copy another file of {file.parent}."
        )
    return values


def this() -> Device:
    """Return this machine's devices, the first GPU for all.

    ConfigError: a GPU that no file describes.
    """
    count = hardware.gpu_count()
    return _this_gpu(count) if count else _this_cpu()


def _this_gpu(count: int) -> Device:
    name, memory = hardware.gpu_name() or "a GPU without a name", hardware.gpu_memory_bytes()
    files = options("hardware").values()
    found = [_read(file) for file in files if _describes(file, name)]
    if not found:
        raise ConfigError(
            f"hardware=this: no file in {FOLDER} describes {name}. Copy one, correct its numbers "
            "and names, "
            f"and type hardware=NAME. There are: {', '.join(names()[:-1])}."
        )
    nearest = min(
        found, key=lambda device: abs(device.memory_bytes - (memory or device.memory_bytes))
    )
    return replace(nearest, memory_bytes=memory or nearest.memory_bytes, devices_per_machine=count)


def _describes(file: Path, device_name: str) -> bool:
    values = _load(file)

    def has(key: str) -> bool:
        words = values.get(key) or []
        words = words if isinstance(words, list) else [words]
        return any(re.search(rf"\b{re.escape(str(each))}\b", device_name) for each in words)

    return has("names") and not has("except")


def _this_cpu() -> Device:
    # the clock of the first CPU, where the system reports it
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", hardware.cpuinfo(), re.MULTILINE)
    cycles_per_second = float(found[1]) * 1e6 if found else 2.5e9
    cores = hardware.cpu_count()
    fp32 = cores * cycles_per_second * FP32_FLOPS_PER_CYCLE
    peaks = {
        "float32": fp32,
        "float64": fp32 / 2,
        **({"bfloat16": 2 * fp32} if hardware.bf16_is_fast("cpu") else {}),
    }
    rate = cores * CPU_BYTES_PER_SECOND
    return Device(
        name=THIS,
        accelerator="cpu",
        memory_bytes=hardware.ram_bytes(),
        peak_flops=peaks,
        memory_bytes_per_second=rate,
        link_bytes_per_second=rate / 2,
        network_bytes_per_second=1.25e9,
        devices_per_machine=1,
    )
