"""The data module under a real Trainer: which samples it trains on, in which order, also after a
resume.
"""

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import Dataset

from armature.data.base import DataModule
from armature.errors import ConfigError
from armature.models.loss import IGNORED
from tests.data import feeding


def drawn(sample, generator):
    return {**sample, "inputs": torch.rand(3, generator=generator)}


class Numbers(Dataset):
    """Sample i is the number i; augmented, its inputs are random numbers."""

    def __init__(self, size: int, *, random: bool = False) -> None:
        self.size = size
        if random:
            self.augment = drawn

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        return {"inputs": torch.tensor([float(index)]), "targets": torch.tensor(index)}


class NumbersData(DataModule):
    def __init__(self, size: int = 21, *, random: bool = False) -> None:
        super().__init__()
        self.size, self.random = size, random

    def dataset(self, split):
        return Numbers(self.size if split == "train" else 8, random=self.random)


class Validated(feeding.Recorder):
    def validation_step(self, batch, batch_idx):
        self.validated += [target for target in batch["targets"].tolist() if target != IGNORED]


def fit(tmp_path, *, data=None, steps, **settings):
    return feeding.fit(
        data or NumbersData(), Validated(), tmp_path, steps=steps,
        **{"global_batch_size": 4, "eval_batch_size": 3, **settings},
    )  # fmt: skip


# Lightning takes any loader without a state dict for one that cannot resume; ours resumes by its
# position
pytestmark = pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*")


def fed(data=None, **settings):
    return feeding.feed(
        data or NumbersData(), **{"global_batch_size": 4, "eval_batch_size": 3, **settings}
    )


@pytest.mark.guarantee
@pytest.mark.parametrize(("before", "after"), [(4, 4), (2, 2), (4, 1), (1, 4)])
def test_a_resume_at_any_step_makes_the_same_steps_under_any_accumulation(tmp_path, before, after):
    whole, _, straight = fit(tmp_path, steps=18, micro_batch_size=before)
    for checkpoint in sorted(tmp_path.glob("*.ckpt")):
        step = int(checkpoint.stem.removesuffix("-end"))
        if step == 18:
            continue
        resumed, feed, trainer = fit(
            tmp_path, steps=18, micro_batch_size=after, checkpoint=checkpoint
        )
        assert resumed.steps == whole.steps[step:], checkpoint
        assert feed.samples_seen == 72
        assert trainer.current_epoch == straight.current_epoch
        assert [n * after for n in resumed.lengths] == [
            n * before for n in whole.lengths[len(whole.lengths) - len(resumed.lengths) :]
        ]


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_depends_on_seed_epoch_and_sample_only(tmp_path, workers):
    def inputs(**settings):
        module, *_ = fit(tmp_path, data=NumbersData(size=8, random=True), steps=4, **settings)
        return torch.cat(module.drawn)

    first = inputs()
    assert len(first.unique()) == first.numel()  # both epochs differ
    torch.testing.assert_close(inputs(micro_batch_size=2, num_workers=workers), first)
    assert not torch.equal(inputs(seed=6), first)


def test_held_out_samples_are_not_augmented_and_the_last_batch_is_a_smaller_one():
    for random in (False, True):
        (loader,) = fed(NumbersData(random=random)).loaders("val")
        found = [batch["inputs"].flatten().tolist() for batch in loader]
        assert found == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_rank_without_a_sample_gets_one_that_does_not_count():
    found = []
    for rank in (0, 8):
        feed, task = fed(eval_batch_size=8), Validated()
        vars(task)["mean_over_targets"] = True
        trainer = L.Trainer(strategy=feeding.Rank(rank, 9), accelerator="cpu", logger=False)
        trainer.strategy.connect(task)
        feed.data.trainer = trainer
        found += [batch["targets"].tolist() for batch in feed.loaders("val")[0]]
    assert found == [[IGNORED], [7]]


def test_an_empty_or_absent_split_is_said_once(tmp_path, caplog):
    for nothing in (Numbers(0), None):
        caplog.clear()
        data = NumbersData()
        data.dataset = lambda split, nothing=nothing: Numbers(21) if split == "train" else nothing
        module, *_ = fit(tmp_path, data=data, steps=13)
        assert (len(module.steps), module.validated) == (13, [])
        assert caplog.text.count("has no samples for val") == 1


def test_data_that_grow_while_training_are_refused():
    feed = fed(NumbersData(size=24))
    loader = feed.train_loader()
    assert len(list(loader)) == 6
    loader.dataset.size += 8  # pyright: ignore[reportAttributeAccessIssue]
    feed.samples_seen = 4
    with pytest.raises(
        ConfigError,
        match=r"24 training samples when the run began, and there are 32 now\. .* known\[",
    ):
        feed.train_loader()


def test_another_number_of_samples_or_seed_on_resume_is_reported(caplog):
    saved = fed().state_dict()
    feed = fed(NumbersData(size=30), seed=6)
    feed.load_state_dict(saved | {"samples_seen": 8, "step": 2})
    assert "8 of 21 training samples" in caplog.text
    assert "in the order of data.seed=5, and continue in that of data.seed=6" in caplog.text
    assert feed.samples_seen == 8
