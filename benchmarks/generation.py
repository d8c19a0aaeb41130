"""Tokens per second of our generation and of transformers' `generate`: the same weights, prompts
and tokens.

    PYTHONPATH=src:.venv/extras python -m benchmarks.generation [--rounds 12]

They take turns, on a model of gpt_nano's sizes, on this machine's CPU or GPU. The weights are a
LlamaForCausalLM's with a large initial spread, read by ours from transformers' own folder. Both
take the likeliest token, with a key-value cache; the tokens must be the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

from armature.finetune.export import read_decoder
from armature.launcher import heap
from armature.models.decoder.generation import generate
from benchmarks.rounds import spread

CONTEXT, PROMPT, NEW = 256, 16, 200  # tokens
BATCHES = (1, 16)  # prompts at once
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heap.keep_freed_memory(device)  # for both, which share the process
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device).eval()
    theirs.generation_config.eos_token_id = None  # neither stops early
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = read_decoder(
            Path(folder), context=CONTEXT, device=device, dtype=torch.float32
        ).eval()

    def by_ours(prompts_BT: Tensor) -> Tensor:
        return generate(ours, prompts_BT, max_new_tokens=NEW, temperature=0)

    @torch.inference_mode()
    def by_theirs(prompts_BT: Tensor) -> Tensor:
        mask_BT = torch.ones_like(prompts_BT)
        return theirs.generate(
            prompts_BT, attention_mask=mask_BT, max_new_tokens=NEW, do_sample=False
        )

    print(
        f"{torch.get_num_threads()} threads, {device}, torch {torch.__version__}, {rounds} rounds "
        f"of {NEW} tokens\n"
    )
    print(
        "| prompts | ours, tokens/s | transformers, tokens/s | ours relative to it |\n| ---: | "
        "---: | ---: | ---: |"
    )
    for batch in BATCHES:
        prompts_BT = torch.randint(SIZES["vocab_size"], (batch, PROMPT), device=device)
        if not torch.equal(by_ours(prompts_BT), by_theirs(prompts_BT)):
            raise SystemExit(
                "the two continue a prompt with different tokens, so their times do not compare"
            )
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for number in range(rounds):
            turns = {"ours": by_ours, "theirs": by_theirs}
            for name in sorted(turns, reverse=number % 2 == 1):
                began = time.perf_counter()
                turns[name](prompts_BT).cpu()
                seconds[name].append(time.perf_counter() - began)
        rates = [
            f"{batch * NEW / spread(seconds[name]).median:,.0f}" for name in ("ours", "theirs")
        ]
        ratio = spread([b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)])
        print(f"| {batch} | {' | '.join(rates)} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
