"""Recurrent networks, ragged batches, graphs, audio and language models."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.lightning_habits.habit import ddp, fsdp


class PackedLSTM(L.LightningModule):
    """Batches of unequal lengths, packed."""

    def __init__(self, hidden: int = 12):
        super().__init__()
        self.lstm = nn.LSTM(3, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def shared_step(self, batch, stage):
        x, lengths, y = batch
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        loss = F.cross_entropy(self.head(h[-1]), y)
        self.log(f"{stage}_loss", loss, batch_size=len(y), sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.shared_step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Output(dict):
    """transformers' ModelOutput: a dict whose entries are attributes."""

    __getattr__ = dict.__getitem__


class TinyLlama(nn.Module):
    """The form of transformers' models: tied weights, a buffer that no checkpoint holds, an
    Output.
    """

    def __init__(self, vocab: int = 16, width: int = 16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        positions = torch.linspace(-1, 1, 12 * width).reshape(12, width)
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, input_ids, labels, attention_mask=None):
        x = self.embed_tokens(input_ids) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss=loss, logits=logits)


def decay_groups(module: nn.Module) -> list[dict]:
    """Weight decay for matrices only, by names, as transformers' examples have it."""
    rest = [(n, p, "bias" in n or "norm" in n) for n, p in module.named_parameters()]
    return [
        {"params": [p for _, p, without in rest if not without], "weight_decay": 0.1},
        {"params": [p for _, p, without in rest if without], "weight_decay": 0.0},
    ]


class LlamaModule(L.LightningModule):
    def __init__(self, learning_rate: float = 5e-2, warmup_steps: int = 3):
        super().__init__()
        self.save_hyperparameters()
        self.model = self.build()

    def build(self):
        return TinyLlama()

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def validation_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.log("val_loss", outputs.loss, sync_dist=True)
        self.log("val_ppl", torch.exp(outputs["loss"]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(decay_groups(self.model), lr=self.hparams.learning_rate)
        total, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup_steps

        def rate(step):
            return min(step / max(1, warmup), max(0.0, (total - step) / max(1, total - warmup)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


HABITS = [
    ddp(PackedLSTM, data="ragged", sample=True),
    fsdp(LlamaModule, data="tokens", sample=True),
]
