"""`trainer.on_nan`: what a run does about a loss or a gradient that is not finite."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import Strategy

import armature
from armature import run_dir, worker
from armature.checkpoint import storage
from armature.checkpoint.state import load_tensors
from armature.data.feed import Feed
from armature.errors import ConfigError, NotFinite
from armature.strategies.single import SingleDevice
from armature.strategies.update_mask import UpdateMask
from armature.training import not_finite
from tests import running
from tests.data.feeding import feed
from tests.nan_parts import NumberedData
from tests.plain_runs import stop_at
from tests.test_resume import BASE, CONFIGS

PARTS = [
    f"hydra.searchpath=[file://{CONFIGS}]",
    *(each for each in BASE[2:] if each not in ("model=dropout_mlp", "data=recorded")),
    *("model=breaking", "data=numbered", "strategy=single", "trainer.devices=1"),
]
BAD, BAD_OF_RANK_1 = 29, 15  # samples of step 7


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train in this process; return the run's directory, and the error that ended it."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str, name: str = "run") -> tuple[Path, Exception | None]:
        cfg = run_dir.decide(armature.compose(*PARTS, f"run.name={name}", *overrides), label="run")
        folder = run_dir.write(cfg, [])
        try:
            worker.run(run_dir.read(folder))
        except NotFinite as error:
            return folder, error
        return folder, None

    return run


def bad(policy: str, *samples: int, **model: str) -> list[str]:
    return [
        f"trainer.on_nan={policy}",
        f"model.samples={list(samples)}",
        *(f"model.{k}={v}" for k, v in model.items()),
    ]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return weights, buffers, optimizer state and average of the last checkpoint."""
    checkpoint = folder / "checkpoints" / (folder / "checkpoints" / "last").read_text().strip()
    names = storage.read_metadata(checkpoint).state_dict_metadata
    return load_tensors(checkpoint, list(names), names)


def assert_same(folder: Path, other: Path) -> None:
    assert (folder / "metrics.csv").read_text() == (other / "metrics.csv").read_text()
    mine, theirs = tensors(folder), tensors(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name


def events(folder: Path) -> list[dict]:
    return json.loads((folder / not_finite.FILE).read_text())["events"]


# ---------------------------------------------------------------- stop
@pytest.mark.slow
def test_a_run_ends_with_the_step_the_rank_and_the_samples(train):
    folder, error = train(*bad("stop", BAD))
    assert error is not None
    assert error.exit_code == 1
    assert "at step 7 (trainer.on_nan=stop), on rank 0 (samples " in str(error)
    assert "data.skip_steps=[7]" in str(error)
    (event,) = events(folder)
    assert (event["step"], event["ranks"]) == (7, [0])
    assert BAD in event["samples"][0]
    rows = running.rows(folder)
    assert (
        int(rows[-1]["step"]) >= 7
    )  # the row is there, but no checkpoint of that step or a later one
    last = (folder / "checkpoints" / "last").read_text().strip()
    assert last == "step=000006"
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in tensors(folder).values())


@pytest.mark.slow
def test_ignore_trains_on(train, caplog):
    folder, error = train(*bad("ignore", BAD))
    assert error is None
    assert not (folder / not_finite.FILE).exists()
    assert "train/loss is nan at step 7" in caplog.text


# ---------------------------------------------------------------- skip
EMA_ON = "+callbacks.ema={_target_:armature.callbacks.ema.EMA,decay:0.9}"


@pytest.mark.slow
def test_a_skipped_step_changes_no_weight_no_state_no_buffer_and_no_average(train):
    other, _ = train(
        *bad("skip"), EMA_ON, "trainer.max_steps=5", "scheduler=constant", name="shorter"
    )
    skipped, error = train(*bad("skip", 49), EMA_ON, "trainer.max_steps=6", "scheduler=constant")
    assert error is None
    assert running.summary(skipped)["skipped_steps"] == 1  # the last one
    assert running.summary(other)["skipped_steps"] == 0
    mine, before = tensors(skipped), tensors(other)
    for name, value in mine.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[name])), name


@pytest.mark.slow
def test_a_run_with_a_skipped_step_resumes_exactly(train):
    straight, _ = train(*bad("skip", BAD), EMA_ON, name="straight")
    assert running.summary(straight)["skipped_steps"] == 1
    resumed, _ = train(*bad("skip", BAD), EMA_ON, stop_at(8), name="resumed")
    train(*bad("skip", BAD), EMA_ON, name="resumed")
    assert_same(resumed, straight)
    assert running.summary(resumed)["skipped_steps"] == 1


