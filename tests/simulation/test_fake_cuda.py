"""A GPU that is not there: one process of its own for all, since it replaces functions of torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from armature.errors import ConfigError
from armature.simulation import fake_cuda

SCRIPT = """
from armature.simulation import fake_cuda

device = fake_cuda.Device(name="A100", memory_bytes=40 * 2**30, capability=(8, 0), count=4)
fake_cuda.install(device)
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    assert torch.cuda.device_count() == 4
    assert torch.cuda.get_device_properties(0).total_memory == 40 * 2**30
    torch.cuda.set_device(3)
    weight = torch.ones(2**20, 2**10, device="cuda", requires_grad=True)  # 4 GiB, which nobody has
    assert weight.device == torch.device("cuda:3")
    assert weight.device.index == torch.cuda.current_device()
    (torch.ones(4, 2**10, device="cuda") @ weight.T).sum().backward()
    assert weight.grad.shape == weight.shape
    q = torch.ones(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
    assert torch._fused_sdp_choice(q, q, q) == 1
    assert torch._fused_sdp_choice(q.float(), q.float(), q.float()) == 2
    torch.optim.AdamW([weight], fused=True).step()
    waits = []
    fake_cuda.on_wait = lambda: waits.append(1)
    torch.cuda.synchronize()
    torch.accelerator.synchronize()
    torch.cuda.Event().synchronize()
    torch.cuda.current_stream().synchronize()
    assert len(waits) == 4
    fake_cuda.present(fake_cuda.Device(name="T4", capability=(7, 5), processors=40))
    # another shape, since the mode remembers answers by shape
    q = torch.ones(1, 2, 8, 32, device="cuda", dtype=torch.bfloat16)
    half = q.half()
    assert torch.cuda.get_device_properties(0).multi_processor_count == 40
    assert torch._fused_sdp_choice(half, half, half) == 2 and torch._fused_sdp_choice(q, q, q) == 0
    assert torch._fused_sdp_choice(half, half, half, enable_gqa=True) == 0
    assert torch._fused_sdp_choice(q.double(), q.double(), q.double()) == 0
    try:
        weight + torch.ones(2**10)
    except Exception as error:
        assert "device" in str(error), error
        print("done")
"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


@pytest.mark.slow
def test_tensors_on_a_gpu_that_is_not_there():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=ENVIRONMENT
    )
    assert run.stdout == "done\n", run.stderr


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError,
        match=r"CXX=no-such-compiler is not there\. Type apt-get install g\+\+.*Training needs",
    ):
        fake_cuda.compiled()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"none of c\+\+, g\+\+, clang\+\+ is there"):
        fake_cuda.compiled()
    assert not [path for path in Path(tmp_path).rglob("*") if path.is_file()]


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path))
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'shim.cpp:1: error: no C++20' >&2; exit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(
        ConfigError,
        match=r"Set CXX to another compiler. It reports:\nshim.cpp:1: error: no C\+\+20",
    ):
        fake_cuda.compiled()
