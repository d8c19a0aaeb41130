"""Sentence 2: killed at any time, a run repeats exactly the steps that it would have made."""

import os
import random
import shutil

import pytest

from tests.guarantees.runs import of_example, of_user, rows, samples, signal_at

pytestmark = [pytest.mark.guarantee, pytest.mark.slow]
# dropout, noise in data and steps, BatchNorm, a buffer, metrics, a schedule on a metric, state of
# hooks and of a callback, averaged weights
STATEFUL = of_user(
    "Stateful",
    "+callbacks.decay._target_=tests.guarantees.users.Decay",
    "+data.noisy=true",
    "+data.samples=24",  # four epochs of three steps, so that the schedule moves while it counts
    "trainer.val_every_n_steps=3",
    "+callbacks.ema={_target_:armature.callbacks.ema.EMA,decay:0.8}",
)
SAVING = ("checkpoint.every_n_steps=2", "trainer.log_every_n_steps=1")


@pytest.mark.parametrize(
    ("layout", "at"),
    [("single", [2, 6, 8]), ("ddp 2, micro-batch 2", [2, 6]), ("fsdp 2", [7])],
)
def test_a_stop_leaves_no_trace_in_a_module_with_state_of_every_kind(layout, at, runs):
    """Inside an epoch, and at its end, before a validation that is due."""
    run_dir = runs.stopped(STATEFUL, layout, at=at)
    straight = runs.straight(STATEFUL, layout)
    runs.assert_equal(run_dir, straight)
    assert samples(run_dir) == samples(straight)


@pytest.mark.parametrize("layout", ["tensor 2", "pipeline 2"])
def test_a_stop_leaves_no_trace_in_a_sharded_model(layout, runs):
    command = of_example()
    runs.assert_equal(runs.stopped(command, layout, at=[5]), runs.straight(command, layout))


def test_two_optimizers_by_hand_resume(runs):
    command = of_user("Adversarial")
    run_dir = runs.stopped(command, "ddp 2", at=[6], rank=1)  # of 24: two per batch
    runs.assert_equal(run_dir, runs.straight(command, "ddp 2"))


def test_a_signal_to_any_rank_stops_all_of_them_after_a_save(runs):
    command, run_dir = of_example(), runs.new()
    runs.start(run_dir, command, "ddp 2", signal_at([5], rank=1), expect=143)
    assert rows(run_dir)[-1]["step"] in ("5", "6")
    runs.start(run_dir, command, "ddp 2")
    runs.assert_equal(run_dir, runs.straight(command, "ddp 2"))


@pytest.mark.parametrize("layout", ["single", "ddp 2"])
def test_kills_at_random_moments_leave_no_trace(layout, runs):
    """Also inside a save, which every step makes."""
    saving = (*STATEFUL, "checkpoint.every_n_steps=1", "trainer.log_every_n_steps=1")
    run_dir, moments = runs.new(), random.Random(0)
    for batch in (0, 4, 7):  # of 12, each of at least 20 ms: the last kill meets a run, too
        later = f"batch:{batch},seconds:{moments.uniform(0, 0.05)}"
        kill = f"+callbacks.kill={{_target_:tests.guarantees.users.KillLater,{later}}}"
        ended = runs.start(run_dir, saving, layout, kill, expect=None)
        assert -9 in ended.codes
    runs.start(run_dir, saving, layout)
    runs.assert_equal(run_dir, runs.straight(saving, layout))


def test_a_run_that_changes_its_layout_at_every_stop_agrees_with_one_that_never_stops(runs):
    """With momenta, a schedule and averaged weights."""
    command = of_example(
        "+callbacks.ema={_target_:armature.callbacks.ema.EMA,decay:0.8}", "trainer.max_steps=14"
    )
    run_dir, stop = runs.new(), signal_at([1, 3, 5, 7, 9, 11])
    for layout in ("single", "ddp 2", "fsdp 2", "tensor 2", "pipeline 2", "fsdp 2 × tensor 2"):
        runs.start(run_dir, command, layout, stop, expect=143)
    runs.start(run_dir, command, "single, micro-batch 2", stop)
    runs.assert_close(run_dir, runs.straight(command))


def test_batchnorm_and_optimizers_by_hand_change_their_layout(runs):
    for module, at in (("Normalized", 5), ("Adversarial", 10)):
        command, run_dir = of_user(module, "checkpoint.background=true"), runs.new()
        runs.start(run_dir, command, "fsdp 2", signal_at([at]), expect=143)
        runs.start(run_dir, command, "single")
        runs.assert_close(run_dir, runs.straight(command))


def largest(checkpoint):
    return max(checkpoint.iterdir(), key=lambda file: file.stat().st_size)


def cut(checkpoint, runs):
    os.truncate(largest(checkpoint), largest(checkpoint).stat().st_size // 2)


def flip(checkpoint, runs):
    """Change the last bit of a weight."""
    weights = runs.weights(checkpoint)
    raw = max(weights.values(), key=lambda value: value.numel()).numpy().tobytes()
    (file,) = (each for each in checkpoint.iterdir() if raw in each.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(raw)] ^= 1
    file.write_bytes(content)


def lose(checkpoint, runs):
    largest(checkpoint).unlink()


def leave_half(checkpoint, runs):
    """As a kill inside a save does."""
    half = checkpoint.with_name("step=000008.part")
    shutil.copytree(checkpoint, half)
    cut(half, runs)


@pytest.mark.parametrize("damage", [cut, flip, lose, leave_half])
def test_a_damaged_checkpoint_is_passed_over(damage, runs):
    command = of_example(*SAVING)
    run_dir = runs.new()
    runs.start(run_dir, command, "single", signal_at([7], name="SIGKILL"), expect=-9)
    damage(run_dir / "checkpoints" / "step=000006", runs)
    runs.start(run_dir, command, "single")
    runs.assert_equal(run_dir, runs.straight(command))


def test_every_file_of_a_checkpoint_is_synced_before_the_checkpoint_has_its_name(runs):
    run_dir = runs.new()
    witness = "+callbacks.witness._target_=tests.guarantees.users.Witness"
    runs.start(run_dir, of_example(*SAVING), "single", witness)
    synced, saved = set(), []
    for line in (run_dir / "witness.txt").read_text().splitlines():
        event, *paths = line.split(" ")
        if event == "fsync":
            synced.add(paths[0])
            continue
        source, target = paths
        if source in synced:
            synced.add(target)
        if (
            target.startswith(f"{run_dir}/checkpoints/step=")
            and "/" not in target.partition("step=")[2]
        ):
            saved.append(target)
            names = os.listdir(target) if os.path.isdir(target) else []  # old ones are removed
            missing = {name for name in names if f"{source}/{name}" not in synced}
            assert not missing, f"{target}: {missing}"
    assert len(saved) == 6
    assert os.path.isdir(saved[-1])


def test_plain_attributes_of_users_objects_are_put_back(runs):
    """Counters, lists, generators and a callback's metric, also on each rank its own."""
    command, run_dir = of_user("Counting"), runs.new()
    runs.start(run_dir, command, "ddp 2", signal_at([3, 8]), expect=143)
    runs.start(run_dir, command, "ddp 2", signal_at([3, 8]), expect=143)
    runs.start(run_dir, command, "ddp 2")
    runs.assert_equal(run_dir, runs.straight(command, "ddp 2"))
