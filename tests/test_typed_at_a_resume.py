"""A setting that is typed at a resume takes effect or is named; all else stays as it was."""

import pytest

from tests.plain_runs import LINE, column, stop_at

pytestmark = pytest.mark.slow
BOTH = [pytest.param("single", marks=pytest.mark.guarantee), "fsdp"]
USUAL = (LINE, "+task.gamma=0.9", "+task.weight_decay=0.1")


def resumed(runs, *typed, layout="single", usual=USUAL, expect=0):
    """A run that was stopped within eight steps and resumed with what is typed.

    Return its directory, the steps before the stop, and what the resume prints.
    """
    run_dir, _ = runs.train(*usual, stop_at(4), layout=layout, expect=143)
    stopped = len(column(run_dir, "step"))
    keys = {each.partition("=")[0].lstrip("+") for each in typed}
    kept = [each for each in usual if each.partition("=")[0].lstrip("+") not in keys]
    _, ended = runs.train(*kept, *typed, stop_at(4), layout=layout, run_dir=run_dir, expect=expect)
    return run_dir, stopped, ended.output


@pytest.mark.parametrize("layout", BOTH)
def test_a_rate_takes_effect_as_the_schedule_has_it_by_then(layout, runs):
    run_dir, stop, output = resumed(runs, "+task.lr=0.01", layout=layout)
    rates = [(0.1 if k < stop else 0.01) * 0.9**k for k in range(8)]
    assert column(run_dir, "lr") == pytest.approx(rates)
    assert "task.lr=0.01" in output


@pytest.mark.parametrize("layout", BOTH)
def test_a_weight_decay_takes_effect_in_the_groups_that_have_it(layout, runs):
    run_dir, stop, output = resumed(runs, "+task.weight_decay=5", layout=layout)
    assert "task.weight_decay=5 (was 0.1)" in output
    changed = f"+callbacks.set={{_target_:tests.plain_parts.SetDecay,step:{stop},value:5}}"
    expected, _ = runs.train(*USUAL, changed, layout=layout)
    assert column(run_dir, "train/loss") == column(expected, "train/loss")


@pytest.mark.parametrize("typed", ["+task.betas=[0.5,0.5]", "+task.gamma=0.5"])
def test_other_settings_of_optimizer_and_schedule_take_effect(typed, runs):
    usual, _ = runs.train(*USUAL)
    run_dir, stop, _ = resumed(runs, typed)
    before, after = (column(each, "train/loss") for each in (usual, run_dir))
    assert before[: stop + 1] == after[: stop + 1]
    assert before[-2:] != after[-2:]
    if "gamma" in typed:
        rates = [0.1 * 0.9 ** min(k, stop) * 0.5 ** max(0, k - stop) for k in range(8)]
        assert column(run_dir, "lr") == pytest.approx(rates)


@pytest.mark.guarantee
def test_what_a_hook_has_set_stays_unless_it_is_typed(runs):
    changed = "+callbacks.set={_target_:tests.plain_parts.SetDecay,step:2,value:5}"
    usual, _ = runs.train(*USUAL, changed)
    # the module takes no group `optimizer`
    kept, stop, output = resumed(runs, "optimizer=adamw", usual=(*USUAL, changed))
    assert column(kept, "train/loss") == column(usual, "train/loss")
    assert "other settings" not in output
    faster, *_ = resumed(runs, "+task.lr=0.2", usual=(*USUAL, changed))
    assert column(faster, "train/loss")[: stop + 1] == column(usual, "train/loss")[: stop + 1]


def test_a_callback_s_setting_takes_effect_and_its_count_stays(runs):
    stopping = "+callbacks.stopping={{_target_:tests.plain_parts.Stopping,patience:{}}}"
    usual = (*USUAL, stopping.format(8))
    run_dir, *_ = resumed(runs, "callbacks.stopping.patience=6", usual=usual)
    assert len(column(run_dir, "train/loss")) == 6


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("seed=1", "Samples come in another order, so this epoch may repeat and miss some"),
        ("+data.batch_size=4", "The run continues at the same sample"),
        pytest.param(
            "trainer.gradient_clip_val=1e-8",
            "trainer.gradient_clip_val=1e-08 (was auto)",
            marks=pytest.mark.guarantee,
        ),
    ],
)
def test_what_follows_from_a_setting_is_named(typed, named, runs):
    *_, output = resumed(runs, typed)
    assert typed.partition("=")[0].lstrip("+") in output
    assert named in output


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("+task.kind=sgd", "was saved with another optimizer: it holds the state of torch.optim"),
        ("+task.gamma=0", "schedule was StepLR, and ConstantLR cannot continue from its state"),
    ],
)
def test_another_optimizer_or_schedule_is_refused(typed, named, runs):
    *_, output = resumed(runs, typed, expect=2)
    assert named in output
