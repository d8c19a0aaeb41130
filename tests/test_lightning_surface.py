"""An ordinary LightningModule and ordinary loggers: images, values for the bar, the configuration
in every logger.
"""

import csv
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from armature.checkpoint import state
from tests import running

pytestmark = pytest.mark.slow
COMMAND = [
    "experiment=example",
    "task._target_=tests.test_lightning_surface.Images",
    "launch.allowed_packages=[armature,torch,lightning.pytorch,tests]",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.max_steps=4",
    "trainer.max_epochs=null",
    "trainer.limit_val_batches=0.5",
    "trainer.test_at_end=false",
    "checkpoint.monitor=val/loss",
    "checkpoint.mode=min",
    "run.tags=[first,try]",
    "run.notes='a note'",
]


class Images(L.LightningModule):
    """Builds its own network and optimizer, and logs an image in the way of Lightning's
    documentation.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
        )

    def loss(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch["inputs"]), batch["targets"])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("mine", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))
        self.logger.experiment.add_image("picture", torch.zeros(3, 4, 4), self.global_step)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Failing(Images):
    """Fails in its third step, on one rank."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == self.trainer.world_size - 1:
            raise ValueError("the user's own error")
        return super().training_step(batch, batch_idx)


class Watcher(TensorBoardLogger):
    """Has a method `watch`, as WandbLogger."""

    def watch(self, module):
        self.watched = module


class Watched(Images):
    def setup(self, stage):
        self.logger.watch(self)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    def predict_step(self, batch, batch_idx):
        self.logger.experiment.add_image("picture", torch.zeros(3, 4, 4))
        return self.net(batch["inputs"])


class FirstWeights(L.Callback):
    """Writes the weights with which training begins."""

    def on_train_start(self, trainer, pl_module):
        torch.save(pl_module.net.state_dict(), Path(trainer.default_root_dir) / "first.pt")


class Away(CSVLogger):
    """Its service does not answer."""

    def log_metrics(self, metrics, step=None):
        raise ConnectionError("no answer")

    def finalize(self, status):
        raise ConnectionError("no answer")


class Unreachable(CSVLogger):
    @property
    def experiment(self):
        raise ConnectionError("no route")


def test_the_configuration_and_the_module_s_images_are_in_every_logger(forks):
    ended = forks.train(
        *COMMAND,
        "run.name=a",
        "logger=[tensorboard,csv]",
        "+task.width=4",
        "+logger.tensorboard.sub_dir=${oc.env:USER_OF_LOGS,x}",
    )
    assert "does not take the groups model, optimizer, scheduler: they are not used" in ended.output
    run = forks.cwd / "outputs" / "a"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["run"]["tags"], config["run"]["notes"], config["run"]["group"]) == (
        ["first", "try"],
        "a note",
        None,
    )
    assert config["run"]["git"].keys() == {"commit", "dirty"}
    (events,) = (run / "tensorboard").rglob("events.*")
    shown = EventAccumulator(str(events.parent))
    shown.Reload()
    assert shown.Tags()["images"] == ["picture"]
    written = yaml.safe_load((run / "csv" / "version_0" / "hparams.yaml").read_text())
    assert written["run"] == config["run"]
    assert written["task"]["width"] == 4
    assert written["logger"]["tensorboard"]["sub_dir"] == "${oc.env:USER_OF_LOGS,x}"
    with (run / "csv" / "version_0" / "metrics.csv").open() as file:
        assert any(row["val/loss"] for row in csv.DictReader(file))


def test_what_a_module_logs_does_nothing_when_it_is_measured_or_predicts(forks):
    watcher = "+logger.watcher={_target_:tests.test_lightning_surface.Watcher,save_dir:.}"
    task = "task._target_=tests.test_lightning_surface.Watched"
    forks.train(*COMMAND, task, "run.name=i", "logger=null", watcher)
    run = forks.cwd / "outputs" / "i"
    words, before = (str(run), COMMAND[2]), sorted(run.rglob("*"))
    measured = running.script("evaluate.py", *words, "--split", "val", cwd=forks.cwd)
    assert "val/loss" in measured.stdout
    running.script("predict.py", *words, "out=p.csv", cwd=forks.cwd)
    assert sorted(run.rglob("*")) == before


