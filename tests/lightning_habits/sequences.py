"""Recurrent networks, ragged batches, graphs and language models."""

import glob
import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class LSTMClassifier(L.LightningModule):
    def __init__(self, hidden: int = 12):
        super().__init__()
        self.lstm = nn.LSTM(3, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, x):
        _, (h, _) = self.lstm(x)
        return self.head(h[-1])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7),
        }


class PackedLSTM(LSTMClassifier):
    """Batches of unequal lengths, packed."""

    def logits(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.head(h[-1])

    def training_step(self, batch, batch_idx):
        x, lengths, y = batch
        loss = F.cross_entropy(self.logits(x, lengths), y)
        self.log("train_loss", loss, batch_size=len(y), sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, lengths, y = batch
        self.log(
            "val_loss",
            F.cross_entropy(self.logits(x, lengths), y),
            batch_size=len(y),
            sync_dist=True,
        )


class GraphNet(L.LightningModule):
    """One big graph per batch: a nested dict of unequal first dimensions, with strings beside the
    tensors.
    """

    def __init__(self):
        super().__init__()
        self.message, self.update, self.readout = (
            nn.Linear(8, 12),
            nn.Linear(16, 12),
            nn.Linear(12, 1),
        )

    def forward(self, graph):
        x, (source, target) = graph["x"], graph["edges"].T
        messages = torch.relu(self.message(torch.cat([x[source], x[target]], dim=1)))
        total = torch.zeros(len(x), 12, device=x.device, dtype=x.dtype).index_add(
            0, target, messages
        )
        nodes = torch.relu(self.update(torch.cat([x, total], dim=1)))
        graphs = int(graph["owner"].max()) + 1
        sums = torch.zeros(graphs, 12, device=x.device, dtype=x.dtype).index_add(
            0, graph["owner"], nodes
        )
        return self.readout(sums / graph["owner"].bincount(minlength=graphs)[:, None])[:, 0]

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch["graph"]), batch["target"]["y"])

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["graph"]), batch["target"]["y"])
        self.log("val/loss", loss, batch_size=len(batch["ids"]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Output(dict):
    """transformers' ModelOutput: a dict whose entries are attributes."""

    __getattr__ = dict.__getitem__


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (
            nn.Linear(width, 2 * width, bias=False),
            nn.Linear(width, 2 * width, bias=False),
        )
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, cos, sin):
        b, t, w = x.shape
        h = self.norm1(x)
        q, k, v = (
            f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = (
            z * cos + torch.cat([-z[..., z.shape[-1] // 2 :], z[..., : z.shape[-1] // 2]], -1) * sin
            for z in (q, k)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w)
        )
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TinyLlama(nn.Module):
    """The form of transformers' LlamaForCausalLM: tied weights, rotary buffers that no checkpoint
    holds, an Output.
    """

    def __init__(
        self, vocab: int = 16, width: int = 16, layers: int = 2, heads: int = 2, tied: bool = True
    ):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        half = width // heads // 2
        inv_freq = 1.0 / 100 ** (torch.arange(half).float() / half)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, input_ids, labels=None, attention_mask=None):
        angles = torch.outer(
            torch.arange(input_ids.shape[1], device=input_ids.device).float(), self.inv_freq
        ).repeat(1, 2)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        logits = self.lm_head(self.norm(x))
        if labels is None:
            return Output(logits=logits)
        return Output(
            loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            logits=logits,
        )


def decay_groups(module: nn.Module) -> list[dict]:
    """Weight decay for matrices only, by names, as transformers' examples have it."""
    no_decay = ["bias", "norm"]
    named = list(module.named_parameters())
    return [
        {
            "params": [p for n, p in named if not any(word in n for word in no_decay)],
            "weight_decay": 0.1,
        },
        {
            "params": [p for n, p in named if any(word in n for word in no_decay)],
            "weight_decay": 0.0,
        },
    ]


EXTRA_PACKAGES = glob.glob(
    str(Path(__file__).parents[2] / ".venv-extras/lib/python3*/site-packages")
)


class LlamaModule(L.LightningModule):
    """Built in __init__."""

    def __init__(self, learning_rate: float = 5e-3, warmup_steps: int = 3):
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
        optimizer = torch.optim.AdamW(
            decay_groups(self.model), lr=self.hparams.learning_rate, eps=1e-6
        )
        total, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup_steps

        def rate(step):
            return min(step / max(1, warmup), max(0.0, (total - step) / max(1, total - warmup)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


class LateLlama(LlamaModule):
    """Built in configure_model; the loss of the outputs' dict is returned with it."""

    def __init__(self, learning_rate: float = 5e-3, warmup_steps: int = 3):
        super(LlamaModule, self).__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.model = TinyLlama(tied=False)

    def training_step(self, batch, batch_idx):
        outputs = self.model(**batch)
        self.log("train_ppl", outputs["loss"].exp(), on_step=True, sync_dist=True)
        return {"loss": outputs["loss"], "log": {"logits": outputs["logits"].detach()}}


class TransformersLlama(LlamaModule):
    """transformers' own, from the environment of alternatives: in ours it would slow down every
    start.
    """

    def build(self):
        sys.path += EXTRA_PACKAGES
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            tie_word_embeddings=True,
            use_cache=False,
        )
        torch.manual_seed(0)
        return LlamaForCausalLM(config)
