"""What is chosen by itself on hardware that is not here."""

from pathlib import Path
from typing import Any

import pytest

from armature import hardware


class Driver:
    """The part of NVIDIA's driver that is asked, with one GPU."""

    def __init__(self, major: int, minor: int) -> None:
        self.attributes = {75: major, 76: minor}

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self.attributes[attribute]
        return 0


@pytest.fixture(autouse=True)
def _asked_anew():
    hardware.gpu_count.cache_clear()
    yield
    hardware.gpu_count.cache_clear()


@pytest.mark.parametrize(
    ("flags", "fast"),
    [("avx2 avx512f", False), ("avx512f avx512_bf16", True), ("avx512f amx_bf16 amx_tile", True)],
)
def test_bf16_is_for_cpus_with_units_for_it(flags, fast, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : fpu {flags}\n")
    monkeypatch.setattr(hardware, "Path", lambda name: tmp_path / Path(name).name)
    assert hardware.bf16_is_fast("cpu") is fast


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True)])
def test_bf16_is_for_ampere_and_later(capability, fast, monkeypatch):
    monkeypatch.setattr(hardware, "_cuda_driver", lambda: Driver(*capability))
    assert hardware.compute_capability() == capability
    assert hardware.bf16_is_fast("gpu") is fast
