"""The quick comparison: work that no default moves, a readable table, and a history that finds
slower commits.
"""

import json
import multiprocessing
import re
import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import history, job, quick
from benchmarks.contender import Contender
from benchmarks.history import Result
from benchmarks.rounds import Record, Rounds
from tests import running

ROOT = Path(__file__).parents[1]
WORK = "4b8bd153"  # another one makes all earlier results incomparable
EARLIER = Result(
    date="2026-01-01T00:00:00Z",
    commit="a" * 40,
    dirty=False,
    machine="a CPU, 2 cores",
    torch="2.13.0",
    work="cafe",
    row="accelerate",
    ratio=1.02,
    low=1.01,
    high=1.03,
    rounds=9,
)


def later(day: int, ratio: float, *, half: float = 0.01, **changes) -> Result:
    date = f"2026-01-{day:02d}T00:00:00Z"
    return replace(EARLIER, date=date, ratio=ratio, low=ratio - half, high=ratio + half, **changes)


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """A corpus of a few tokens, so that none is prepared."""
    file = tmp_path / "train.bin"
    np.arange(2000, dtype=np.uint16).tofile(file)
    monkeypatch.setattr("armature.data.corpus.Corpus.prepare", lambda self: None)
    monkeypatch.setattr(
        "armature.data.corpus.Corpus.tokens",
        lambda self, split: np.memmap(file, np.uint16, mode="r"),
    )


@pytest.mark.slow
def test_no_default_of_training_moves_the_ruler(tmp_path, monkeypatch, tokens):
    """All numbers and choices of the default job are other ones, and the measured job is the
    same.
    """
    before, tiny = job.compose([]).job, job.compose(job.TINY).job
    changed = tmp_path / "configs"
    shutil.copytree(job.TRAINING_CONFIGS, changed)
    for name in (
        "model/gpt_nano",
        "data/stdlib",
        "optimizer/muon",
        "optimizer/adamw",
        "scheduler/wsd",
    ):
        file = changed / f"{name}.yaml"
        text = re.sub(
            r"(?m)^(\s*\w+): ([1-9]\d*)\b(?!\.)",
            lambda found: f"{found[1]}: {int(found[2]) * 2}",
            file.read_text(),
        )
        file.write_text(
            re.sub(r"(?m)^(\s*\w+): 0\.(\d+)", r"\1: 0.1\2", text).replace(
                "tied: true", "tied: false"
            )
        )
    file = changed / "trainer" / "default.yaml"
    text = file.read_text().replace("log_every_n_steps: 10", "log_every_n_steps: 3")
    file.write_text(text.replace("gradient_clip_val: auto", "gradient_clip_val: 0.5"))
    file = changed / "train.yaml"
    file.write_text(
        file.read_text().replace("scheduler: wsd", "scheduler: cosine").replace("muon", "sgd")
    )
    file = changed / "strategy" / "auto.yaml"
    file.write_text(file.read_text().replace("compile: none", "compile: block"))
    monkeypatch.setattr(job, "TRAINING_CONFIGS", changed)
    assert job.compose([]).job == before
    assert job.compose(job.TINY).job == tiny
    unpinned = job.compose(
        ["model=gpt_nano", "data=stdlib", "optimizer=adamw", "strategy.compile=block"]
    ).job
    assert (
        unpinned.model["width"] == 2 * before.model["width"]
    )  # the copy is read, where something else is typed
    assert unpinned.compile == "block"


def test_the_measured_work_is_what_the_history_was_measured_with(tokens):
    measured = job.compose(
        [quick.OPTIMIZER, "trainer.accelerator=cpu", "trainer.precision=bf16-mixed"]
    ).job
    sizes = {
        name: measured.model[name]
        for name in ("vocab_size", "context", "width", "layers", "heads", "tied")
    }
    assert sizes == {
        "vocab_size": 4096,
        "context": 256,
        "width": 256,
        "layers": 4,
        "heads": 2,
        "tied": True,
    }
    assert (measured.global_batch_size, measured.clip, measured.log_every_n_steps) == (8, 1.0, 10)
    assert history.fingerprint(measured) == WORK
    assert history.fingerprint(replace(measured, tokens=("elsewhere", "uint16"))) == WORK
    assert history.fingerprint(replace(measured, global_batch_size=4)) != WORK


def test_an_experiment_chooses_its_own_groups():
    words = job.pinned(["experiment=gpt2_124m"])
    assert words[1:] == ("experiment=gpt2_124m",)
    assert "optimizer=muon_bench" not in job.pinned(["optimizer=adamw"])


