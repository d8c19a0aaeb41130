"""The data module under a real Trainer: which samples it trains on, in which order, also after a
resume.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import Dataset

from armature.data.base import DataModule
from armature.errors import ConfigError
from armature.models.loss import IGNORED


class Numbers(Dataset):
    """Sample i is the number i; augmented, its inputs are random numbers."""

    def __init__(self, size: int, *, random: bool = False) -> None:
        self.size = size
        if random:
            self.augment = lambda sample, generator: {
                **sample,
                "inputs": torch.rand(3, generator=generator),
            }

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        return {"inputs": torch.tensor([float(index)]), "targets": torch.tensor(index)}


class NumbersData(DataModule):
    def __init__(self, size: int = 21, *, random: bool = False, **settings) -> None:
        super().__init__(**{"global_batch_size": 4, "eval_batch_size": 3, "seed": 5, **settings})
        self.size, self.random = size, random

    def dataset(self, split):
        return Numbers(self.size if split == "train" else 8, random=self.random)


class Recorder(L.LightningModule):
    """Trains one weight, and records the samples that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps: list[list[int]] = []
        self.inputs: list[torch.Tensor] = []
        self.lengths: list[int] = []
        self.validated: list[int] = []
        self._step: list[int] = []

    def training_step(self, batch, batch_idx):
        self._step += batch["targets"].tolist()
        self.inputs.append(batch["inputs"].clone())
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.steps.append(sorted(self._step))
            self._step = []
        return self.weight.sum()

    def on_train_epoch_end(self):
        self.lengths.append(int(self.trainer.num_training_batches))

    def validation_step(self, batch, batch_idx):
        self.validated += [target for target in batch["targets"].tolist() if target != IGNORED]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Ranks(SingleDeviceStrategy):
    """Pretends that this process is one of several on the data axis."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__("cpu")
        self.distributed_sampler_kwargs = {"rank": rank, "num_replicas": ranks}


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
        data = trainer.datamodule
        epoch, place = data.epoch_position()
        if (
            place < data.global_batch_size and trainer.current_epoch == epoch - 1
        ):  # Lightning has not closed that epoch
            place += data.train_size
        seen = place // data.global_batch_size * data.batches.accumulate
        progress.ready = progress.started = progress.processed = seen
        progress.completed = seen - under_way


def fit(
    data: DataModule,
    tmp_path: Path,
    *,
    steps: int,
    checkpoint: Path | None = None,
    rank=0,
    ranks=1,
    **settings,
):
    module = Recorder()
    trainer = L.Trainer(
        strategy=Ranks(rank, ranks),
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=data.global_batch_size
        // ranks
        // (settings.pop("micro", None) or data.global_batch_size),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
        callbacks=[SaveEveryStep(tmp_path)]
        if checkpoint is None and ranks == 1
        else [RestoreProgress()],
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return module, trainer


# Lightning takes any loader without a state dict for one that cannot resume; ours resumes by its
# position
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.filterwarnings(
        "ignore:.*LeafSpec.*:FutureWarning"
    ),  # Lightning 2.6 with torch 2.13
]


def test_epochs_under_a_trainer_lose_no_sample(tmp_path):
    data = NumbersData()
    module, trainer = fit(
        data, tmp_path, steps=21
    )  # 84 samples: four epochs, of 6, 5, 5 and 5 steps
    seen = [target for step in module.steps for target in step]
    assert sorted(seen) == sorted(list(range(21)) * 4)
    assert module.lengths == [6, 5, 5, 5]
    assert trainer.current_epoch == 4
    assert data.samples_seen == 84
    assert sorted(module.validated) == sorted(list(range(8)) * 4)


@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("saved", ["", "-end"])
def test_resume_at_any_step_makes_the_same_steps_as_an_uninterrupted_run(tmp_path, micro, saved):
    def make():
        return NumbersData(micro_batch_size=micro)

    whole, straight = fit(make(), tmp_path, steps=18, micro=micro)
    for checkpoint in sorted(tmp_path.glob(f"*[0-9]{saved}.ckpt")):
        step = int(checkpoint.stem.removesuffix("-end"))
        if step == 18:
            continue
        data = make()
        resumed, trainer = fit(data, tmp_path, steps=18, micro=micro, checkpoint=checkpoint)
        assert resumed.steps == whole.steps[step:], checkpoint
        assert data.samples_seen == 72
        assert trainer.current_epoch == straight.current_epoch
        assert resumed.lengths == whole.lengths[len(whole.lengths) - len(resumed.lengths) :]
        torch.testing.assert_close(resumed.weight, whole.weight)


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (4, 1),
        (1, 4),
    ],
)
def test_resume_under_another_accumulation_makes_the_same_steps(tmp_path, before, after):
    whole, straight = fit(NumbersData(micro_batch_size=before), tmp_path, steps=18, micro=before)
    for checkpoint in sorted(tmp_path.glob("*.ckpt")):
        step = int(checkpoint.stem.removesuffix("-end"))
        if step < 18:
            data = NumbersData(micro_batch_size=after)
            resumed, trainer = fit(data, tmp_path, steps=18, micro=after, checkpoint=checkpoint)
            assert resumed.steps == whole.steps[step:], checkpoint
            assert trainer.current_epoch == straight.current_epoch, checkpoint
            assert [n * after for n in resumed.lengths] == [
                n * before for n in whole.lengths[len(whole.lengths) - len(resumed.lengths) :]
            ]


def test_ranks_and_accumulation_see_the_same_samples_in_each_step(tmp_path):
    alone, _ = fit(NumbersData(), tmp_path, steps=12)
    parts = []
    for rank in range(2):
        module, _ = fit(
            NumbersData(micro_batch_size=1), tmp_path, steps=12, rank=rank, ranks=2, micro=1
        )
        parts.append(module.steps)
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == alone.steps


def test_resume_with_another_global_batch_continues_at_the_position(tmp_path):
    whole, _ = fit(NumbersData(), tmp_path, steps=20)
    end_of_first_epoch = tmp_path / "6.ckpt"
    resumed, _ = fit(
        NumbersData(global_batch_size=8), tmp_path, steps=9, checkpoint=end_of_first_epoch
    )
    assert [sorted(chain(*whole.steps[i : i + 2])) for i in (6, 8, 10)] == resumed.steps


def test_epoch_position_counts_from_the_epochs_first_sample():
    data = NumbersData(micro_batch_size=2)
    for position, expected in (
        (0, 0),
        (20, 10),
        (24, 0),
        (28, 2),
    ):  # the second epoch's first step starts at 24
        data.samples_seen = position
        epoch, place = data.epoch_position()
        assert epoch * data.train_size + place == position
        assert place // data.global_batch_size * data.batches.accumulate == expected


def test_a_global_batch_larger_than_the_data_trains_on(tmp_path):
    module, _ = fit(NumbersData(size=3, global_batch_size=8), tmp_path, steps=9)
    assert len(module.steps) == 9
    assert sorted(chain(*module.steps)) == sorted(list(range(3)) * 24)


@pytest.mark.parametrize("limit", [4, "batch"])
def test_train_limit_keeps_to_the_first_samples(limit, tmp_path):
    data = NumbersData(train_limit=limit, global_batch_size=4)
    assert data.train_size == 4
    module, _ = fit(data, tmp_path, steps=5)
    assert module.steps == [[0, 1, 2, 3]] * 5


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_depends_on_seed_epoch_and_sample_only(tmp_path, workers):
    def inputs(**settings):
        module, _ = fit(
            NumbersData(size=8, random=True, **settings),
            tmp_path,
            steps=4,
            micro=settings.get("micro_batch_size"),
        )
        return torch.cat(module.inputs)

    first = inputs()
    assert len(first.unique()) == first.numel()  # both epochs differ
    torch.testing.assert_close(inputs(micro_batch_size=2, num_workers=workers), first)
    assert not torch.equal(inputs(seed=6), first)


def test_held_out_samples_are_not_augmented():
    data = NumbersData(random=True)
    batch = next(iter(data.val_dataloader()))
    assert batch["inputs"].flatten().tolist() == [0.0, 1.0, 2.0]


def test_the_last_batch_is_a_smaller_one():
    batches = list(NumbersData().val_dataloader())
    assert [batch["targets"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_rank_without_a_sample_gets_one_that_does_not_count():
    data = NumbersData(eval_batch_size=8)
    data._rank_and_ranks = lambda: (0, 9)
    (empty,) = data.val_dataloader()
    data._rank_and_ranks = lambda: (8, 9)
    (last,) = data.val_dataloader()
    assert [batch["targets"].tolist() for batch in (empty, last)] == [[IGNORED], [7]]


def test_an_empty_split_is_not_warned_of(tmp_path):
    data = NumbersData()
    data.dataset = lambda split: Numbers(21 if split == "train" else 0)
    module, _ = fit(data, tmp_path, steps=2)
    assert len(module.steps) == 2
    assert module.validated == []


def test_a_split_may_be_absent():
    data = NumbersData()
    data.dataset = lambda split: None
    assert list(data.val_dataloader()) == []


def test_the_same_loader_serves_every_epoch():
    data = NumbersData(num_workers=1)
    assert data.train_dataloader() is data.train_dataloader()


def test_accumulation_that_contradicts_the_batch_sizes_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"accumulate_grad_batches=1\), but .* Pass accumulate_grad_batches=2"
    ):
        fit(NumbersData(micro_batch_size=2), tmp_path, steps=1, micro=4)


def test_data_that_grow_while_training_are_refused():
    data = NumbersData(size=24)
    loader = data.train_dataloader()
    assert len(list(loader)) == 6
    data._dataset("train").size += 8  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        ConfigError,
        match=r"24 training samples when the run began, and there are 32 now\. .* known\[",
    ):
        list(loader)


def test_another_number_of_samples_on_resume_is_reported(caplog):
    data = NumbersData(size=30)
    with caplog.at_level("WARNING"):
        data.load_state_dict({"samples_seen": 8, "step": 2, "train_size": 21})
    assert "8 of 21 training samples" in caplog.text
    assert data.samples_seen == 8


def test_another_seed_on_resume_is_reported(caplog):
    state = NumbersData().state_dict()
    with caplog.at_level("WARNING"):
        NumbersData(seed=6).load_state_dict(state)
    assert "in the order of data.seed=5, and continue in that of data.seed=6" in caplog.text


def test_state_is_plain_numbers():
    saved = NumbersData().state_dict()
    assert saved == {"samples_seen": 0, "step": 0, "train_size": 21, "seed": 5, "skipped": []}


class OneDataset(DataModule):
    def __init__(self, *, returned: Any, **loader: Any) -> None:
        super().__init__(**loader)
        self.returned = returned

    def dataset(self, split: Any) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "says"),
    [(None, "has no training samples"), ([], "has no training samples"), (5, "returns a int")],
)
def test_a_data_module_without_training_samples_is_refused_by_name(returned, says):
    with pytest.raises(ConfigError, match=f"data: OneDataset.*{says}"):
        _ = OneDataset(returned=returned, global_batch_size=4).train_size
    with pytest.raises(ConfigError, match=r"data: DataModule needs a method dataset\(split\)"):
        _ = DataModule(global_batch_size=4).train_size
