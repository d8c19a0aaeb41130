"""The device that a plan is for: a file of configs/hardware/, or what this machine has."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from armature import hardware
from armature.errors import ConfigError, error_line
from armature.project import CONFIGS, options

FOLDER = CONFIGS / "hardware"  # of the project; the shipped files are known as well
GIB = 2**30
THIS = "this"  # the name of the machine that asks
FP32_FLOPS_PER_CYCLE = 32  # of one CPU core: two fused multiply-adds of eight numbers
CPU_BYTES_PER_SECOND = 20e9  # of one core; no file of the system has the rate of its memory
# of a file
NUMBERS = ("memory_gib", "memory_gb_per_second", "link_gb_per_second", "network_gb_per_second")
TYPES = ("float8", "bfloat16", "float16", "tf32", "float32", "float64")
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
        capability: CUDA's compute capability; None: not a GPU. `processors`: its streaming
            multiprocessors.
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
    processors: int = 0

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

        ConfigError: float64 of a device whose file does not name it.
        """
        if "float64" in types and "float64" not in self.peak_flops:
            raise ConfigError(
                f"trainer.precision=64-true: hardware={self.name} has no float64 in peak_tflops. "
                "Add it to "
                f"{FOLDER / self.name}.yaml, or type trainer.precision=32-true."
            )
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

    def shared_by(self, processes: int) -> Device:
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
    """Return the last hardware=NAME of a command line, None if it has none, and the other words.

    Raises ConfigError for a word that is nearly this one, such as +hardware=NAME.
    """
    chosen = [each.removeprefix("hardware=") for each in typed if each.startswith("hardware=")]
    others = [each for each in typed if not each.startswith("hardware=")]
    for each in others:
        key, _, value = each.lstrip("+~").partition("=")
        if difflib.get_close_matches(key.partition(".")[0], ["hardware"], cutoff=0.8):
            remedy = (
                f"Type hardware={value if value in names() else '…'}, with one of "
                f"{', '.join(names())}"
            )
            file = (
                f" Other numbers are a file of your own: copy one of {FOLDER} and change it."
                if "." in key
                else ""
            )
            raise ConfigError(f"{each}: there is no such key here. {remedy}.{file}")
    return chosen[-1] if chosen else None, others


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
    if problems := _problems(values):
        example = _load(options("hardware")["h100_80gb"])
        lines = ", ".join(f"{key}: {example[key]}" for key in problems if key in example)
        found = "; ".join(
            f"{key}: {values.get(key, 'missing')}, but must be {what}"
            for key, what in problems.items()
        )
        raise ConfigError(
            f"hardware={file.stem}: {file}: {found}. An H100's file has {lines}. Type the device's "
            "own."
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
        capability=tuple(values["capability"]) if "capability" in values else None,
        processors=values.get("processors", 0),
    )


def _load(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"hardware={file.stem}: {file} cannot be read ({error_line(error)}). Correct it."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"hardware={file.stem}: {file} holds no keys. Copy another file of {file.parent}."
        )
    return values


def _problems(values: Mapping[str, Any]) -> dict[str, str]:
    """Return by key what a value of a device's file must be, where it is something else."""
    rates, capability = values.get("peak_tflops"), values.get("capability")
    wrong = {key: "a number above 0" for key in NUMBERS if not _is_positive(values.get(key))}
    if values.get("accelerator") not in ("gpu", "cpu"):
        wrong["accelerator"] = "gpu or cpu"
    if (
        not isinstance(rates, dict)
        or "float32" not in rates
        or not all(map(_is_positive, rates.values()))
    ):
        wrong["peak_tflops"] = "a number above 0 for each type, float32 among them"
    elif unknown := [str(kind) for kind in rates if kind not in TYPES]:
        wrong["peak_tflops"] = f"of {', '.join(TYPES)}, not {', '.join(unknown)}"
    whole = ["devices_per_machine", *(["processors"] if values.get("accelerator") == "gpu" else [])]
    wrong |= {
        key: "a whole number of at least 1"
        for key in whole
        if not (_is_positive(values.get(key)) and isinstance(values[key], int))
    }
    pair = (
        isinstance(capability, list)
        and len(capability) == 2
        and all(isinstance(each, int) for each in capability)
    )
    if "processors" in whole and not pair:
        wrong["capability"] = "two whole numbers"
    return wrong


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


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
    cores, cycles = hardware.cpu_count(), hardware.cpu_cycles_per_second()
    fp32 = cores * cycles * FP32_FLOPS_PER_CYCLE
    peaks = {
        "float32": fp32,
        "float64": fp32 / 2,
        **({"bfloat16": 2 * fp32} if hardware.bf16_is_fast("cpu") else {}),
    }
    rate = cores * CPU_BYTES_PER_SECOND
    return Device(
        name=THIS,
        accelerator="cpu",
        memory_bytes=hardware.ram_bytes() or 16 * GIB,
        peak_flops=peaks,
        memory_bytes_per_second=rate,
        link_bytes_per_second=rate / 2,
        network_bytes_per_second=1.25e9,
        devices_per_machine=1,
    )
