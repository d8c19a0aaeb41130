"""A module that reads values of tensors in every way that users do, and one that no simulation can run."""

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class ReadsValues(L.LightningModule):
    """Classifies images (B, 1, H, W) with BatchNorm and an LSTM, and optimizes manually."""

    def __init__(self, classes: int = 10):
        super().__init__()
        self.automatic_optimization = False
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.lstm, self.head, self.unused = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, classes), nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch["inputs"], batch["targets"]
        features = self.norm(self.conv(x)).mean(-1).transpose(1, 2)
        lengths = torch.full(y.shape, features.shape[1])
        packed, _ = self.lstm(pack_padded_sequence(features, lengths, batch_first=True, enforce_sorted=False))
        out, lengths = pad_packed_sequence(packed, batch_first=True)
        logits = self.head(out[:, -1])
        loss = F.cross_entropy(logits, y)
        if loss > 10 or torch.isnan(loss):
            loss = loss * 2
        wrong = logits[logits.argmax(-1) != y]
        self.counts = (wrong.abs().sum().item(), len(torch.unique(y)), y.nonzero().shape, lengths.shape)
        assert y.cpu().numpy().shape == y.shape
        assert torch.bincount(y, minlength=10).shape == (10,)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class NeedsKernel(ReadsValues):
    """Calls an operator that has no form without values."""

    def training_step(self, batch, batch_idx):
        x = batch["inputs"].flatten()
        torch.segment_reduce(x, "sum", lengths=torch.full((1,), len(x), device=x.device))


class FailsOnValues(ReadsValues):
    def training_step(self, batch, batch_idx):
        if batch["targets"].float().sum().item() < 5:
            raise ValueError("too few targets")