def test_results_survive_their_file_and_damaged_lines_are_named(tmp_path):
    file = tmp_path / "new" / "history.jsonl"
    history.append(file, [EARLIER])
    with file.open("a") as stream:
        stream.write("no json\n[1, 2]\n" + json.dumps(asdict(EARLIER) | {"ratio": "fast"}) + "\n")
        stream.write(json.dumps(asdict(EARLIER) | {"ratio": float("nan")}) + "\n")
        stream.write(
            json.dumps({"date": "2026"}) + "\n" + json.dumps(asdict(EARLIER))[:50]
        )  # cut off
    history.append(file, [later(2, 1.0), later(3, 1.01)])
    with file.open("ab") as stream:
        stream.write(
            json.dumps(asdict(later(4, 1)) | {"a key of later": 1}).encode() + b"\n\xff\xfe\n"
        )
    results, problems = history.read([file, file, tmp_path / "absent"])
    assert results == [
        EARLIER,
        later(2, 1.0),
        later(3, 1.01),
        later(4, 1),
    ]  # each once, though read twice
    assert [line.split(" is damaged")[0] for line in problems[:7]] == [
        f"{file}:{n}" for n in (2, 3, 4, 5, 6, 7, 11)
    ]
    assert "it lacks commit" in problems[4]


def _append(file: Path, day: int) -> None:
    for _ in range(50):
        history.append(file, [later(day, 1.0 + day / 100), later(day, 1.0)])


def test_two_processes_may_append_at_once(tmp_path):
    file, context = tmp_path / "history.jsonl", multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(file, day)) for day in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = file.read_text().splitlines()
    assert len(lines) == 200
    assert all(json.loads(line) for line in lines)
    assert all(
        lines[i][:40] == lines[i + 1][:40] for i in range(0, 200, 2)
    )  # what is written together stays together


def test_a_result_below_the_earlier_ones_by_more_than_their_spread_is_slower():
    earlier = [later(1, 1.02), later(2, 1.03), later(3, 1.01), later(4, 1.02)]
    assert not history.verdict(
        [*earlier, later(5, 1.005)]
    ).slower  # within what one run's rounds differ by
    assert history.verdict([*earlier, later(5, 0.97)]).slower
    assert not history.verdict(
        [*earlier, later(5, 0.97, half=0.08)]
    ).slower  # a disturbed run says nothing
    assert not history.verdict([*earlier, later(5, 1.2)]).slower
    restless = [later(1, 1.1), later(2, 0.9), later(3, 1.0), later(4, 1.05), later(5, 0.95)]
    assert not history.verdict([*restless, later(6, 0.93)]).slower
    assert history.verdict(
        [later(1, 1.0), later(2, 0.9)]
    ).slower  # one earlier result has a spread too: its rounds'
    assert history.verdict(earlier[:1]).usual is None


def test_series_of_other_machines_and_other_work_are_apart():
    mixed = [
        later(1, 1.0),
        later(2, 0.5, machine="another, 8 cores"),
        later(3, 0.5, work="beef"),
        later(4, 1.0),
    ]
    assert [found.slower for found in history.verdicts(mixed)] == [False] * 3


def test_the_trend_says_which_commit_became_slower():
    text = "\n".join(
        history.trend([later(1, 1.02), later(2, 1.02), later(3, 0.9, commit="b" * 40, dirty=True)])
    )
    assert "a CPU, 2 cores, torch 2.13.0, work cafe:" in text
    assert (
        "accelerate: 1.020 → 1.020 → 0.900   SLOWER: 0.900 (bbbbbbbb with changes, 2026-01-03; 2 "
        "earlier" in text
    )
    assert "first result" in history.trend([EARLIER])[-1]
    assert "as before" in history.trend([EARLIER, later(2, 1.02)])[-1]


def test_the_trend_command_fails_if_the_newest_result_is_slower(tmp_path, monkeypatch, capsys):
    file = tmp_path / "history.jsonl"
    monkeypatch.setattr(quick, "files", lambda: [file])
    monkeypatch.setattr("sys.argv", ["benchmarks", "--trend"])
    assert command.main() == 0
    assert "no results yet" in capsys.readouterr().out
    history.append(file, [EARLIER, later(2, 0.9)])
    assert command.main() == 1
    assert "SLOWER" in capsys.readouterr().out


def test_the_committed_history_has_no_damaged_line():
    assert history.read([ROOT / quick.HISTORY])[1] == []


