import functools
import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, StackDataset

from armature.models.decoder.model import Decoder
from armature.models.vit.model import VisionTransformer
from armature.optim import schedules
from armature.optim.muon import Muon
from armature.parallel.initialization import initialize_by_name, materialize
from armature.tasks.base import Task, WeightedMean, inputs_and_targets
from armature.tasks.image_classification import ImageClassification
from armature.tasks.language_modeling import LanguageModeling
from tests.trainers import quiet_trainer

# if Slurm is installed, Lightning asks whether to use it
pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command")

DECODER = functools.partial(Decoder, vocab_size=31, context=8, width=16, layers=1, heads=2)
VIT = functools.partial(
    VisionTransformer,
    image_size=4,
    patch_size=2,
    channels=1,
    classes=3,
    width=16,
    layers=1,
    heads=2,
)
FACTORIES = {
    "optimizer": functools.partial(torch.optim.AdamW, lr=0.01),
    "scheduler": schedules.cosine,
}


class Data(L.LightningDataModule):
    """Ten samples; the last two are padding."""

    def __init__(self, *, images: bool, batch_size: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        if images:
            self.inputs = torch.randn(10, 1, 4, 4, generator=generator)
            self.targets = torch.randint(0, 3, (10,), generator=generator)
        else:
            text = torch.randint(0, 31, (10, 9), generator=generator)
            self.inputs, self.targets = text[:, :-1], text[:, 1:].clone()
        self.targets[8:] = -100
        self.batch_size = batch_size

    def bytes_per_token(self, split: str) -> float:
        return {"val": 2.0, "test": 4.0}[split]

    def loader(self) -> DataLoader:
        samples = StackDataset(inputs=self.inputs, targets=self.targets)
        return DataLoader(samples, batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = loader


def trainer(**options) -> L.Trainer:
    return quiet_trainer(max_steps=3, **options)


def ready(task: Task) -> Task:
    """Build and initialize the model, as a strategy does."""
    task.configure_model()
    materialize(task.model, device=torch.device("cpu"))
    initialize_by_name(task.model, seed=0)
    return task


@pytest.mark.parametrize("batch_size", [2, 3, 10])
def test_language_metrics_are_exact_for_any_batch_size(batch_size):
    task = ready(LanguageModeling(DECODER, **FACTORIES))
    data = Data(images=False, batch_size=batch_size)
    (val,) = trainer().validate(task, data, verbose=False)
    (test,) = trainer().test(task, data, verbose=False)
    with torch.no_grad():
        loss = task.model(data.inputs[:8], data.targets[:8]).item()
    assert val["val/loss"] == pytest.approx(loss) == test["test/loss"]
    assert val["val/perplexity"] == pytest.approx(math.exp(loss))
    assert val["val/bits_per_byte"] == pytest.approx(loss / math.log(2) / 2.0)
    assert test["test/bits_per_byte"] == pytest.approx(loss / math.log(2) / 4.0)


def test_metrics_under_bf16_true_are_exact_over_many_batches():
    task = Task(Distance, **FACTORIES)
    data = DataLoader([{"inputs": torch.zeros(1), "targets": torch.ones(1) * 3}] * 300)
    (val,) = trainer(precision="bf16-true").validate(task, data, verbose=False)
    assert val["val/loss"] == 9.0


@pytest.mark.parametrize("batch_size", [2, 3, 10])
def test_image_metrics_are_exact_for_any_batch_size(batch_size):
    task = ready(ImageClassification(VIT, **FACTORIES))
    data = Data(images=True, batch_size=batch_size)
    (val,) = trainer().validate(task, data, verbose=False)
    with torch.no_grad():
        outputs = task.model(data.inputs[:8])
    targets = data.targets[:8]
    right = (outputs.argmax(-1) == targets).float().mean()
    assert val["val/accuracy"] == pytest.approx(right.item())
    assert val["val/loss"] == pytest.approx(task.model.loss(outputs, targets).item())


class Distance(nn.Module):
    def forward(self, inputs, targets):
        return (inputs - targets).square().mean()


def test_a_number_to_predict_may_be_minus_100():
    task = Task(nn.Identity, **FACTORIES)
    task.model = Distance()
    metrics = {"loss": WeightedMean()}
    for numbers in ([0.0, -100.0], [1.0, 1.0], [-100.0]):  # the last: padding
        targets = torch.tensor(numbers)
        task.update(metrics, {"inputs": torch.zeros_like(targets), "targets": targets})
    assert metrics["loss"].compute() == (10_000 / 2 + 1) / 2


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        (FACTORIES["optimizer"], None),
        (FACTORIES["optimizer"], schedules.wsd),
        (functools.partial(Muon, lr=0.01), schedules.constant),
    ],
)
def test_fits(optimizer, scheduler):
    task = LanguageModeling(DECODER, optimizer=optimizer, scheduler=scheduler)
    data = Data(images=False)
    before = {name: value.clone() for name, value in ready(task).state_dict().items()}
    trainer(limit_val_batches=1).fit(task, data)
    assert all(not torch.equal(value, before[name]) for name, value in task.state_dict().items())


def test_preview_continues_the_prompt_and_is_the_same_for_the_same_weights():
    from tokenizers import Tokenizer, models

    task = ready(LanguageModeling(DECODER, **FACTORIES, preview_prompt="a", preview_tokens=5))
    data = Data(images=False)
    assert LanguageModeling(DECODER, **FACTORIES).preview_tokens > 0
    trainer().validate(task, data, verbose=False)
    assert task.preview() is None
    data.tokenizer = Tokenizer(models.BPE(vocab={chr(97 + i): i for i in range(31)}, merges=[]))
    text = task.preview()
    assert text is not None
    assert text.splitlines()[1].startswith("‹a›")
    assert text == task.preview()


@pytest.mark.parametrize(
    ("batch", "has"),
    [({"x": torch.ones(1), "y": torch.ones(1)}, "the keys x, y"), ([torch.ones(1)] * 2, "a list")],
)
def test_a_batch_of_another_form_is_reported(batch, has):
    with pytest.raises(TypeError, match=f"A batch has {has}: each sample of .* must be"):
        inputs_and_targets(batch)
