"""What this machine has, told without importing torch, so that a mistake in a config is answered in no time."""

import ctypes
import functools
import os
import platform
import re
import sys
from pathlib import Path

# Dense bf16 tensor-core rates of the makers' data sheets, FLOP/s. The first whose words stand in a device's name counts
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L20": 119.5e12,
    "L4": 121e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # each of its two dies is a device
}


def cpu_count() -> int:
    """CPUs that this process may use (a Slurm job or a container often has fewer than the machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@functools.cache
def _cuda_driver() -> ctypes.CDLL | None:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


@functools.cache
def gpu_count() -> int:
    """GPUs that this process sees, CUDA_VISIBLE_DEVICES counted in: NVIDIA's by the driver, AMD's by torch."""
    if (driver := _cuda_driver()) is not None:
        count = ctypes.c_int()
        return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    if Path("/dev/kfd").exists():
        import torch

        return torch.cuda.device_count()
    return 0


def has_mps() -> bool:
    """True on an Apple machine whose GPU torch can use."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def default_accelerator() -> str:
    return "gpu" if gpu_count() else "mps" if has_mps() else "cpu"


def compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the first NVIDIA GPU; None where there is none."""
    if (driver := _cuda_driver()) is None or not gpu_count():
        return None
    device, found = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    if driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    for value, attribute in zip(found, (75, 76), strict=True):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return found[0].value, found[1].value


def bf16_is_fast(accelerator: str) -> bool:
    """Whether bfloat16 products run on units of their own: Ampere and later, or AVX512-BF16 and AMX on CPUs."""
    if accelerator == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        return cpuinfo.exists() and any(flag in cpuinfo.read_text() for flag in ("avx512_bf16", "amx_bf16"))
    if accelerator != "gpu" or not gpu_count():
        return False
    capability = compute_capability()
    return capability is None or capability >= (8, 0)  # None: AMD


def published_peak(device_name: str) -> float | None:
    """FLOP/s of one device in dense bf16; None for one that is not in the table."""
    return next((rate for words, rate in PEAKS.items() if re.search(rf"\b{words}\b", device_name)), None)


def cpu_name() -> str:
    """The processor, with the number of CPUs that this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {cpu_count()} cores"


def peak_resident_memory() -> int:
    """Bytes that this process held at once, at most; 0 where the system does not tell (Windows)."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