# ---------------------------------------------------------------- the mask
class Centered(torch.nn.Module):
    """Puts other tensors in the place of its buffers, one of them of another shape."""

    center: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.ones(2))
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.center = 0.9 * self.center + x
        self.seen = torch.cat([self.seen, x])
        return self.center


def test_buffers_that_are_assigned_anew_get_their_values_back():
    module = Centered()
    mask = UpdateMask(module)  # pyright: ignore[reportArgumentType]
    for value in (1.0, torch.nan, 2.0):
        mask.step_begins()
        module(torch.full((2,), value))
        mask.left_out = value != value
        mask.step_ended()
    torch.testing.assert_close(module.center, torch.full((2,), 0.9 * 1.9 + 2))
    assert module.seen.tolist() == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("skipped", [True, False])
def test_a_step_that_fp16s_scaler_skips_leaves_the_buffers_alone(skipped, monkeypatch):
    module = BoringModel()
    module.part = part = Centered()
    strategy = SingleDevice()
    strategy.connect(module)
    strategy.on_nan, strategy.optimizers = "skip", []
    monkeypatch.setattr(SingleDevice, "scaler", object())
    monkeypatch.setattr(SingleDevice, "skipped_step", skipped)
    monkeypatch.setattr(Strategy, "optimizer_step", lambda *args, **kwargs: None)
    strategy.update_mask = mask = strategy._make_mask()
    assert mask is not None
    mask.step_begins()
    part(torch.ones(2))
    strategy.optimizer_step(torch.optim.SGD(module.parameters()), None)
    assert strategy.left_out is skipped
    assert part.center[0] == pytest.approx(1.0 if skipped else 1.9)
    strategy.on_nan = "stop"
    assert strategy._make_mask() is None


# ---------------------------------------------------------------- data.skip_steps
def batches_of(data: Feed, first: int, last: int) -> list[list[int]]:
    return [data.indices_of_step(8 * (step - 1))[0] for step in range(first, last + 1)]


def numbered(*skip_steps: int, made: int = 0, skipped: Any = ()) -> Feed:
    data = feed(NumberedData(samples=60, broken=[]), global_batch_size=8, skip_steps=skip_steps)
    state = {"samples_seen": 8 * made, "step": made, "skipped": skipped}
    data.load_state_dict(data.state_dict() | state)
    return data


def test_other_steps_keep_their_samples():
    whole = batches_of(numbered(), 1, 20)
    assert batches_of(numbered(7), 1, 12) == whole[:6] + whole[7:13]
    # the run counts on: its step 12 was the 13th
    assert batches_of(numbered(7, 12), 1, 15) == whole[:6] + whole[7:12] + whole[13:17]
    # typed at a resume, from before the step
    assert batches_of(numbered(7, made=6), 7, 12) == whole[7:13]


def test_a_resume_behind_the_step_leaves_the_same_out():
    whole = batches_of(numbered(), 1, 20)
    saved = [[7, 48, 8]]
    for typed in ((), (7,)):  # a command that does not repeat it goes on all the same
        assert batches_of(numbered(*typed, made=9, skipped=saved), 10, 12) == whole[10:13]
    data = numbered(7, 12, made=9, skipped=saved)
    assert batches_of(data, 10, 15) == whole[10:12] + whole[13:17]
    assert data._parts() == {7: (48, 8), 12: (96, 8)}


def test_steps_that_are_made_cannot_be_left_out():
    with pytest.raises(ConfigError, match=r"data.skip_steps=\[7\]: the checkpoint is of step 9"):
        numbered(7, made=9)


@pytest.mark.slow
def test_a_run_that_ended_continues_without_the_samples(train):
    train(*bad("stop", BAD), name="ended")
    ended, error = train(*bad("stop", BAD), "data.skip_steps=[7]", name="ended")
    assert error is None
    straight, error = train(*bad("stop", BAD), "data.skip_steps=[7]", name="straight")
    assert error is None
    assert_same(ended, straight)
    stopped, _ = train(*bad("stop", BAD), "data.skip_steps=[7]", stop_at(8), name="stopped")
    train(*bad("stop", BAD), name="stopped")
    assert_same(stopped, straight)


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.on_nan=halt"], "trainer.on_nan=halt"),
        (["data.skip_steps=[0]"], r"data.skip_steps=\[0\]: must be a list of step numbers"),
    ],
)
def test_what_cannot_be_right_is_refused(overrides, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        armature.compose(*PARTS, *overrides)
