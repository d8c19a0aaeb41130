"""`trainer.on_nan` on two ranks, of which one alone has values that are not finite."""

import functools
import json
import math

import pytest

from armature.training import not_finite
from tests import running
from tests.forked import Forks
from tests.training.test_not_finite import BAD_OF_RANK_1, PARTS, assert_same, bad

pytestmark = pytest.mark.slow
BASE = [part for part in PARTS if not part.startswith(("strategy=", "trainer.devices="))]


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with Forks(tmp_path_factory.mktemp("runs")) as started:
        yield started


@pytest.mark.parametrize(
    ("strategy", "policy", "kind", "expect"),
    [
        ("ddp", "stop", "forward", 1),
        ("ddp", "skip", "backward", 0),
        ("fsdp", "rollback", "forward", 0),
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
    (event,) = json.loads((folder / not_finite.FILE).read_text())["events"]
    assert (event["step"], event["name"], event["ranks"]) == (7, "model.fuse (Fuse)", [1])
    assert BAD_OF_RANK_1 in event["step_samples"]["1"]
    if policy == "stop":
        assert "on rank 1, in sample 15" in ended.output
        assert (folder / "checkpoints" / "last").read_text().strip() == "step=000006"
        return
    summary = running.summary(folder)
    assert (summary["skipped_steps"], summary["rolled_back_steps"]) == (
        (1, []) if policy == "skip" else (0, [7])
    )
    if policy == "rollback":  # as if the samples had never been there
        undisturbed = forks.cwd / "outputs" / "resumed"
        stop = "+callbacks.stop_at={_target_:armature.callbacks.stop_at.StopAt,signals:{SIGTERM:8}}"
        for more, code in ((stop, 143), ("resume=auto", 0)):
            forks.train(
                *BASE,
                *bad(policy, BAD_OF_RANK_1, rank=1, kind=kind),
                *ranks[:2],
                "run.name=resumed",
                "trainer.max_steps=9",
                more,
                ranks=2,
                expect=code,
                seconds=100,
            )
        assert_same(undisturbed, folder)


@pytest.fixture(scope="module")
def broken(forks, corpus):
    """Runs in which the embedding returns NaN for the samples of step 5: their event and their
    losses.
    """

    @functools.cache
    def run(policy, layout, ranks):
        name = f"{layout}-{policy}"
        breaks = "+callbacks.breaks={_target_:tests.training.disturbing.Breaks,step:5}"
        allowed = "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]"
        forks.train(
            *running.TINY,
            f"data.path={corpus}",
            f"run.name={name}",
            f"trainer.on_nan={policy}",
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
        folder = forks.cwd / "outputs" / name
        (event,) = json.loads((folder / not_finite.FILE).read_text())["events"]
        summary = running.summary(folder)
        assert (summary["skipped_steps"], summary["rolled_back_steps"]) == (
            (1, []) if policy == "skip" else (0, [5])
        )
        return event, [float(row["train/loss"]) for row in running.rows(folder)]

    return run


@pytest.mark.parametrize(("layout", "ranks"), [("pipeline", 2), ("tensor", 2), ("fsdp_tensor", 4)])
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_what_follows_is_the_same_under_every_axis(policy, layout, ranks, broken):
    """One stage of a pipeline holds the embedding, and the ranks of a tensor axis share it."""
    expected, losses = broken(policy, "single", 1)
    assert len(losses) == 8
    assert sum(not math.isfinite(loss) for loss in losses) == (policy == "skip")
    event, others = broken(policy, layout, ranks)
    assert (event["step"], event["place"], event["name"]) == (
        5,
        "forward",
        "model.embed (Embedding)",
    )
    assert others == pytest.approx(losses, rel=1e-4, nan_ok=True)
    assert samples_of(event) == samples_of(expected)


def samples_of(event):
    return sorted(index for indices in event["step_samples"].values() for index in indices)
