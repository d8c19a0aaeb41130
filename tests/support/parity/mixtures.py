"""Layouts of a mixture of experts: alone, and with an expert axis beside all others."""

from dataclasses import replace

from tests.support.parity.harness import DECODER, Job, mesh

MIXTURE = {
    "model": "armature.models.mixture.model.MixtureDecoder",
    "model_args": {
        **DECODER,
        "experts": 8,
        "active": 2,
        "expert_hidden": 32,
        "shared_hidden": 64,
        "dense_layers": 1,
    },
}
PACKED = {"model_args": {**MIXTURE["model_args"], "document_token": 7}}
LAYOUTS: dict[str, Job] = {
    name: replace(job, **MIXTURE | (PACKED if "packed" in name else {}), ignore="ignored" in name)
    for name, job in {
        "mixture, single": Job("SingleDevice"),
        "mixture, single, micro-batch 4": Job("SingleDevice", accumulate=4),
        "mixture, ddp 2": Job("DDP", ranks=2),
        "mixture, fsdp 2": mesh(2, shard=2),
        "mixture, deepspeed 2 at 2": Job("DeepSpeed", {"stage": 2}, ranks=2),
        "mixture, deepspeed 3 at 2": Job("DeepSpeed", {"stage": 3}, ranks=2),
        "mixture, tensor 2": mesh(2, tensor=2),
        "mixture, fsdp 2, expert 2": mesh(2, shard=2, expert=2),
        "mixture, fsdp 2, expert 2, ignored": mesh(2, shard=2, expert=2),
        "mixture, fsdp 2, expert 2, packed": mesh(2, shard=2, expert=2),
        "mixture, fsdp 2, expert 2, recomputed": mesh(
            2, shard=2, expert=2, activation_checkpointing="every"
        ),
        "mixture, fsdp 4, expert 2, selective": mesh(
            4, shard=4, expert=2, activation_checkpointing="selective"
        ),
        "mixture, fsdp 2, expert 2, ZeRO-2": mesh(
            2, shard=2, expert=2, reshard_after_forward=False
        ),
        "mixture, fsdp 4, expert 2": mesh(4, shard=4, expert=2),
        "mixture, fsdp 4, expert 4": mesh(4, shard=4, expert=4),
        "mixture, hsdp 2×2, expert 2": mesh(4, replicate=2, shard=2, expert=2),
        "mixture, tensor 2, expert 2": mesh(2, tensor=2, expert=2),
        "mixture, fsdp 2 × tensor 2, expert 2": mesh(4, shard=2, tensor=2, expert=2),
        "mixture, fsdp 2 × tensor 2, expert 4": mesh(4, shard=2, tensor=2, expert=4),
        "mixture, fsdp 2 × pipeline 2, expert 2": mesh(4, pipe=2, shard=2, expert=2),
        "mixture, fsdp 2 × pipeline 2, expert 2, zero bubble": mesh(
            4, pipe=2, shard=2, expert=2, schedule="zero_bubble"
        ),
        "mixture, fsdp 2 × pipeline 2, expert 2, interleaved, recomputed": mesh(
            4,
            pipe=2,
            shard=2,
            expert=2,
            schedule="interleaved_1f1b",
            activation_checkpointing="every",
        ),
        "mixture, tensor 2 × pipeline 2, zero bubble": mesh(
            4, pipe=2, tensor=2, schedule="zero_bubble"
        ),
        "mixture, context 2 × pipeline 2, expert 2, zero bubble, recomputed": mesh(
            4, pipe=2, context=2, expert=2, schedule="zero_bubble", activation_checkpointing="every"
        ),
        "mixture, context 2 × fsdp 2, expert 4, ignored": mesh(4, context=2, shard=2, expert=4),
        "mixture, context 2 × tensor 2, expert 4, packed": mesh(4, context=2, tensor=2, expert=4),
        "mixture, fsdp 2 × context 2 × tensor 2, expert 4": mesh(
            8, shard=2, context=2, tensor=2, expert=4
        ),
        "mixture, 2×2×2, expert 4": mesh(8, pipe=2, shard=2, tensor=2, expert=4),
    }.items()
}
