"""How trainer.max_steps and trainer.max_epochs end a run."""

import pytest
from omegaconf import OmegaConf

import armature
from armature.training.limits import Limits, prefer_typed


def limits(steps, epochs, *, batch=8, step=0):
    cfg = OmegaConf.create({"trainer": {"max_steps": steps, "max_epochs": epochs}})
    found = Limits.of(cfg, samples_per_epoch=52, global_batch_size=batch, step=step, seen=8 * step)
    return found.global_batches, found.epochs


def test_the_first_limit_ends_the_run():
    assert limits(None, 5) == (33, 5)  # 5 × 52 samples in steps of 8
    assert limits(20, None) == (20, 4)  # 160 samples of 52: epochs are those that steps begin
    assert limits(20, 5) == (20, 5)
    assert limits(100, 5) == (33, 5)
    assert limits(None, 10, batch=32, step=13) == (13 + 13, 10)  # 2 epochs in steps of 8
    assert limits(26, None, batch=32, step=13) == (26, 10)


def test_a_run_beyond_its_lowered_limit_ends_at_once(caplog):
    steps, epochs = limits(3, None, step=40)
    assert steps == 3
    assert epochs >= 40 * 8 / 52  # else Lightning refuses to resume
    assert "has made 40 steps already, and its limits end it at step 3" in caplog.text
    assert limits(50, None, step=40) == (50, 8)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], (500, 7)),
        (["seed=1"], (500, 7)),
        (["trainer.max_epochs=7"], (None, 7)),
        (["++trainer.max_epochs=7"], (None, 7)),
        (["trainer.max_steps=500"], (500, None)),
        (["trainer.max_steps=500", "trainer.max_epochs=7"], (500, 7)),
    ],
)
def test_a_typed_limit_replaces_the_one_of_a_file(typed, expected):
    cfg = OmegaConf.create({"trainer": {"max_steps": 500, "max_epochs": 7}})
    found = prefer_typed(cfg, typed)
    assert (found.trainer.max_steps, found.trainer.max_epochs) == expected
    assert cfg.trainer.max_steps == 500  # the argument is left alone


def test_a_composed_configuration_is_what_a_command_would_train():
    cfg = armature.compose("trainer.max_epochs=3")
    assert (cfg.trainer.max_epochs, cfg.trainer.max_steps) == (3, None)
