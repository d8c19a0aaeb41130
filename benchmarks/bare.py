"""The reference for every other contender: a bare PyTorch loop, written to be plain and fast.

    python -m benchmarks.bare JOB             one process
    torchrun … -m benchmarks.bare JOB ddp     raw DistributedDataParallel
    torchrun … -m benchmarks.bare JOB fsdp    raw fully_shard, one unit per block

It logs nothing, shows nothing and saves nothing.
"""

# pyright: reportPrivateImportUsage=false
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import parts
from benchmarks.gate import Gate
from benchmarks.job import Job


def train(
    job: Job,
    strategy: str = "single",
    *,
    batches: Iterator[tuple[Tensor, Tensor]] | None = None,
    step_done: Callable[[Tensor], None],
) -> nn.Module:
    """Train until `batches` end, if they do; call `step_done` with the last loss of each optimizer
    step.
    """
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    device = parts.device_of(job)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if strategy != "single":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.set_float32_matmul_precision("high")

    model = parts.model_of(job)
    repeated = parts.blocks_of(model)
    if strategy == "fsdp":
        shard(model, repeated, bf16=job.precision.startswith("bf16"))
    optimizer = parts.optimizer_of(job, model)
    if strategy == "fsdp" and hasattr(optimizer, "matrix_work"):
        from armature.parallel.distributed_matrices import DistributedMatrices

        optimizer.matrix_work = DistributedMatrices()  # Muon needs whole matrices; AdamW does not  # pyright: ignore[reportAttributeAccessIssue]
    schedule = parts.schedule_of(job, optimizer)
    parameters = list(model.parameters())
    network = (
        nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if strategy == "ddp"
        else model
    )

    accumulate = job.accumulate(ranks)
    batches, loss = batches or parts.batches_of(job), torch.zeros(())
    while True:
        for micro in range(accumulate):
            try:
                inputs, targets = next(batches)
            except StopIteration:
                return model
            last = micro == accumulate - 1
            with network.no_sync() if strategy == "ddp" and not last else nullcontext():  # pyright: ignore[reportCallIssue]
                with parts.autocast(job):
                    loss = network(inputs, targets)
                (loss if accumulate == 1 else loss / accumulate).backward()
        if job.clip is not None:
            nn.utils.clip_grad_norm_(parameters, job.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step_done(loss)


def shard(model: nn.Module, repeated: list[nn.Module], *, bf16: bool) -> None:
    """Apply fully_shard (FSDP2) as in its documentation."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in repeated:
        fully_shard(block, mp_policy=policy)
    if repeated != [model]:
        fully_shard(model, mp_policy=policy)


def main() -> None:
    gate = Gate()
    train(Job.load(sys.argv[1]), *sys.argv[2:], step_done=lambda loss: gate.step())


if __name__ == "__main__":
    main()
