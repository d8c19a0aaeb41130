"""A plain Lightning script, as in a tutorial, with the same model and text: a column of the table
of faults.

Lightning's Trainer, ModelCheckpoint and signal handling, a DataLoader with shuffle=True, and
ckpt_path="last".
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from armature.data.corpus import Corpus
from armature.data.text import Windows
from armature.models.decoder.model import Decoder
from benchmarks.faults.cells import EVERY, STEPS
from benchmarks.faults.inject import Inject

CONTEXT, VOCABULARY, GLOBAL_BATCH = 16, 300, 8


class LanguageModel(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder(
            vocab_size=VOCABULARY,
            context=CONTEXT,
            width=32,
            layers=2,
            heads=2,
            tied=True,
            dropout=0.1,
        )

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(batch["inputs"], batch["targets"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(batch["inputs"], batch["targets"]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--fault", default="none")
    parser.add_argument("--at-step", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--folder", default=".")
    args = parser.parse_args()
    L.seed_everything(0, workers=True)
    corpus = Corpus(args.corpus, vocab_size=VOCABULARY)
    loaders = {
        split: DataLoader(
            Windows(corpus.tokens(split), context=CONTEXT, whole=False),
            batch_size=GLOBAL_BATCH // (args.ranks * args.nodes),
            shuffle=split == "train",
        )
        for split in ("train", "val")
    }
    inject = Inject(
        fault=args.fault, at_step=args.at_step, rank=args.rank, folder=args.folder, pause=args.pause
    )
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="auto" if args.ranks * args.nodes == 1 else "ddp",
        devices=args.ranks,
        num_nodes=args.nodes,
        max_steps=STEPS,
        val_check_interval=3,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        default_root_dir=args.run_dir,
        callbacks=[
            inject,
            ModelCheckpoint(
                dirpath=args.run_dir / "checkpoints", every_n_train_steps=EVERY, save_last=True
            ),
        ],
        enable_progress_bar=False,
        log_every_n_steps=EVERY,
    )
    trainer.fit(LanguageModel(), loaders["train"], loaders["val"], ckpt_path="last")


if __name__ == "__main__":
    main()
