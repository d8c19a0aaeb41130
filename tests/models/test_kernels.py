"""Which kernels a decoder's block reaches on a GPU, found with CUDA tensors that are not there."""

import subprocess
import sys

import pytest

from tests.running import ROOT, environment

SCRIPT = """
from armature.simulation import fake_cuda

device = fake_cuda.Device(name="A100", memory_bytes=40 * 2**30, capability=(8, 0), count=1)
fake_cuda.install(device)
from collections import Counter
from types import SimpleNamespace
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from armature.models.decoder.model import Block, takes_groups


class Operators(TorchDispatchMode):
    def __enter__(self):
        self.names = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else ()
        self.names[func.__name__.split(".")[0], shape] += 1
        return result


with FakeTensorMode(), torch.device("cuda"):
    sizes = {"heads": 4, "kv_heads": 2, "ffn_hidden": 128}
    block = Block(64, **sizes, norm_eps=1e-5, qk_norm=False, dropout=0.0)
    x, rotary = torch.ones(2, 32, 64, requires_grad=True), torch.ones(32, 2, 8)
    with Operators() as full:
        block(x, rotary).sum().backward()
    with Operators() as mixed, torch.autocast("cuda", torch.bfloat16):
        block(x, rotary)
    v = torch.ones(1, 2, 8, 16, dtype=torch.float16)
    groups = [takes_groups(v, None), takes_groups(v, torch.ones(8, 8))]
    groups.append(takes_groups(v.float(), None))
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(major=7, minor=5)
    groups.append(takes_groups(v, None))

kernels = {name for name, _ in full.names if name.startswith("_scaled_dot_product")}
casts = mixed.names["_to_copy", (2, 32, 64)]
print(sorted(kernels), sum(name == "bmm" for name, _ in full.names), casts, groups)
"""


@pytest.mark.slow
def test_fp32_with_grouped_heads_holds_no_scores_and_autocast_casts_a_norms_output_once():
    env = environment(PYTHONPATH=str(ROOT / "src"))
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=env
    )
    efficient = "_scaled_dot_product_efficient_attention"
    expected = f"['{efficient}', '{efficient}_backward'] 0 2 [True, False, False, False]\n"
    assert run.stdout == expected, run.stdout + run.stderr
