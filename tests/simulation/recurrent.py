"""A recurrent network over sequences of unequal lengths, packed by the module or by the data."""

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils.data import DataLoader

LENGTHS = (9, 7, 4, 2)


class Data(L.LightningDataModule):
    def __init__(self, packed: bool = False, **others: Any) -> None:
        super().__init__()
        self.packed = packed

    def train_dataloader(self) -> Any:
        def collate(_: Any) -> Any:
            sequences = [torch.randn(length, 16) for length in LENGTHS]
            padded = rnn.pad_sequence(sequences, batch_first=True)
            return rnn.pack_sequence(sequences) if self.packed else (padded, torch.tensor(LENGTHS))

        return DataLoader(range(64), batch_size=len(LENGTHS), collate_fn=collate)  # pyright: ignore[reportArgumentType]


class Module(L.LightningModule):
    def __init__(self, cell: str = "LSTM", **others: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, cell)(16, 32, num_layers=2, batch_first=True, bidirectional=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not isinstance(batch, rnn.PackedSequence):
            steps, lengths = batch
            batch = rnn.pack_padded_sequence(
                steps, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
        found, _ = rnn.pad_packed_sequence(self.rnn(batch)[0], batch_first=True)
        ids = found[..., 0].long().flatten()
        torch.bincount(ids, minlength=5)
        torch.repeat_interleave(found[0], ids[: found.shape[1]], dim=0, output_size=7)
        found.detach().float().cpu().numpy()
        return found.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())
