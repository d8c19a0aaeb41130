"""`trainer.on_nan` on two ranks, of which one alone has values that are not finite."""

import json

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
    [("ddp", "stop", "forward", 1), ("ddp", "skip", "backward", 0), ("fsdp", "rollback", "forward", 0)],
)
def test_the_ranks_agree(strategy, policy, kind, expect, forks):
    name = f"{strategy}-{policy}"
    ranks = [f"strategy={strategy}", "trainer.devices=2", f"run.name={name}", "trainer.max_steps=9"]
    ended = forks.train(
        *BASE, *bad(policy, BAD_OF_RANK_1, rank=1, kind=kind), *ranks, ranks=2, expect=expect, seconds=100
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
    assert (summary["skipped_steps"], summary["rolled_back_steps"]) == ((1, []) if policy == "skip" else (0, [7]))
    if policy == "rollback":  # as if the samples had never been there
        undisturbed = forks.cwd / "outputs" / "resumed"
        stop = "+callbacks.stop_at={_target_:armature.callbacks.stop_at.StopAt,signals:{SIGTERM:8}}"
        for more, code in ((stop, 143), ("resume=auto", 0)):
            forks.train(
                *BASE, *bad(policy, BAD_OF_RANK_1, rank=1, kind=kind), *ranks[:2], "run.name=resumed",
                "trainer.max_steps=9", more, ranks=2, expect=code, seconds=100,
            )  # fmt: skip
        assert_same(undisturbed, folder)
