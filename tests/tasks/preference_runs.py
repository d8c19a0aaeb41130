"""Pairs of answers, and a small task that learns from them."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.parity.harness import DECODER

VOCABULARY = 320
MODEL = {**DECODER, "vocab_size": VOCABULARY, "context": 64, "layers": 2}


def pair(i: int, *, draw: random.Random) -> dict[str, Any]:
    words = ["hello", "world", "how", "are", "you", "I", "am", "fine", "thank"]
    prompt = f"how {i} " + " ".join(draw.choices(words, k=draw.randint(1, 8)))
    chosen = "I am fine" + " world" * draw.randint(0, 9)
    return {"prompt": prompt, "chosen": chosen, "rejected": "hello" + " you" * draw.randint(0, 9)}


def write_pairs(path: Path, count: int = 48) -> Path:
    draw = random.Random(0)
    path.write_text("".join(json.dumps(pair(i, draw=draw)) + "\n" for i in range(count)))
    return path


def data_of(folder: str | Path) -> Any:
    """Return the data of the pairs."""
    from armature.data.chat.data import PreferenceData
    from armature.data.chat.source import Preferences

    path = Path(folder)
    source = Preferences(
        str(path / "pairs.jsonl"),
        tokenizer=str(path / "tokenizer"),
        cache_dir=str(path / "cache"),
        context=MODEL["context"],
        val_fraction=0.25,
        vocab_size=VOCABULARY,
    )
    return PreferenceData(source, context=MODEL["context"], multiple=8)


def task_of(*, adapter: dict[str, Any], **settings: Any) -> Any:
    import torch

    from armature.finetune.lora import Lora
    from armature.models.decoder.model import Decoder
    from armature.tasks.direct_preference import DirectPreference

    return DirectPreference(
        partial(Decoder, **MODEL),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        adapter=Lora(**adapter),
        **settings,
    )
