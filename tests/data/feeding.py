"""Feed data modules to a Trainer of Lightning's, as one rank of several, and stop and resume it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import DictConfig, OmegaConf

from armature.data import feed as feeds
from armature.data.feed import Feed
from armature.training.progress import feed_of
from tests.support.parity.harness import QUIET

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def config(name: str) -> DictConfig:
    """Return the configuration of data=NAME."""
    common, own = (OmegaConf.load(CONFIGS / f"{each}.yaml") for each in ("_loader", name))
    del own["defaults"]
    return OmegaConf.merge(common, own)  # pyright: ignore[reportReturnType]


def build(name: str, **changes: Any) -> Any:
    """Return the prepared data module of data=NAME with these changes; __ in a key is a dot."""
    cfg = OmegaConf.create({"seed": 3, "data": config(name)})
    for key, value in changes.items():
        OmegaConf.update(cfg.data, key.replace("__", "."), value)
    data: Any = feeds.build(cfg).data
    data.prepare_data()
    return data


def feed(data: L.LightningDataModule, **settings: Any) -> Feed:
    """Return the feed of a data module that is set up."""
    made = Feed(data, **{"seed": 5, **settings})
    data.prepare_data()
    made.set_up()
    return made


def loader(data: L.LightningDataModule, split: str = "train", **settings: Any) -> Any:
    """Return the loader that a split is fed from."""
    (found,) = feed(data, **settings).loaders(split)
    return found


def served(data: L.LightningDataModule, split: str = "train", **settings: Any) -> list[Any]:
    """Return the batches of a split."""
    return [*loader(data, split, **settings)]


class Rank(SingleDeviceStrategy):
    """Pretends that this process is one of several on the data axis."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__("cpu")
        self.global_rank = rank
        self.distributed_sampler_kwargs = {"rank": rank, "num_replicas": ranks}

    def process_dataloader(self, dataloader: Any) -> Any:
        return feed_of(self.lightning_module.trainer).replace(dataloader)  # pyright: ignore[reportOptionalMemberAccess]


class Recorder(L.LightningModule):
    """Trains one weight, and records by step the samples that it saw, and what they drew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps: list[list[int]] = []
        self.drawn: list[torch.Tensor] = []
        self.lengths: list[int] = []
        self.validated: list[Any] = []

    def training_step(self, batch, batch_idx):
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.steps.append([])
        numbers, drawn = (
            (batch["targets"], batch["inputs"]) if isinstance(batch, dict) else batch[:2]
        )
        self.steps[-1] += numbers.tolist()
        self.drawn.append(drawn.clone())
        return self.weight.sum()

    def on_train_epoch_end(self):
        self.lengths.append(int(self.trainer.num_training_batches))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEveryStep(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}-end.ckpt")


class RestoreProgress(L.Callback):
    """Set Lightning's count of micro-batches, which a resume under another micro-batch size must
    correct.
    """

    def on_train_start(self, trainer, pl_module):
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        # 1 if the checkpoint was saved in on_train_batch_end: Lightning counts that batch itself
        under_way = progress.processed - progress.completed
        feed = feed_of(trainer)
        epoch, place = divmod(feed.samples_seen, feed.train_size)
        if (
            place < feed.global_batch_size and trainer.current_epoch == epoch - 1
        ):  # Lightning has not closed that epoch
            place += feed.train_size
        seen = place // feed.global_batch_size * feed.batches.accumulate
        progress.ready = progress.started = progress.processed = seen
        progress.completed = seen - under_way


def fit(
    data: L.LightningDataModule,
    task: Any,
    folder: Path,
    *,
    steps: int,
    rank: int = 0,
    ranks: int = 1,
    checkpoint: Path | None = None,
    **settings: Any,
) -> tuple[Any, Feed, L.Trainer]:
    made = feed(data, **settings)
    micro = made.micro_batch_size
    accumulate = 1 if micro == "auto" else made.global_batch_size // ranks // int(micro)
    resumes = checkpoint is not None or ranks > 1
    trainer = L.Trainer(
        **QUIET,
        strategy=Rank(rank, ranks),
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        reload_dataloaders_every_n_epochs=1,
        default_root_dir=folder,
        callbacks=[made, RestoreProgress() if resumes else SaveEveryStep(folder)],
    )
    trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    return task, made, trainer
