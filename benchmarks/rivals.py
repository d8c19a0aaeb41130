"""Alternatives, each written as in its documentation, with a progress bar and the loss logged.

    python -m benchmarks.rivals lightning|fabric|accelerate|transformers JOB FOLDER

They get the same model, data, optimizer, schedule and precision as the bare loop. Checkpoints are
on where the library saves them by itself (Lightning, transformers).
"""

# pyright: reportMissingImports=false
import itertools
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchmarks import parts
from benchmarks.gate import Gate
from benchmarks.job import Job


def lightning(job: Job, folder: Path) -> None:
    """Stock Lightning: one logged value, its bar, its checkpoint callback, its default logger."""
    import lightning as L

    from benchmarks.lightning_gate import LightningGate

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.model_of(job)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.model(batch["inputs"], batch["targets"])
            self.log("train/loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = parts.optimizer_of(job, self.model)
            return [optimizer], [
                {"scheduler": parts.schedule_of(job, optimizer), "interval": "step"}
            ]

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            if job.clip is not None:  # Lightning's own clipping refuses fused optimizers
                nn.utils.clip_grad_norm_(self.parameters(), job.clip)

    precision: Any = job.precision
    trainer = L.Trainer(
        accelerator="gpu" if job.device == "cuda" else "cpu",
        devices=1,
        precision=precision,
        max_epochs=-1,
        max_steps=job.total_steps,
        accumulate_grad_batches=job.accumulate(1),
        log_every_n_steps=job.log_every_n_steps,
        default_root_dir=folder,
        callbacks=[LightningGate()],
    )
    trainer.fit(Module(), parts.loader_of(job))


def fabric(job: Job, folder: Path) -> None:
    """Fabric with a hand-written loop; progress bar and logger as in its guide."""
    from lightning.fabric import Fabric
    from lightning.fabric.loggers.tensorboard import TensorBoardLogger
    from tqdm import tqdm

    gate, precision = Gate(), cast(Any, job.precision)
    fabric = Fabric(
        accelerator="gpu" if job.device == "cuda" else "cpu", devices=1, precision=precision,
        loggers=TensorBoardLogger(folder),
    )  # fmt: skip
    model = parts.model_of(job)
    optimizer = parts.optimizer_of(job, model)
    schedule = parts.schedule_of(job, optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(parts.loader_of(job))
    accumulate, bar = job.accumulate(1), tqdm()
    for i, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader)), start=1):
        with fabric.no_backward_sync(model, enabled=i % accumulate != 0):
            loss = model(batch["inputs"], batch["targets"])
            fabric.backward(loss / accumulate)
        if i % accumulate:
            continue
        if job.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=job.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.update()
        if i % (job.log_every_n_steps * accumulate) == 0:
            fabric.log("train/loss", loss.item(), step=i // accumulate)
        gate.step()


def accelerate(job: Job, folder: Path) -> None:
    """Hugging Face accelerate's loop."""
    from accelerate import Accelerator
    from tqdm import tqdm

    gate = Gate()
    accelerator = Accelerator(
        cpu=job.device == "cpu", mixed_precision="bf16" if job.precision == "bf16-mixed" else "no",
        gradient_accumulation_steps=job.accumulate(1), log_with="tensorboard", project_dir=folder,
    )  # fmt: skip
    accelerator.init_trackers("accelerate")
    model = parts.model_of(job)
    optimizer = parts.optimizer_of(job, model)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, parts.loader_of(job), parts.schedule_of(job, optimizer)
    )
    bar, step = tqdm(), 0
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        with accelerator.accumulate(model):
            loss = model(batch["inputs"], batch["targets"])
            accelerator.backward(loss)
            if accelerator.sync_gradients and job.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            bar.update()
            if step % job.log_every_n_steps == 0:
                accelerator.log({"train/loss": loss.item()}, step=step)
            gate.step()


class Named(nn.Module):
    """Wrap the model for transformers' Trainer: it returns a dict with the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(inputs, targets)}


def transformers(job: Job, folder: Path) -> None:
    """Hugging Face transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    gate = Gate()

    class GateCallback(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            gate.step()

    model = parts.model_of(job)
    optimizer = parts.optimizer_of(job, model)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=job.micro(1),
        max_steps=job.total_steps,
        gradient_accumulation_steps=job.accumulate(1),
        bf16=job.precision == "bf16-mixed",
        use_cpu=job.device == "cpu",
        logging_steps=job.log_every_n_steps,
        max_grad_norm=job.clip or 0.0,
        remove_unused_columns=False,
        report_to=["tensorboard"],
        disable_tqdm=False,
    )
    Trainer(
        model=Named(model),
        args=arguments,
        train_dataset=parts.Samples(job),
        data_collator=parts.same,
        optimizers=(optimizer, parts.schedule_of(job, optimizer)),
        callbacks=[GateCallback()],
    ).train()


RIVALS = {
    "lightning": lightning,
    "fabric": fabric,
    "accelerate": accelerate,
    "transformers": transformers,
}


def main() -> None:
    name, job, folder = sys.argv[1:]
    torch.set_float32_matmul_precision("high")
    RIVALS[name](Job.load(job), Path(folder))


if __name__ == "__main__":
    main()
