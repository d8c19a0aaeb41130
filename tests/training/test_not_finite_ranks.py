"""`trainer.on_nan` on two ranks, of which one alone has values that are not finite."""

import functools
import math

import pytest

from tests import running
from tests.training.test_not_finite import BAD_OF_RANK_1, PARTS, bad, events

pytestmark = pytest.mark.slow
BASE = [part for part in PARTS if not part.startswith(("strategy=", "trainer.devices="))]


@pytest.mark.parametrize(
    ("strategy", "policy", "kind", "expect"),
    [
        ("ddp", "stop", "forward", 1),
        ("ddp", "skip", "backward", 0),
        ("fsdp", "stop", "forward", 1),
    ],
)
def test_the_ranks_agree(strategy, policy, kind, expect, forks):
    name = f"{strategy}-{policy}"
    ranks = [f"strategy={strategy}", "trainer.devices=2", f"run.name={name}", "trainer.max_steps=9"]
    ended = forks.train(
        *BASE,
        *bad(policy, BAD_OF_RANK_1, rank=1, kind=kind),
        *ranks,
        ranks=2,
        expect=expect,
        seconds=100,
    )
    assert ended.codes == [expect, expect]
    folder = forks.cwd / "outputs" / name
    (event,) = events(folder)
    # a gradient's norm is of all ranks
    assert (event["step"], event["ranks"]) == (7, [1] if kind == "forward" else [])
    assert BAD_OF_RANK_1 in event["samples"][1]
    if policy == "stop":
        assert "on rank 1 (samples " in ended.output
        assert (folder / "checkpoints" / "last").read_text().strip() == "step=000006"
    else:
        assert running.summary(folder)["skipped_steps"] == 1


@pytest.fixture(scope="module")
def broken(forks, corpus):
    """Runs in which the embedding returns NaN for the samples of step 5: their event and their
    losses.
    """

    @functools.cache
    def run(layout, ranks):
        breaks = "+callbacks.breaks={_target_:tests.training.disturbing.Breaks,step:5}"
        allowed = "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]"
        forks.train(
            *running.TINY,
            f"data.path={corpus}",
            f"run.name={layout}",
            "trainer.on_nan=skip",
            breaks,
            allowed,
            "model.tied=false",
            "trainer.max_steps=8",
            "checkpoint.every_n_steps=2",
            f"strategy={layout}",
            f"trainer.devices={ranks}",
            ranks=ranks,
            seconds=100,
        )
        folder = forks.cwd / "outputs" / layout
        (event,) = events(folder)
        assert running.summary(folder)["skipped_steps"] == 1
        return event, [float(row["train/loss"]) for row in running.rows(folder)]

    return run


@pytest.mark.parametrize(("layout", "ranks"), [("pipeline", 2), ("tensor", 2), ("fsdp_tensor", 4)])
def test_what_follows_is_the_same_under_every_axis(layout, ranks, broken):
    """One stage of a pipeline holds the embedding, and the ranks of a tensor axis share it."""
    expected, losses = broken("single", 1)
    assert len(losses) == 8
    assert sum(not math.isfinite(loss) for loss in losses) == 1
    event, others = broken(layout, ranks)
    assert event["step"] == 5
    assert others == pytest.approx(losses, rel=1e-4, nan_ok=True)
    assert samples_of(event) == samples_of(expected)


def samples_of(event):
    return sorted({index for indices in event["samples"] for index in indices})
