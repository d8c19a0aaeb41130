"""The benchmark measures what it says: what is counted, what is compared, and that contenders train
the same.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from armature.errors import ConfigError
from benchmarks import mixture, report, saves, scaling
from benchmarks.contender import Contender, ContenderFailed, Running, file_name
from benchmarks.job import TINY, compose
from benchmarks.rounds import Record, Rounds, ratios, spread
from tests import running

ROOT = Path(__file__).parents[1]
COMMAND_ENVIRONMENT = running.environment(PYTHONPATH=str(ROOT))
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


def test_a_contender_runs_exactly_the_steps_it_is_told_and_stands_still_otherwise(tmp_path):
    entrant = Running(fake("nap", seconds=0.01), tmp_path)
    try:
        assert entrant.wait_for_first_step() > 0.01
        block = entrant.block(20)
        assert block.steps == 20
        assert 0.2 <= block.seconds < 2.0
        assert block.cpu_seconds < block.seconds
        assert block.peak > 1 << 20
        time.sleep(0.5)
        assert entrant.block(1).seconds < 0.4  # the time at the gate is not counted
    finally:
        entrant.stop()
    assert all(process.poll() is not None for process in entrant._processes)


def test_a_contender_that_fails_says_what_it_wrote_last(tmp_path):
    entrant = Running(fake("bad", seconds=0, then="raise SystemExit('no such luck')"), tmp_path)
    try:
        entrant.wait_for_first_step()
        with pytest.raises(ContenderFailed, match="no such luck"):
            entrant.block(5)
    finally:
        entrant.stop()


def test_one_that_fails_does_not_spoil_the_others(tmp_path):
    bad = Contender("bad", [sys.executable, "-c", "print('lost')"])
    absent = Contender("absent", ["nothing"], missing="not installed")
    contenders = [fake("fast", seconds=0.005), bad, absent, fake("slow", seconds=0.02)]
    records = Rounds(contenders, tmp_path, block_seconds=0.1, multiple=2).together(5)
    fast, lost, missing, slow = records
    assert len(fast.seconds) == len(slow.seconds) == 5
    assert 0.15 < spread(ratios(slow, fast)).median < 0.6
    assert "ended before its first step: lost" in lost.note
    assert missing.note == "not installed"


def test_alone_starts_each_for_its_own_block(tmp_path):
    records = Rounds(
        [fake("a", seconds=0.001), fake("b", seconds=0.001)],
        tmp_path,
        block_seconds=0.02,
        multiple=2,
    ).alone(2)
    assert [len(record.first_steps) for record in records] == [2, 2]
    assert [len(record.seconds) for record in records] == [2, 2]


def test_a_spread_is_the_median_with_its_quartiles():
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert vars(spread([1.0, 2.0, 3.0, 4.0, 5.0])) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([7.0]).low == 7.0
    with pytest.raises(ValueError, match="at least one value"):
        spread([])


def test_ratios_compare_within_a_round():
    disturbed = Record("ours", 1, seconds=[2.0, 20.0]), Record("bare loop", 1, seconds=[1.0, 10.0])
    assert ratios(*disturbed) == [0.5, 0.5]


@pytest.mark.parametrize("more", [{}, {"kv_heads": 2}, {"ffn_hidden": 96}])
def test_flops_are_those_that_torch_counts(more):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from armature.models.decoder.model import Decoder
    from benchmarks import flops

    sizes = {"vocab_size": 96, "context": 24, "width": 64, "layers": 2, "heads": 4, **more}
    model = Decoder(**sizes)
    tokens = torch.randint(96, (3, 24))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    node = {"_target_": "armature.models.decoder.model.Decoder", "_partial_": True, **sizes}
    job = replace(compose(TINY).job, model=node, tokens=("", ""), context=24, global_batch_size=3)
    assert flops.step(job) == counter.get_total_flops()


def test_only_a_token_model_s_flops_are_counted():
    from benchmarks import flops

    assert flops.step(compose(TINY).job) is None


def test_scaling_points_divide_the_batch_or_multiply_it():
    found = [(p.kind, p.ranks, p.global_batch_size) for p in scaling.points([1, 2], 8)]
    assert found == [("base", 1, 8), ("strong", 2, 8), ("weak", 2, 16)]
    with pytest.raises(ValueError, match=r"--scale 3.*global_batch_size=8"):
        list(scaling.points([1, 3], 8))


def test_efficiency_counts_the_work_of_a_rank():
    base = Record("base 1", 1, seconds=[1.0])
    half = Record("strong 2", 2, seconds=[0.5])
    same = Record("weak 2", 2, seconds=[1.0])
    assert scaling.efficiencies({"kind": "strong", "ranks": 2}, half, 1, base) == [1.0]
    assert scaling.efficiencies({"kind": "weak", "ranks": 2}, same, 1, base) == [1.0]


def test_the_projection_grows_with_what_is_sent():
    collectives = [{"kind": "all_reduce", "bytes": 4e9}, {"kind": "all_gather", "bytes": 2e9}]
    assert scaling.sent_per_rank(collectives, 4) == pytest.approx((2 * 4e9 + 2e9) * 3 / 4)
    rows = scaling.project(collectives, compute_seconds=1.0, bandwidth=50e9)
    assert [row["exposed"] for row in rows] == sorted(
        (row["exposed"] for row in rows), reverse=True
    )
    assert all(row["exposed"] < row["hidden"] <= 1.0 for row in rows)
    slow = scaling.project(collectives, compute_seconds=1.0, bandwidth=5e9)
    assert slow[0]["hidden"] < 0.7


def results() -> dict:
    section = {
        "model": "gpt_nano",
        "precision": "32-true",
        "optimizer": "Muon",
        "compile": "none",
        "float8": False,
        "global_batch_size": 8,
        "context": 256,
        "flops_per_step": 10**9,
        "records": [
            Record("bare loop", 1, seconds=[0.1, 0.2], cpu_seconds=[0.1, 0.2], peak=1 << 20),
            Record("ours", 1, seconds=[0.1, 0.25], cpu_seconds=[0.1, 0.2], peak=2 << 20),
            Record("accelerate", 1, note="not installed"),
        ],
    }
    return {
        "date": "2026-01-01",
        "command": "python -m benchmarks",
        "machine": {"device": "a CPU, 2 cores", "gpus": 0, "python": "3.11", "torch": "2.13"},
        "rate": {"rate": 2e11, "dtype": "float32"},
        "sections": {"training": section, "overhead": section},
    }


def test_the_tables_say_machine_date_ratio_and_what_is_missing():
    text = report.markdown(results())
    assert "a CPU, 2 cores, 2026-01-01" in text
    assert "| ours | 1 | 5.71 | 11,703 | 0.900 (0.850–0.950) | 2 MiB | 2.9% | – |" in text
    assert "| accelerate | 1 | not installed |" in text
    assert "25,000 µs (12,500–37,500)" in text


def test_data_are_held_against_what_training_takes():
    data = {
        "tokens_per_second": 2.4e6,
        "images": {0: [{"samples_per_second": 80.0, "data_wait": 0.5}] * 3},
    }
    made = results()
    made["sections"]["data"] = data
    text = report.markdown(made)
    assert "serves 2.4 million tokens per second, 205 times what training consumes" in text
    assert "| 0 | 80 | 50.0% |" in text


def test_results_survive_their_file(tmp_path):
    report.save(results(), tmp_path / "r.json")
    assert report.load(tmp_path / "r.json") == results()


def test_only_what_is_between_the_markers_is_rewritten(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    report.write(results(), tmp_path / "r.json", docs=tmp_path)
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert "old" not in text
    assert "bare loop" in text
    page.write_text("no markers")
    with pytest.raises(ValueError, match="must hold one"):
        report.write(results(), tmp_path / "r.json", docs=tmp_path)


def test_the_page_has_its_markers():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text.count(report.BEGIN) == text.count(report.END) == 1


def test_data_that_the_bare_loop_cannot_read_are_refused():
    with pytest.raises(ConfigError, match="memory-mapped tokens"):
        compose(["experiment=digits"])


def test_names_become_files():
    assert file_name("ours, fsdp × tensor") == "ours-fsdp-tensor"


def test_files_stay_readable():
    for file in (ROOT / "benchmarks").rglob("*.py"):
        assert len(file.read_text().splitlines()) <= 400


@pytest.mark.slow
def test_contenders_import_what_they_need_and_no_more():
    """Else a contender's start, or its memory, would be the benchmark's own doing."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}

    def imported(module: str, names: tuple[str, ...]) -> str:
        code = f"import sys, {module}; print([name for name in {names} if name in sys.modules])"
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
        ).stdout

    assert imported("benchmarks.gate", ("torch", "numpy")).strip() == "[]"
    assert imported("benchmarks.bare", ("lightning", "hydra", "torch._dynamo")).strip() == "[]"


