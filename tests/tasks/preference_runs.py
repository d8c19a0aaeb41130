"""Fits of DirectPreference on a few pairs, under any layout: run by the ranks of
tests.support.parity.harness.
"""

import json
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.parity.harness import (
    DECODER,
    LAYOUTS,
    QUIET,
    STRATEGIES,
    Run,
    import_object,
    on_ranks,
)

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


@dataclass(frozen=True)
class Job:
    """One fit: files, a key of the harness's LAYOUTS, and arguments of Lora and of the data."""

    folder: str  # with pairs.jsonl and tokenizer/
    layout: str = "single"
    adapter: dict[str, Any] | None = None  # None: all weights of `pretrained` are trained
    pretrained: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    micro: int | str = 2
    lr: float = 1e-2


def data_of(folder: str | Path, *, micro: int | str = 2, **changes: Any) -> Any:
    """Return a feed of the pairs."""
    from armature.data.chat.data import PreferenceData
    from armature.data.chat.source import Preferences
    from armature.data.feed import Feed

    path = Path(folder)
    source = Preferences(
        str(path / "pairs.jsonl"),
        tokenizer=str(path / "tokenizer"),
        cache_dir=str(path / "cache"),
        context=MODEL["context"],
        val_fraction=0.25,
        vocab_size=VOCABULARY,
    )
    multiple = changes.pop("multiple", 8)
    data = PreferenceData(source, context=MODEL["context"], multiple=multiple)
    loader = {"global_batch_size": 8, "micro_batch_size": micro, "eval_batch_size": 4, "seed": 1}
    return Feed(data, **{**loader, **changes})


def task_of(
    *,
    adapter: dict[str, Any] | None = None,
    pretrained: str | None = None,
    lr: float = 1e-2,
    **settings: Any,
) -> Any:
    import torch

    from armature.finetune import architecture, folder
    from armature.finetune.lora import Lora
    from armature.models.decoder.model import Decoder
    from armature.tasks.direct_preference import DirectPreference

    model: dict[str, Any] = MODEL
    if pretrained is not None:
        of_folder = architecture.arguments(folder.config(Path(pretrained)), name=pretrained)
        model = {**of_folder, "context": MODEL["context"], "pretrained": pretrained}
    return DirectPreference(
        partial(Decoder, **model), optimizer=partial(torch.optim.AdamW, lr=lr, eps=1e-6),
        adapter=None if adapter is None else Lora(**adapter), **settings,
    )  # fmt: skip


def fit(job: Job) -> Run:
    return on_ranks(_fit, job, ranks=LAYOUTS[job.layout].ranks)[0]


def _fit(job: Job) -> Run:
    import logging
    import warnings

    import lightning as L
    import torch

    from tests.support.parity import harness

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    class Record(L.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.columns: list[dict[str, float]] = []
            self.norms: list[float] = []

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
            own = outputs["loss"].detach().clone().float()
            self.losses.append(float(trainer.strategy.reduce(own)))
            columns = pl_module.batch_ended(trainer, stepped=stepped)
            if stepped:
                mean = {
                    name: float(trainer.strategy.reduce(value.clone()))
                    for name, value in columns.items()
                }
                self.columns.append(mean)
                self.norms.append(float(trainer.strategy.grad_norm))

    layout, feed = LAYOUTS[job.layout], data_of(job.folder, micro=job.micro, **job.data)
    strategy = import_object(STRATEGIES[layout.strategy])(seed=3, **layout.options)
    task = task_of(adapter=job.adapter, pretrained=job.pretrained, lr=job.lr)
    record = Record()
    data_ranks = layout.ranks // layout.options.get("tensor", 1)
    accumulate = 1 if job.micro == "auto" else feed.global_batch_size // job.micro // data_ranks
    trainer = L.Trainer(
        **QUIET,
        devices=layout.ranks,
        strategy=strategy,
        max_steps=job.steps,
        precision="32-true",
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        callbacks=[feed, record],
        val_check_interval=job.steps * accumulate,
        default_root_dir=job.folder,
        check_val_every_n_epoch=None,
    )
    trainer.fit(task, datamodule=feed.data)
    losses = torch.tensor(record.losses).view(job.steps, accumulate).mean(dim=1) * accumulate
    facts = {name: float(value) for name, value in trainer.callback_metrics.items()}
    facts |= {
        f"{name} {step}": value
        for step, row in enumerate(record.columns)
        for name, value in row.items()
    }
    return Run(losses.tolist(), record.norms, harness._whole(task, strategy), facts)
