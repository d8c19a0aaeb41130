"""What this machine has, found without importing torch, so that a mistake in a config is reported
at once.
"""

import ctypes
import functools
import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import psutil

# Dense bf16 tensor-core rates from the vendors' data sheets, FLOP/s. The first entry found in a
# device's name counts.
PEAKS = {
    "GB200": 2500e12, "B200": 2250e12,
    "H200 NVL": 835e12, "H200": 989.4e12, "GH200": 989.4e12,
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.4e12, "H800": 989.4e12, "H20": 148e12,
    "A100": 312e12, "A800": 312e12, "A10G": 70e12, "A10": 125e12, "A30": 165e12, "A40": 149.7e12,
    "L40S": 362e12, "L20": 119.5e12, "L4": 121e12,
    "MI300X": 1307e12, "MI250X": 191.5e12,  # each of an MI250X's two dies is a device
}  # fmt: skip

# How idle OpenMP threads wait, unless the environment says so. One that spins takes its core from
# whoever has work: two busy programs then slow each other down severalfold. One that sleeps at once
# pays for being woken at each operation: small steps take twice as long. So it spins for about as
# long as waking takes, 20 to 100 µs (GNU's OpenMP; others sleep at once).
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}


def cpu_count() -> int:
    """Return the number of CPUs that this process may use (often fewer than the machine has.

    Slurm, containers).
    """
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )


@functools.cache
def _cuda_driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


@functools.cache
def gpu_count() -> int:
    """Return the number of visible GPUs (CUDA_VISIBLE_DEVICES applies).

    NVIDIA from the driver, AMD from torch.
    """
    if (driver := _cuda_driver()) is not None:
        count = ctypes.c_int()
        return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    if Path("/dev/kfd").exists():
        import torch

        return torch.cuda.device_count()
    return 0


def has_mps() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def default_accelerator() -> str:
    return "gpu" if gpu_count() else "mps" if has_mps() else "cpu"


def compute_capability() -> tuple[int, int] | None:
    """Return (major, minor) of the first NVIDIA GPU, or None if there is none."""
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
    major, minor = (_ask("cuDeviceGetAttribute", ctypes.c_int(), each) for each in (75, 76))
    return None if None in (major, minor) else (major, minor)


def _ask(function: str, value: Any, *arguments: Any) -> Any:
    """Return what the driver says of the first NVIDIA GPU, or None if there is none."""
    driver, device = _cuda_driver(), ctypes.c_int()
    if driver is None or not gpu_count() or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    failed = getattr(driver, function)(ctypes.byref(value), *arguments, device)
    return None if failed else value.value


def gpu_name() -> str | None:
    """Return the driver's name of the first NVIDIA GPU, or None if there is none."""
    name = _ask("cuDeviceGetName", ctypes.create_string_buffer(256), 256)
    return None if name is None else name.decode()


def gpu_memory_bytes() -> int | None:
    """Return the memory of the first NVIDIA GPU, or None if there is none."""
    return _ask("cuDeviceTotalMem_v2", ctypes.c_size_t())


def bf16_is_fast(accelerator: str) -> bool:
    """Return True if the hardware has bfloat16 units.

    Ampere and later GPUs, or CPUs with AVX512-BF16 or AMX.
    """
    if accelerator == "cpu":
        return any(flag in cpuinfo() for flag in ("avx512_bf16", "amx_bf16"))
    if accelerator != "gpu" or not gpu_count():
        return False
    capability = compute_capability()
    return capability is None or capability >= (8, 0)  # None: AMD


def published_peak(device_name: str) -> float | None:
    """Return FLOP/s of one device in dense bf16, or None if it is not in the table."""
    return next(
        (rate for words, rate in PEAKS.items() if re.search(rf"\b{words}\b", device_name)), None
    )


def cpuinfo() -> str:
    """Return what Linux says of the CPUs, empty on other systems."""
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.*)", cpuinfo(), re.MULTILINE)
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {cpu_count()} cores"


def ram_bytes() -> int:
    """Return the memory that this process may use: the machine's, or the container's limit if that
    is lower.
    """
    whole = psutil.virtual_memory().total
    for file in (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ):
        if file.exists() and (limit := file.read_text().strip()).isdigit():
            return min(whole, int(limit))
    return whole


def page_faults() -> int:
    """Return how often this process got memory from the system page by page."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak_resident_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
