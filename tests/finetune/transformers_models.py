"""Small random models of transformers that `model=huggingface` trains. Called by extras.call."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "qwen3": {**TINY, "tie_word_embeddings": True, "head_dim": 16},
    "gpt_neox": {**TINY, "rotary_pct": 0.5},  # the files call its head embed_out
    "olmo2": TINY,  # norms over all heads: outputs are gathered; a padding row
    "gemma2": {
        **TINY,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
    },  # tied, scaled embedding
    "gpt2": {  # without its dropout, of which each rank draws another
        "vocab_size": 320,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 64,
        "n_inner": 160,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },  # no Linears
}
# layers that keep states: no keys and values at all, or beside attention, whose positions must be
# given
RECURRENT = {
    "mamba": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "state_size": 8,
        "initializer_range": 0.2,
    },
    "bamba": {
        **TINY,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    },
}
CONTEXT = 48
END = "<|im_end|>"  # of a turn in the template beside the models


def make(root: str) -> None:
    """Write a folder for each kind of KINDS and RECURRENT."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    for kind, sizes in {**KINDS, **RECURRENT}.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        for name, value in model.named_parameters():
            if value.ndim == 1:
                nn.init.normal_(value, 1.0 if "norm" in name or "ln_" in name else 0.0, 0.2)
        model.save_pretrained(f"{root}/{kind}", max_shard_size="160KB")


def logits(root: str) -> dict[str, float]:
    """Return the largest difference of logits to transformers' own, for each kind."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from armature.models.huggingface.model import CausalLM
    from tests.finetune import folders

    ids, found = torch.randint(0, 320, (2, CONTEXT), generator=torch.Generator().manual_seed(3)), {}
    for kind in (*KINDS, *RECURRENT):
        model = folders.read(CausalLM, pretrained=f"{root}/{kind}", context=CONTEXT)
        theirs = AutoModelForCausalLM.from_pretrained(f"{root}/{kind}", dtype=torch.float32).eval()
        with torch.no_grad():
            expected = theirs(ids).logits
            found[kind] = float((model(ids) - expected).abs().max())
            cache = model.make_cache(positions=CONTEXT)
            parts = (
                [17, *[1] * 31] if kind in RECURRENT else [17, 1, 1, 9, 1, 19]
            )  # states continue by one token
            pieces = torch.cat(
                [model(piece, cache=cache) for piece in ids.split(parts, dim=1)], dim=1
            )
            found[f"{kind} with a cache"] = float((pieces - expected).abs().max())
            cache = model.make_cache(positions=CONTEXT)
            cache.newest_only = True
            newest = model(ids, cache=cache)  # more than one position would differ from the last
            found[f"{kind}, the newest alone"] = float((newest - expected[:, -1:]).abs().max())
            if kind in RECURRENT:
                assert packing_problems(model)
                continue
            documents = (torch.arange(CONTEXT) >= 20).long().expand(2, -1)
            alone = torch.cat([theirs(part).logits for part in ids.split([20, 28], dim=1)], dim=1)
            found[f"{kind} packed"] = float((model(ids, documents=documents) - alone).abs().max())
            assert not packing_problems(model)
    AutoConfig.for_model("bert", **TINY).save_pretrained(root)
    bert = CausalLM(pretrained=root, context=CONTEXT).eval()
    assert bert(ids)[:, :9].allclose(bert(ids[:, :9]), atol=1e-5)  # it reads no later token
    return found


def packing_problems(model: Any) -> list[str]:
    from armature.finetune import built

    return built._packing_problems(model.to("meta"))


def with_peft(base: str, adapter: str, merged: str) -> float:
    """Return how far the adapter that peft loads is from the merged folder."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 320, (2, CONTEXT), generator=torch.Generator().manual_seed(3))
    ours, plain = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (merged, base)
    )
    with torch.no_grad():
        before = plain(ids).logits
        theirs = PeftModel.from_pretrained(plain, adapter).eval()(ids).logits
        assert (theirs - before).abs().max() > 1e-3
        return float((theirs - ours(ids).logits).abs().max())


PROMPTS, NEW = ["how are you", "I am fine thank"], 12


def answer(path: str, prompt: str, *, chat: bool) -> tuple[Any, Any, Any]:
    """Return the tokenizer of a folder, and what transformers generates from it: all ids, and the
    new ones.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    asked = [{"role": "user", "content": prompt}]
    text = (
        tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        if chat
        else prompt
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    [whole] = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    return tokenizer, whole, whole[ids.shape[1] :]


def generated(typed: str, reference: str) -> list[tuple[str, str]]:
    """Return what generate.py prints of texts, then of chats, from a path, and what transformers
    makes of a folder.
    """
    pairs = []
    for chat in (False, True):
        expected = []
        for prompt in PROMPTS:
            tokenizer, whole, new = answer(reference, prompt, chat=chat)
            shown = (
                tokenizer.decode(new, clean_up_tokenization_spaces=False).partition(END)[0].strip()
            )
            text = tokenizer.decode(
                whole, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            expected.append(shown if chat else text)
        words = [word for prompt in PROMPTS for word in ("--prompt", prompt)] + ["--chat"] * chat
        sys.argv = [
            "",
            typed,
            *words,
            "--accelerator",
            "cpu",
            "--temperature",
            "0",
            "--tokens",
            str(NEW),
        ]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(
                str(Path(__file__).parents[2] / "scripts" / "generate.py"), run_name="__main__"
            )
        pairs.append((printed.getvalue(), "".join(f"{text}\n{'-' * 40}\n" for text in expected)))
    return pairs


def fit(root: str, kind: str, layouts: list[str], adapter: bool) -> dict[str, Any]:
    """Return how far each layout's training is from one process's."""
    from tests.finetune import layouts as compare
    from tests.support.parity import harness

    harness.PRELOAD.append(f"transformers.models.{kind}.modeling_{kind}")
    return compare.fit(
        layouts,
        model="armature.models.huggingface.model.CausalLM",
        model_args={"pretrained": f"{root}/{kind}", "context": 32, "vocab_size": 320},
        adapter={"rank": 4, "alpha": 8.0} if adapter else None,
    )
