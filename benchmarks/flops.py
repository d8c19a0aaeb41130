"""How much arithmetic a step is, and how much the machine can do.

python -m benchmarks.flops cuda bfloat16     measures this machine's matrix rate
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

# Dense bf16 tensor-core rates of NVIDIA's data sheets, FLOP/s; the SXM versions
PUBLISHED = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "B200": 2250e12}
SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}


def decoder_flops_per_token(model: Mapping[str, Any], context: int) -> int:
    """Forward and backward of one token, by PaLM's count (arXiv:2204.02311, appendix B): 6 N + 12 L H K T.

    N counts the matrices that a token is multiplied with: the blocks' and the head's, not the embedding, which is a
    look-up. T is the context; the causal half of attention that need not be computed is counted in, as is usual.
    Recomputation is not counted.
    """
    width, layers, heads = model["width"], model["layers"], model["heads"]
    head_dim = width // heads
    hidden = model.get("ffn_hidden") or -(-8 * width // 3 // 64) * 64
    attention = 2 * width * heads * head_dim + 2 * width * (model.get("kv_heads") or heads) * head_dim
    matrices = layers * (attention + 3 * width * hidden) + width * model["vocab_size"]
    return 6 * matrices + 12 * layers * heads * head_dim * context


def flops_per_step(model: Mapping[str, Any], *, context: int, global_batch_size: int) -> int | None:
    """Of one optimiser step, over all ranks; None for a model that is no decoder of ours."""
    if not str(model.get("_target_", "")).endswith("decoder.model.Decoder"):
        return None
    return decoder_flops_per_token(model, context) * context * global_batch_size


def published_peak(device_name: str) -> float | None:
    """FLOP/s of one device in dense bf16; None for one that is not in the table."""
    return next((rate for name, rate in PUBLISHED.items() if name in device_name), None)


def measure(device: str, dtype_name: str, *, seconds: float = 0.5) -> dict[str, Any]:
    """The best rate of square matrix products on one device, or on all CPUs of this process, in FLOP/s."""
    import torch

    dtype = getattr(torch, dtype_name)
    torch.set_float32_matmul_precision("high")
    rates = {}
    for size in SIZES[device]:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        best, end = 0.0, time.perf_counter() + seconds
        for _ in range(3):
            torch.mm(a, b)
        while time.perf_counter() < end:
            repeats = 10 if device == "cuda" else 1
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                torch.mm(a, b)
            if device == "cuda":
                torch.cuda.synchronize()
            best = max(best, repeats * 2 * size**3 / (time.perf_counter() - start))
        rates[size] = best
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return {
        "device": name,
        "dtype": dtype_name,
        "rate": max(rates.values()),
        "rates": rates,
        "torch": torch.__version__,
    }


def cpu_name() -> str:
    """The processor, with the number of CPUs that this process may use."""
    import platform
    from pathlib import Path

    from armature.hardware import cpu_count

    info = Path("/proc/cpuinfo")
    models = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{models[0] if models else platform.processor() or platform.machine()}, {cpu_count()} cores"


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:3])))