@pytest.mark.slow
def test_the_bare_loop_does_what_training_does(tmp_path):
    """The same losses, step for step, when it is given the same batches; and the same weights in
    smaller pieces.
    """
    import torch
    from hydra.utils import instantiate

    from armature import run_dir
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
    data = instantiate(run_dir.read(tmp_path / "outputs" / "ours").data)
    data.prepare_data()
    batches = [(batch["inputs"], batch["targets"]) for batch in data.train_dataloader()][:6]
    job = replace(compose([*running.TINY, *unpinned, f"data.path={source}"]).job, total_steps=6)
    losses: list[float] = []
    whole = bare.train(
        job, batches=iter(batches), step_done=lambda loss: losses.append(float(loss.detach()))
    )
    assert losses == pytest.approx(running.losses(tmp_path / "outputs" / "ours"), rel=1e-5)

    halves = [
        half for batch in batches for half in zip(*(part.split(4) for part in batch), strict=True)
    ]
    pieces = bare.train(
        replace(job, micro_batch_size=4), batches=iter(halves), step_done=lambda loss: None
    )
    for one, other in zip(whole.parameters(), pieces.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_loader_and_loader_processes_are_measured(tmp_path, monkeypatch):
    from benchmarks import serving

    job = replace(compose(corpus(tmp_path)).job, global_batch_size=8)
    assert serving.serve(job.save(tmp_path / "job.json"))["tokens_per_second"] > 1000
    monkeypatch.setattr(serving, "STEPS", 4)
    monkeypatch.setattr(serving, "WORKERS", (0, 1))
    found = serving.images(tmp_path, rounds=1, say=lambda line: None)
    assert all(0 <= rows[0]["data_wait"] <= 1 for rows in found.values())
    assert [*found] == [0, 1]


@pytest.mark.slow
def test_the_command_measures_and_writes(tmp_path):
    file = tmp_path / "r.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--training",
        *corpus(tmp_path),
        "--only",
        "ours",
        "Fabric",
        "--rounds",
        "2",
        "--seconds",
        "0.05",
        "--out",
        str(file),
        "--keep",
        str(tmp_path / "kept"),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=COMMAND_ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = report.load(file)
    names = [record.name for record in written["sections"]["training"]["records"]]
    assert names == ["bare loop", "ours", "Lightning Fabric"]
    assert all(len(record.seconds) == 2 for record in written["sections"]["training"]["records"])
    assert "| ours | 1 |" in done.stdout
    run = tmp_path / "kept" / "runs" / "ours"
    assert (run / "metrics.csv").exists()  # it logged, as a user's run does
    assert list((run / "tensorboard").iterdir())


@pytest.mark.slow
def test_an_impossible_override_is_told_as_training_tells_it(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "trainer.accelerator=tpu"]
    done = subprocess.run(
        command, cwd=tmp_path, env=COMMAND_ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "trainer.accelerator=tpu" in done.stderr


@pytest.mark.slow
def test_what_ddp_sends_is_counted(tmp_path):
    workload = compose([*corpus(tmp_path), "strategy=ddp"])
    folder = tmp_path / "runs"
    folder.mkdir()
    collectives = scaling.count(workload, folder)
    reduced = sum(c["bytes"] for c in collectives if c["kind"] == "all_reduce")
    width, hidden, layers, vocabulary = 32, 128, 2, 300
    parameters = (
        vocabulary * width + layers * (4 * width**2 + 3 * width * hidden + 2 * width) + width
    )
    assert (
        4 * parameters <= reduced < 4 * parameters + 4096
    )  # and a few numbers: the losses, a vote


@pytest.mark.slow
def test_the_chunked_loss_needs_a_fifth_of_the_memory():
    sizes = {"tokens": 4096, "width": 32, "vocabulary": 32000, "repeats": 1}
    from benchmarks import loss

    plain, chunked = (
        loss.run(name, **sizes, device="cpu", dtype="float32") for name in ("plain", "ours")
    )
    assert chunked["bytes"] < plain["bytes"] / 5
    assert chunked["gradients_differ_by"] < 1e-5


@pytest.mark.slow
def test_saves_are_measured_with_the_steps_after_them(tmp_path, monkeypatch):
    monkeypatch.setattr(saves, "STEPS", 4)
    monkeypatch.setattr("armature.launcher.heap.keep_freed_memory", lambda accelerator: None)
    section = saves.measure(tmp_path, megabytes=1, rounds=2, device="cpu")
    assert section["bytes"] == pytest.approx(57e6, rel=0.01)  # one block, with AdamW's two moments
    assert {
        name: len(values["lost"]) for name, values in section["seconds"].items()
    } == dict.fromkeys(saves.KINDS, 2)
    assert section["seconds"]["foreground"]["call"] > [0.0, 0.0]
    text = "\n".join(saves.table(section))
    assert "0.06 GB of weights and optimizer state" in text
    assert "| a save in the foreground |" in text
    assert "of the foreground's |" in text


def test_mixture_compares_the_runs_that_ended_seed_by_seed(tmp_path, monkeypatch, capsys):
    values = {"dense0": 1.5, "mixture0": 1.4, "dense1": 1.7, "mixture1": 1.5}
    for name, value in values.items():
        (tmp_path / name).mkdir()
        summary = {"metrics": {mixture.METRIC: value}, "seconds": 90.0, "stop_reason": "finished"}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr(sys, "argv", ["mixture", "--seeds", "0", "1", "--out", str(tmp_path)])
    assert mixture.main() == 0
    printed = capsys.readouterr().out
    assert "| mixture | 1 | 1.5000 | 1.5 |" in printed
    assert "dense: 1.6000 ± 0.1414 bits per byte" in printed
    assert "mixture - dense: -0.1500 ± 0.0707 bits per byte" in printed
