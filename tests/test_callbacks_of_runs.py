"""predict.py and evaluate.py call the callbacks of a run, as Lightning's Trainer does."""

import pytest
import torch

import armature
from tests import running
from tests.plain_runs import CONFIGS, LINE

pytestmark = pytest.mark.slow
PACKAGES = "launch.allowed_packages=[armature,torch.nn,torch.optim,lightning.pytorch,tests]"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with a writer of predictions."""
    cwd = tmp_path_factory.mktemp("run")
    running.call(
        "train.py",
        "--config-dir",
        CONFIGS,
        "experiment=plain",
        LINE,
        "+data.held_out=11",
        "run.name=mine",
        f"+callbacks.writer={{_target_:tests.plain_parts.Writer,folder:{cwd / 'config'}}}",
        cwd=cwd,
        PYTHONPATH=running.PYTHONPATH,
    )
    return cwd


def script(name, *words, cwd, code=0):
    """Run a script on the run, and return what it says."""
    file = f"scripts/{name}.py"
    return running.call(
        file, "outputs/mine", *words, cwd=cwd, code=code, PYTHONPATH=running.PYTHONPATH
    ).stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_writer_of_the_run_writes_each_process_s_predictions(ranks, trained):
    folder = trained / f"written{ranks}"
    words = () if ranks == 1 else ("trainer.devices=2",)
    words = (f"out=p{ranks}.csv", f"callbacks.writer.folder={folder}", *words)
    script("predict", PACKAGES, *words, cwd=trained)
    found = {}
    for rank in range(ranks):
        saved = torch.load(folder / f"rank{rank}.pt")
        for batch, places in zip(saved["predictions"], saved["places"][0], strict=True):
            found |= dict(zip(places, batch["y"].tolist(), strict=True))
        hooks = (folder / f"hooks{rank}.txt").read_text().splitlines()
        assert hooks == [f"predict {rank} of {ranks} after 8 batches", "predicted after 8 batches"]
    lines = (trained / f"p{ranks}.csv").read_text().splitlines()[1:]
    rows = {int(line.split(",")[0]): float(line.split(",")[-1]) for line in lines}
    assert found == rows
    assert [*rows] == [*range(11)]


def test_a_callback_is_added_and_left_out(trained):
    folder = trained / "added"
    added = f"+callbacks.other={{_target_:tests.plain_parts.Writer,folder:{folder}}}"
    script("predict", PACKAGES, "out=added.csv", added, "~callbacks.writer", cwd=trained)
    assert (folder / "rank0.pt").exists()
    assert not (trained / "config" / "rank0.pt").exists()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("callbacks.other.x=1", "has no key 'callbacks.other.x'. To add it, type +callbacks"),
        ("~callbacks.other", "has no key 'callbacks.other'"),
        (
            "+callbacks.other={_target_:tests.plain_parts.Writer}",
            "callbacks.other.folder: tests.plain_parts.Writer needs it",
        ),
        ("+callbacks.other={_target_:os.system}", "only packages in launch.allowed_packages"),
    ],
)
def test_a_mistake_in_a_typed_callback_is_named(typed, message, trained):
    assert message in script("predict", PACKAGES, "out=none.csv", typed, cwd=trained, code=2)


@pytest.mark.parametrize("split", ["test", "val"])
def test_evaluation_calls_hooks_with_the_checkpoint_s_state(split, trained):
    folder = trained / f"evaluated-{split}"
    typed = f"callbacks.writer.folder={folder}"
    script("evaluate", PACKAGES, "--split", split, typed, cwd=trained)
    (hook,) = (folder / "hooks0.txt").read_text().splitlines()
    assert hook.endswith("after 8 batches")
    assert {"test": "test", "val": "validation"}[split] in hook


def test_a_callback_typed_where_none_is_called_is_refused(trained):
    typed = "+callbacks.other={_target_:tests.plain_parts.Writer,folder:x}"
    said = script("convert", "x.safetensors", typed, cwd=trained, code=2)
    assert f"{typed} would change nothing here" in said
    with pytest.raises(ValueError, match=r"only evaluate\.py and predict\.py call"):
        armature.load(trained / "outputs" / "mine", overrides=[typed], packages=["tests"])