def rows() -> list[quick.Row]:
    mine = Record("ours", 1, seconds=[1.0, 2.0, 1.0], peak=800 << 20)
    return [
        quick.Row(
            "a bare PyTorch loop", 1, mine, Record("a", 1, seconds=[1.1, 2.12, 1.2], peak=700 << 20)
        ),
        quick.Row("accelerate", 1, mine, Record("b", 1, note="not installed")),
        quick.Row(
            "PyTorch's own ddp", 2, mine, Record("c", 2, seconds=[1.0, 1.88, 1.1], peak=500 << 20)
        ),
        quick.Row(
            "PyTorch's own fsdp",
            2,
            replace(mine, note="failed: no memory (/tmp/log)"),
            Record("d", 2),
        ),
    ]


def test_the_quick_table_can_be_read_without_knowledge(tokens, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    workload = job.compose(
        [quick.OPTIMIZER, "trainer.accelerator=cpu", "trainer.precision=32-true"]
    )
    text = "\n".join(quick.table(rows(), workload))
    assert (
        "A speed of 1.05 means: Armature makes 105 steps while the other program makes 100" in text
    )
    assert "median of 3 turns" in text
    assert "All keep the memory that they free" in text
    assert "| a bare PyTorch loop | 1 | 1.10 | 1.08–1.15 | faster | 800 MiB | 700 MiB |" in text
    assert "| accelerate | 1 | – | | not installed | | |" in text
    assert (
        "| PyTorch's own ddp | 2 | 1.00 | 0.97–1.05 | no clear difference | 800 MiB | 500 MiB |"
        in text
    )
    assert "| PyTorch's own fsdp | 2 | – | | ours failed: no memory | | |" in text


def test_what_was_measured_becomes_lines_of_history(tokens):
    workload = job.compose(
        [quick.OPTIMIZER, "trainer.accelerator=cpu", "trainer.precision=32-true"]
    )
    found = quick.results(rows(), workload)
    assert [(result.row, result.ratio) for result in found] == [
        ("a bare PyTorch loop", 1.1), ("PyTorch's own ddp, 2 processes", 1.0),
    ]  # fmt: skip
    assert found[0].rounds == 3
    assert found[0].work == history.fingerprint(workload.job)


def test_rounds_end_in_time_but_not_before_there_are_quartiles(tmp_path):
    nap = (
        "import time; from benchmarks.gate import Gate; gate = Gate()\nwhile True:\n    "
        "time.sleep(0.01); gate.step()"
    )
    contender = Contender("nap", [sys.executable, "-c", nap])
    begin = time.monotonic()
    late = Rounds([contender], tmp_path, block_seconds=0.02, multiple=2).together(1000, end=begin)
    assert len(late[0].seconds) == 3
    timed = Rounds([contender], tmp_path, block_seconds=0.02, multiple=2).together(
        1000, end=time.monotonic() + 2.0
    )
    assert 3 < len(timed[0].seconds) < 1000


def test_what_the_quick_comparison_would_ignore_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.parse(["--quick", "--ranks", "2"])
    assert "Leave out --ranks" in capsys.readouterr().err
    assert command.parse(["--all", "--quick"]).rounds is None  # as make bench calls it
    assert command.parse([]).rounds == 7


def test_an_override_after_only_is_not_taken_for_a_name(capsys):
    with pytest.raises(SystemExit):
        command.parse(["--only", "ours", "optimizer=adamw_bench"])
    assert "Type optimizer=adamw_bench before it" in capsys.readouterr().err
    args = command.parse(["optimizer=adamw_bench", "--only", "ours"])
    assert (args.overrides, args.only) == (["optimizer=adamw_bench"], ["ours"])


@pytest.mark.slow
def test_the_quick_command_prints_its_table_and_keeps_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quick, "OWN_HISTORY", str(tmp_path / "own.jsonl"))
    monkeypatch.setattr(quick, "HISTORY", str(tmp_path / "committed.jsonl"))
    corpus = running.write_corpus(tmp_path / "corpus")
    words = [
        "--quick",
        "--only",
        "bare",
        "--rounds",
        "2",
        "--keep",
        str(tmp_path / "kept"),
        "--write",
    ]
    tiny = [
        "data=text",
        f"data.path={corpus}",
        "data.source.vocab_size=300",
        "data.context=16",
        "model.width=32",
    ]
    monkeypatch.setattr("sys.argv", ["benchmarks", *words, *tiny, "trainer.accelerator=cpu"])
    assert command.main() == 0
    printed = capsys.readouterr().out
    assert "| a bare PyTorch loop | 1 | " in printed
    assert "first result" in printed
    results, problems = history.read([tmp_path / "own.jsonl"])
    assert [(result.row, result.rounds) for result in results] == [("a bare PyTorch loop", 2)]
    assert problems == []
    assert history.read([tmp_path / "committed.jsonl"])[0] == results
