"""Layouts with a context axis. Each is compared with one process on the same data."""

from dataclasses import replace
from typing import Any

from tests.support.parity.harness import DECODER, Job, mesh

UNEQUAL: dict[str, Any] = {"ignore": True}
DOCUMENTS: dict[str, Any] = {"model_args": {**DECODER, "document_token": 7}}
WINDOWS: dict[str, Any] = {"model_args": {**DECODER, "windows": [5, None, 3, None]}}

LAYOUTS: dict[str, Job] = {
    "context 2": mesh(2, context=2),
    "context 4, for 2 key-value heads": mesh(4, context=4),
    "context 2, unequal targets": replace(mesh(2, context=2), **UNEQUAL),
    "context 2, documents": replace(mesh(2, context=2), **DOCUMENTS),
    "context 2, windows": replace(mesh(2, context=2), **WINDOWS),
    "context 2, ZeRO-2": mesh(2, context=2, reshard_after_forward=False),
    "context 2, recomputed": mesh(2, context=2, activation_checkpointing="every"),
    "context 2, selectively recomputed, unequal targets": replace(
        mesh(2, context=2, activation_checkpointing="selective"), **UNEQUAL
    ),
    "context 2, compiled blocks": mesh(2, context=2, compile="block", min_num_params=10_000),
    "context 2, keys gathered": mesh(2, context=2, context_method="all_gather"),
    "context 2, keys gathered, documents, windows, unequal targets": replace(
        mesh(2, context=2, context_method="all_gather"),
        **UNEQUAL,
        model_args={**DOCUMENTS["model_args"], **WINDOWS["model_args"]},
    ),
    "context 2, keys gathered, compiled blocks, selective": mesh(
        2,
        context=2,
        context_method="all_gather",
        compile="block",
        min_num_params=10_000,
        activation_checkpointing="selective",
    ),
    "context 4, keys gathered for 2 heads": replace(
        mesh(4, context=4), model_args={**DECODER, "heads": 2, "windows": [5, None, 3, None]}
    ),
    "context 2 × tensor 2, keys gathered for 2 heads, unequal targets": replace(
        mesh(4, context=2, tensor=2), **UNEQUAL, model_args={**DECODER, "heads": 2}
    ),
    "fsdp 2 × context 2": mesh(4, shard=2, context=2),
    "fsdp 2 × context 2, unequal targets": replace(mesh(4, shard=2, context=2), **UNEQUAL),
    "replicate 2 × context 2": mesh(4, replicate=2, context=2),
    "context 2 × tensor 2": mesh(4, context=2, tensor=2, sequence_parallel=False),
    "context 2 × tensor 2, sequence parallel": mesh(4, context=2, tensor=2),
    "context 2 × tensor 2, sequence parallel, documents, unequal targets": replace(
        mesh(4, context=2, tensor=2), **UNEQUAL, **DOCUMENTS
    ),
    "context 2 × pipeline 2, gpipe": mesh(4, context=2, pipe=2, schedule="gpipe"),
    "context 2 × pipeline 2, 1f1b": mesh(4, context=2, pipe=2),
    "context 2 × pipeline 2, 1f1b, unequal targets": replace(mesh(4, context=2, pipe=2), **UNEQUAL),
    "context 2 × pipeline 2, interleaved 1f1b": mesh(
        4, context=2, pipe=2, schedule="interleaved_1f1b"
    ),
    "context 2 × pipeline 2, zero bubble": mesh(4, context=2, pipe=2, schedule="zero_bubble"),
    "fsdp 2 × context 2 × tensor 2": mesh(8, shard=2, context=2, tensor=2),
    "context 2 × tensor 2 × pipeline 2": mesh(8, context=2, tensor=2, pipe=2),
}