def test_a_bar_of_lightning_s_replaces_ours(forks):
    bar = "+callbacks.bar._target_=lightning.pytorch.callbacks.TQDMProgressBar"
    ended = forks.train(*COMMAND, "run.name=c", "logger=none", bar)
    assert "mine=" in ended.output
    assert Path(forks.cwd / "outputs" / "c" / "summary.json").exists()


def test_a_service_that_is_away_ends_no_run_of_two_ranks(forks):
    away = "+logger.away={_target_:tests.test_lightning_surface.Away,save_dir:.}"
    ended = forks.train(
        *COMMAND, "run.name=d", away, "trainer.devices=2", "trainer.limit_val_batches=null", ranks=2
    )
    assert "Away failed in log_metrics (no answer). The run continues" in ended.output
    assert (forks.cwd / "outputs" / "d" / "summary.json").exists()


def test_a_service_that_cannot_be_opened_is_one_line(forks):
    away = "+logger.away={_target_:tests.test_lightning_surface.Unreachable,save_dir:.}"
    ended = forks.train(*COMMAND, "run.name=e", away, "trainer.devices=2", ranks=2, expect=2)
    assert "logger: Unreachable could not be opened (no route). Correct its group" in ended.output
    assert "Traceback" not in ended.output


ON_EXCEPTION = (
    "+callbacks.saves={_target_:lightning.pytorch.callbacks.OnExceptionCheckpoint,dirpath:saved}"
)


@pytest.mark.timeout(120)
def test_an_error_on_one_rank_ends_a_run_that_would_save_then(forks):
    failing = "task._target_=tests.test_lightning_surface.Failing"
    words = ["run.name=f", ON_EXCEPTION, "trainer.devices=2", "trainer.limit_val_batches=null"]
    shown = forks.train(*COMMAND, failing, *words, ranks=2, expect=1).output
    assert "on_exception.ckpt is not saved after an error: that needs all 2 ranks" in shown
    assert "ValueError: the user's own error" in shown
    assert not (forks.cwd / "saved").exists()


def test_a_run_begins_with_its_own_weights_beside_another_s_file(forks):
    first = "+callbacks.first={_target_:tests.test_lightning_surface.FirstWeights}"
    failing = "task._target_=tests.test_lightning_surface.Failing"
    forks.train(*COMMAND, failing, "run.name=g", ON_EXCEPTION, first, expect=1)
    assert (forks.cwd / "saved" / "on_exception.ckpt").exists()  # of a run of one process
    ended = forks.train(*COMMAND, "run.name=h", ON_EXCEPTION, first)
    assert "without a model" not in ended.output
    begun, expected = (torch.load(forks.cwd / "outputs" / name / "first.pt") for name in ("h", "g"))
    assert begun.keys() == expected.keys()
    for name, weight in begun.items():
        assert torch.equal(weight, expected[name]), name


class EndsWithOthers(L.Callback):
    """Puts other weights in at the end, as StochasticWeightAveraging does."""

    def on_train_end(self, trainer, pl_module):
        assert trainer.ckpt_path  # only a resume gets further
        for weight in pl_module.parameters():
            weight.data.fill_(0.5)


class EndsItself(Images):
    def on_train_end(self):
        EndsWithOthers.on_train_end(None, self.trainer, self)  # pyright: ignore[reportArgumentType]


def test_a_run_without_loggers_and_callbacks_saves(forks):
    forks.train(*COMMAND, "run.name=without", "logger=null", "callbacks=null")
    assert state.load_full_state_dict(
        forks.cwd / "outputs" / "without" / "checkpoints" / "step=000004"
    )


@pytest.mark.parametrize("every", ["4", "null"])
@pytest.mark.parametrize(
    "ends",
    [
        "+callbacks.ends={_target_:tests.test_lightning_surface.EndsWithOthers}",
        "task._target_=tests.test_lightning_surface.EndsItself",
    ],
)
def test_the_last_checkpoint_has_the_weights_of_an_end_that_failed_first(forks, every, ends):
    name = f"end{every}{ends[-5:-1]}"
    for code in (1, 0):
        forks.train(
            *COMMAND,
            "data.train_limit=160",
            f"run.name={name}",
            ends,
            f"checkpoint.every_n_steps={every}",
            expect=code,
        )
    path = forks.cwd / "outputs" / name / "checkpoints" / "step=000004"
    assert all((weight == 0.5).all() for weight in state.load_full_state_dict(path).values())
