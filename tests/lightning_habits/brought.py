"""Modules of several fields, as their authors bring them: audio, molecules, translation, language,
pruning.
"""

from __future__ import annotations

import copy

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torchmetrics import Metric
from torchmetrics.text import CharErrorRate, WordErrorRate

from tests.lightning_habits import batches, data
from tests.lightning_habits.regression import Regressor


# ---------------------------------------------------------------- audio
def recording(index: int) -> torch.Tensor:
    seconds = 64 + 16 * (index % 3)
    times = torch.arange(seconds) / (3 + index % 5)
    return times.sin() + 0.1 * torch.randn(seconds, generator=data.generator(index))


def pad(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "audio": torch.stack([F.pad(sample, (0, 96 - len(sample))) for sample in samples]),
        "lengths": torch.tensor([len(sample) for sample in samples]),
    }


class Recordings(batches.Collated):
    sample = staticmethod(recording)
    collate = staticmethod(pad)


class SignalToNoise(Metric):
    """A metric of one's own, with a list of one value per sample and a sum."""

    full_state_update = False
    higher_is_better = True

    def __init__(self):
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx="cat")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, estimate, target):
        ratio = target.square().sum(1) / (estimate - target).square().sum(1).clamp_min(1e-4)
        self.values.append(10 * ratio.log10())
        self.count += len(target)

    def compute(self):
        values = self.values if torch.is_tensor(self.values) else torch.cat(self.values)
        return values.sum() / self.count


class Enhancer(L.LightningModule):
    """A mask over spectrograms; losses in time and of several resolutions; padded batches with
    their lengths.
    """

    def __init__(self, sizes=(16, 32)):
        super().__init__()
        self.sizes = sizes
        for size in sizes:
            self.register_buffer(f"window_{size}", torch.hann_window(size), persistent=False)
        self.net = nn.Sequential(
            nn.Conv1d(9, 16, 3, padding=1), nn.PReLU(), nn.Conv1d(16, 9, 3, padding=1)
        )
        self.metrics = nn.ModuleDict({"snr": SignalToNoise()})

    def spectrogram(self, audio, size):
        window = getattr(self, f"window_{size}")
        return torch.stft(audio, size, hop_length=size // 4, window=window, return_complex=True)

    def forward(self, audio):
        spectrum = self.spectrogram(audio, 16)
        mask = torch.sigmoid(self.net(spectrum.abs()))
        return torch.istft(
            spectrum * mask, 16, hop_length=4, window=self.window_16, length=audio.shape[1]
        )

    def shared_step(self, batch):
        target, lengths = batch["audio"], batch["lengths"]
        noisy = target + 0.3 * (torch.arange(target.shape[1], device=target.device) * 2.1).cos()
        estimate = self(noisy)
        valid = torch.arange(target.shape[1], device=target.device) < lengths[:, None]
        loss = ((estimate - target).abs() * valid).sum(1).div(lengths).mean()
        for size in self.sizes:
            one, two = self.spectrogram(estimate * valid, size), self.spectrogram(target, size)
            per_sample = (one.abs() - two.abs()).square().sum((1, 2)) / lengths
            loss = loss + 0.01 * per_sample.mean()
        return loss, estimate, target

    def training_step(self, batch, batch_idx):
        loss, _, _ = self.shared_step(batch)
        self.log(
            "train_loss",
            loss,
            batch_size=len(batch["lengths"]),
            on_step=False,
            on_epoch=True,
            sync_dist=True,
        )
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        _, estimate, target = self.shared_step(batch)
        self.metrics["snr"].update(estimate, target)

    def on_validation_epoch_end(self):
        self.log("val_snr", self.metrics["snr"].compute(), prog_bar=True)
        self.metrics["snr"].reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.8, 0.99))
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_snr"},
        }


# ---------------------------------------------------------------- batches
def utterance(index: int) -> tuple[torch.Tensor, int]:
    return data.ragged(index)


def packed(samples) -> tuple[PackedSequence, torch.Tensor]:
    return pack_sequence([x for x, _ in samples], enforce_sorted=False), torch.tensor(
        [y for _, y in samples]
    )


class PackedBatches(batches.Collated):
    """Batches hold torch's PackedSequence."""

    sample = staticmethod(utterance)
    collate = staticmethod(packed)


