"""The benchmark measures what it says: what is counted, what is compared, and that contenders train
the same.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from armature.errors import ConfigError
from benchmarks.contender import Contender, ContenderFailed, Running
from benchmarks.job import compose
from benchmarks.rounds import spread
from tests import running

LM = [
    "data.source.vocab_size=300",
    "data.context=16",
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.log_every_n_steps=2",
]


def fake(name: str, *, seconds: float, then: str = "") -> Contender:
    """A contender whose step is a nap."""
    code = (
        "import time; from benchmarks.gate import Gate; gate = Gate()\n"
        f"for i in range(1000):\n    time.sleep({seconds}); "
        f"gate.step(){f'; {then}' if then else ''}"
    )
    return Contender(name, [sys.executable, "-c", code])


def corpus(folder: Path) -> list[str]:
    return ["data=text", f"data.path={running.write_corpus(folder / 'corpus')}", *LM]


def test_a_contender_that_fails_says_what_it_wrote_last(tmp_path):
    entrant = Running(fake("bad", seconds=0, then="raise SystemExit('no such luck')"), tmp_path)
    try:
        entrant.wait_for_first_step()
        with pytest.raises(ContenderFailed, match="no such luck"):
            entrant.block(5)
    finally:
        entrant.stop()


def test_a_spread_is_the_median_with_its_quartiles():
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert vars(spread([1.0, 2.0, 3.0, 4.0, 5.0])) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([7.0]).low == 7.0
    with pytest.raises(ValueError, match="at least one value"):
        spread([])


def test_data_that_the_bare_loop_cannot_read_are_refused():
    with pytest.raises(ConfigError, match="memory-mapped tokens"):
        compose(["experiment=digits"])


@pytest.mark.slow
def test_contenders_import_what_they_need_and_no_more():
    """Else a contender's start, or its memory, would be the benchmark's own doing."""

    def imported(module: str, names: tuple[str, ...]) -> str:
        code = f"import sys, {module}; print([name for name in {names} if name in sys.modules])"
        return running.python("-c", code, PYTHONPATH=running.PYTHONPATH).stdout

    assert imported("benchmarks.gate", ("torch", "numpy")).strip() == "[]"
    assert imported("benchmarks.bare", ("lightning", "hydra", "torch._dynamo")).strip() == "[]"


@pytest.mark.slow
def test_the_bare_loop_does_what_training_does(tmp_path):
    """The same losses, step for step, when it is given the same batches."""
    from armature import run_dir
    from armature.data import feed
    from benchmarks import bare

    source = running.write_corpus(tmp_path / "corpus")
    unpinned = [
        "optimizer=muon",
        "scheduler=wsd",
        "trainer=default",
    ]  # what training has, which is being compared
    running.train(
        *unpinned, "run.name=ours", "trainer.log_every_n_steps=1", cwd=tmp_path, corpus=source
    )
    fed = feed.build(run_dir.read(tmp_path / "outputs" / "ours"))
    fed.data.prepare_data()
    batches = [(batch["inputs"], batch["targets"]) for batch in fed.train_loader()][:6]
    job = replace(compose([*running.TINY, *unpinned, f"data.path={source}"]).job, total_steps=6)
    losses: list[float] = []
    bare.train(
        job, batches=iter(batches), step_done=lambda loss: losses.append(float(loss.detach()))
    )
    assert losses == pytest.approx(running.losses(tmp_path / "outputs" / "ours"), rel=1e-5)


@pytest.mark.slow
def test_the_command_prints_a_table(tmp_path):
    done = running.python(
        "-m",
        "benchmarks",
        *corpus(tmp_path),
        "--only",
        "bare",
        "--rounds",
        "2",
        "--seconds",
        "0.05",
        "--keep",
        tmp_path / "kept",
        cwd=tmp_path,
        PYTHONPATH=running.PYTHONPATH,
    )
    assert re.search(r"^\| a bare PyTorch loop \| 1 \| \d\.\d\d \|", done.stdout, re.MULTILINE)
    run = tmp_path / "kept" / "runs" / "ours"
    assert (run / "metrics.csv").exists()  # it logged, as a user's run does
    assert list((run / "tensorboard").iterdir())
