"""Sentence 1: the same initial weights, samples, losses, gradient norms and final weights under
every strategy, number of processes and micro-batch."""

import pytest

from tests.guarantees.runs import of_example, of_user, samples

pytestmark = [pytest.mark.guarantee, pytest.mark.slow]


def assert_same(runs, command, layout):
    run_dir = runs.new()
    runs.start(run_dir, command, layout)
    runs.assert_close(run_dir, runs.straight(command))


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        ("Plain", "single, micro-batch 2"),
        ("Plain", "ddp 2, micro-batch 2"),
        ("Plain", "fsdp 2"),
        ("Adversarial", "ddp 2"),
        ("Adversarial", "fsdp 2"),
    ],
)
def test_a_plain_module_trains_the_same(module, layout, runs):
    assert_same(runs, of_user(module), layout)


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2", "deepspeed 2"])
def test_batchnorm_reads_the_batch_of_all_ranks(layout, runs):
    assert_same(runs, of_user("Normalized"), layout)


@pytest.mark.parametrize(
    "layout",
    [
        "single, micro-batch 2",
        "ddp 2, micro-batch 2",
        "fsdp 2",
        "hsdp 4",
        "tensor 2",
        "pipeline 2",
        "fsdp 2 × tensor 2",
    ],
)
def test_the_example_trains_the_same(layout, runs):
    assert_same(runs, of_example(), layout)


@pytest.mark.parametrize(
    "clip", ["trainer.gradient_clip_val=0.01", "trainer.gradient_clip_val=null"]
)
@pytest.mark.parametrize("layout", ["ddp 2, micro-batch 2", "fsdp 2, micro-batch 2"])
def test_each_counted_target_has_the_same_weight(layout, clip, runs):
    """Micro-batches hold unequal numbers of targets that count, some none."""
    command = of_example("data=users", "data._target_=tests.guarantees.users.UncountedPoints", clip)
    command = tuple(word for word in command if not word.startswith(("data.samples", "data.held")))
    assert_same(runs, command, layout)


@pytest.mark.parametrize("layout", ["ddp 2", "ddp 2, micro-batch 2", "fsdp 2"])
@pytest.mark.parametrize("samples_per_epoch", [48, 44])
def test_each_step_has_the_same_samples(samples_per_epoch, layout, runs):
    """Under any number of ranks and of worker processes; in two epochs, each sample twice."""
    command = of_user("Plain", f"+data.samples={samples_per_epoch}")
    expected = samples(runs.straight(command))
    run_dir = runs.new()
    runs.start(run_dir, command, layout, "+data.num_workers=1")
    assert samples(run_dir) == expected
    ids = [each for _, step in expected for each in step]
    assert sorted(ids[: 2 * samples_per_epoch]) == sorted([*range(samples_per_epoch)] * 2)