class ReadsPacked(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.GRU(3, 8, num_layers=2, bidirectional=True)
        self.head = nn.Linear(32, 2)

    def shared_step(self, batch, stage):
        x, y = batch
        _, hidden = self.lstm(x)
        loss = F.cross_entropy(self.head(hidden.transpose(0, 1).flatten(1)), y)
        self.log(
            f"{stage}/loss", loss, on_step=False, on_epoch=True, batch_size=len(y), sync_dist=True
        )
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.shared_step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def blocks(samples) -> dict:
    """One sparse matrix of all graphs' edges."""
    joined = data.join(samples)
    graph = joined["graph"]
    size = len(graph["x"])
    adjacency = torch.sparse_coo_tensor(
        graph["edges"].T, torch.ones(len(graph["edges"])), (size, size)
    ).coalesce()
    return {
        "adjacency": adjacency,
        "x": graph["x"],
        "owner": graph["owner"],
        "y": joined["target"]["y"],
    }


class SparseBatches(batches.Collated):
    """Batches hold a sparse tensor."""

    sample = staticmethod(data.graph)
    collate = staticmethod(blocks)


class SparseGraphNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def shared_step(self, batch, stage):
        h = self.embed(batch["x"]).relu()
        h = h + self.mix(torch.sparse.mm(batch["adjacency"], h)).relu()
        graphs = len(batch["y"])
        pooled = torch.zeros(graphs, 8, device=h.device).index_add(0, batch["owner"], h)
        loss = F.mse_loss(self.head(pooled).squeeze(1), batch["y"])
        self.log(
            f"{stage}/loss", loss, on_step=False, on_epoch=True, batch_size=graphs, sync_dist=True
        )
        return loss

    training_step = lambda self, batch, batch_idx: self.shared_step(batch, "train")  # noqa: E731
    validation_step = lambda self, batch, batch_idx: self.shared_step(batch, "val")  # noqa: E731

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def masked(samples) -> dict[str, torch.Tensor]:
    """transformers' DataCollatorForLanguageModeling: draws which tokens are hidden."""
    ids = torch.stack([sample["input_ids"] for sample in samples])
    hidden = torch.bernoulli(torch.full(ids.shape, 0.3)).bool()
    hidden[:, 0] = True
    return {"input_ids": ids.masked_fill(hidden, 16), "labels": ids.masked_fill(~hidden, -100)}


class MaskedBatches(batches.Collated):
    """The collate_fn draws random numbers."""

    sample = staticmethod(data.tokens)
    collate = staticmethod(masked)


class MaskedBatchesByWorkers(MaskedBatches):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.train, batch_size=8, shuffle=True, collate_fn=self.collate, num_workers=2
        )


class MaskedLanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 16)

    def shared_step(self, batch, stage):
        out = self.head(self.body(self.embed(batch["input_ids"])))
        loss = F.cross_entropy(out.transpose(1, 2), batch["labels"])
        self.log(f"{stage}/loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def training_step(self, batch):
        return self.shared_step(batch, "train")

    def validation_step(self, batch):
        self.shared_step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


# ---------------------------------------------------------------- translation
class Translator(L.LightningModule):
    """Teacher forcing in training, a greedy search in validation, whose texts are scored and
    shown.
    """

    def __init__(self, until_end: bool = False):
        super().__init__()
        self.until_end = until_end
        self.embed = nn.Embedding(16, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 16)
        self.words, self.characters = WordErrorRate(), CharErrorRate()
        self.examples = []

    def forward(self, source, target):
        _, state = self.encoder(self.embed(source))
        out, _ = self.decoder(self.embed(target), state)
        return self.head(out)

    def training_step(self, batch, batch_idx):
        ids = batch["input_ids"]
        source, target = ids[:, :6], ids[:, 6:]
        loss = F.cross_entropy(
            self(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1
        )
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    @torch.no_grad()
    def generate(self, source, first, length):
        tokens = first[:, None]
        for _ in range(length):
            following = self(source, tokens)[:, -1].argmax(1)
            tokens = torch.cat([tokens, following[:, None]], dim=1)
            if self.until_end and (tokens == 3).any(1).all():
                break
        return tokens

    def validation_step(self, batch, batch_idx):
        ids = batch["input_ids"]
        tokens = self.generate(ids[:, :6], ids[:, 6], 5)
        texts = [" ".join(map(str, row)) for row in tokens.tolist()]
        expected = [" ".join(map(str, row)) for row in ids[:, 6:].tolist()]
        self.words(texts, expected)
        self.log("val/wer", self.words, on_epoch=True)
        self.log(
            "val/cer",
            self.characters(texts, expected),
            on_epoch=True,
            sync_dist=True,
            batch_size=len(ids),
        )
        if batch_idx == 0:
            self.examples.append((texts[0], expected[0]))

    def on_validation_epoch_end(self):
        if self.logger is not None and hasattr(self.logger.experiment, "add_text"):
            self.logger.experiment.add_text("example", self.examples[0][0], self.global_step)
        self.print(self.examples[0])
        self.examples.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
        rate = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.02 * min(max(step, 1) ** -0.5, max(step, 1) * 4**-1.5)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": rate, "interval": "step", "frequency": 1},
        }


# ---------------------------------------------------------------- molecules
class ForceField(Regressor):
    """Energies, and forces as their gradients: also while validating."""

    def energy_and_forces(self, x, create_graph):
        with torch.enable_grad():
            x = x.clone().requires_grad_(True)
            energy = self(x)
            (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=create_graph)
        return energy, -forces

    def training_step(self, batch, batch_idx):
        x, y = batch
        energy, forces = self.energy_and_forces(x, create_graph=True)
        loss = F.mse_loss(energy, y) + 0.1 * forces.square().mean()
        self.log("train/loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        energy, forces = self.energy_and_forces(x, create_graph=False)
        self.log_dict(
            {"val/loss": F.mse_loss(energy, y), "val/forces": forces.abs().mean()}, sync_dist=True
        )


class Forces(ForceField):
    """Energies are learned, forces are only looked at while validating."""

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")


class AdaptsToTest(Regressor):
    """Test-time adaptation: a copy of the model takes steps of its own within the validation."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        with torch.enable_grad():
            adapted = copy.deepcopy(self.net)
            optimizer = torch.optim.SGD(adapted.parameters(), lr=0.01)
            for _ in range(2):
                optimizer.zero_grad()
                adapted(x).square().mean().backward()
                optimizer.step()
        self.log("val/loss", F.mse_loss(adapted(x), y), sync_dist=True)


class Pruned(Regressor):
    """Half of the first layer's weights are switched off from the start, by
    torch.nn.utils.prune.
    """

    def __init__(self):
        super().__init__()
        prune.random_unstructured(self.net[0], "weight", amount=0.5)
        prune.l1_unstructured(self.net[2], "weight", amount=2)
