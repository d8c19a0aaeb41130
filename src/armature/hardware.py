"""What this machine has, told without importing torch, so that a mistake in a config is answered in no time."""

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path


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
