"""The ranks of an examination, with one fault each: it is named within its deadline."""

import re
import socket
import time

import pytest

from armature.doctor import training
from tests.doctor.faults import examined

pytestmark = pytest.mark.slow
PATIENT = {"steps": 60.0, "collective": 20.0}  # seconds, of faults that end no examination
HOST = re.escape(socket.gethostname())


def failures(found):
    return [each for each in found if each.level == "failure"]


def test_a_healthy_run_has_no_failures(cfg):
    cfg = cfg.copy()
    cfg.trainer.max_steps = 100
    cfg.scheduler.warmup = 10 * training.STEPS  # more than an examination has
    found = examined(cfg, fault="early_stopping", **PATIENT)
    assert not failures(found)
    said = " ".join(each.what for each in found)
    assert "the weights that ranks share are the same" in said
    assert "All 2 ranks started" in said
    assert "the right value" in said
    assert "The first batches of the 2 data ranks differ" in said


def test_a_slow_rank_and_an_unsynchronized_parameter_are_named(cfg):
    found = examined(cfg, fault="a_tenth_of_the_speed+parameter_left_out", **PATIENT)
    slow = [each.what for each in found if each.level == "warning"]
    assert any(
        re.search(rf"rank 1 on {HOST} computes at \d+% of the others' speed", each) for each in slow
    ), slow
    assert re.match(
        r"The gradient differs between replicas: model\.blocks\.1\.\S+ \(\S+ on rank 0, ",
        failures(found)[0].what,
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("sleeps", rf"barrier: rank 1 on {HOST} .* never came, .* Waiting there: rank 0: "),
        ("raises", r"ArithmeticError: the deliberate mistake \(.*faults.py:"),
        ("skips_a_collective", "rank 1"),
    ],
)
def test_a_rank_that_makes_the_others_wait_is_named(cfg, fault, words):
    started = time.monotonic()
    found = failures(examined(cfg, fault=fault))
    assert time.monotonic() - started < 60
    assert len(found) == 1, found
    assert re.search(words, f"{found[0].what} {found[0].where}"), found


def test_a_rank_that_never_starts_is_named(cfg):
    found = failures(examined(cfg, absent=1, collective=1.5))
    assert [each.group for each in found] == ["launch"]
    assert found[0].what.startswith("rank 1 of 2 never started within 6 s")


def test_a_wrong_address_is_named(cfg):
    (found,) = failures(examined(cfg, fault="wrong_address"))
    words = "MASTER_ADDR=no-such-host.invalid: this machine cannot resolve the name"
    assert (found.group, found.what.startswith(words)) == ("launch", True), found


def test_other_data_on_equal_ranks_and_another_torch_are_named(tensor_cfg):
    found = failures(examined(tensor_cfg, fault="other_data+another_torch", **PATIENT))
    said = " ".join(each.what for each in found)
    assert "the first batch of rank 1 is not that of rank 0, which shares it" in said, found
    assert re.search(
        rf"torch differs between the ranks: \S+ on rank 0 on {HOST}, 2.12.1 on rank 1 on {HOST}",
        said,
    )


def test_a_layer_with_nan_is_named_with_its_rank(cfg):
    (found,) = failures(examined(cfg, fault="nan_in_a_layer", **PATIENT))
    assert re.fullmatch(rf"rank 1 on {HOST}", found.where)
    assert found.what == "The loss of batch 1 is nan."
