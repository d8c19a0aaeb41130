"""Memory and time of the loss of a large vocabulary: plain, chunked by torch, chunked by us.

python -m benchmarks.loss VARIANT TOKENS WIDTH VOCABULARY DEVICE DTYPE
    one variant, in a process of its own
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contender import environment

VARIANTS = {
    "plain": "F.cross_entropy of all logits in fp32",
    "torch": "F.linear_cross_entropy, default options",
    "torch_chunked": "F.linear_cross_entropy, LinearCrossEntropyOptions()",
    "ours": "ChunkedCrossEntropy, what a Decoder trains with",
}


def run(
    variant: str,
    *,
    tokens: int,
    width: int,
    vocabulary: int,
    device: str,
    dtype: str,
    repeats: int = 7,
) -> dict[str, Any]:
    """Return one variant's results, measured in its own process.

    Raises:
        RuntimeError: where it fails, with the last line of what it wrote.
    """
    arguments = [*map(str, (tokens, width, vocabulary)), device, dtype, str(repeats)]
    command = [sys.executable, "-m", "benchmarks.loss", variant, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise RuntimeError(
            done.stderr.strip().splitlines()[-1]
            if done.stderr.strip()
            else f"exit code {done.returncode}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    variant: str, *, tokens: int, width: int, vocabulary: int, device: str, dtype: str, repeats: int
) -> dict[str, Any]:
    """Measure peak bytes of forward and backward, seconds, and the distance of the gradients from
    the plain ones.
    """
    import torch

    torch.manual_seed(0)
    x = torch.randn(tokens, width, device=device).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    loss_of = losses()[variant]

    def once(function: Callable[..., Any]) -> list[Any]:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = function(x, weight, targets)
        return list(torch.autograd.grad(loss, (x, weight)))

    small = (
        x[:8].detach(),
        weight,
        targets[:8],
    )  # warm up: threads and kernels are not part of the loss
    with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        torch.autograd.grad(loss_of(*small), (weight,))
    before = peak_begins(device)
    gradients = once(loss_of)
    extra = peak_ends(device) - before
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        once(loss_of)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    plain = once(losses()["plain"])
    far = [float((a - b).norm() / b.norm()) for a, b in zip(gradients, plain, strict=True)]
    return {
        "bytes": extra,
        "seconds": sorted(times)[len(times) // 2],
        "gradients_differ_by": max(far),
    }


def losses() -> dict[str, Callable[..., Any]]:
    import torch.nn.functional as F
    from torch import nn

    from armature.models.decoder.loss import ChunkedCrossEntropy
    from armature.models.decoder.model import Decoder

    return {
        "plain": lambda x, weight, targets: Decoder.loss(F.linear(x, weight)[None], targets[None]),
        "torch": lambda x, weight, targets: F.linear_cross_entropy(x, weight, targets),
        "torch_chunked": lambda x, weight, targets: F.linear_cross_entropy(
            x, weight, targets, options=nn.LinearCrossEntropyOptions()
        ),
        "ours": lambda x, weight, targets: ChunkedCrossEntropy.apply(x, weight, targets, True),
    }


def peak_begins(device: str) -> int:
    """Return the bytes in use now, to subtract from the peak."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak of resident memory
    return _status("VmRSS")


def peak_ends(device: str) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    variant, tokens, width, vocabulary, device, dtype, repeats = sys.argv[1:]
    sizes = {
        "tokens": int(tokens),
        "width": int(width),
        "vocabulary": int(vocabulary),
        "repeats": int(repeats),
    }
    print(json.dumps(measure(variant, **sizes, device=device, dtype=dtype)))
