"""Stray variables and lost streams: named, or survived."""

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from armature.errors import ConfigError
from armature.launcher import environment, streams, supervise


def test_a_stray_variable_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "soon")
    with pytest.raises(
        ConfigError, match=r"RANK=soon: must be a number; a launcher sets it. Type unset RANK"
    ):
        environment.rank()


def test_a_rank_without_a_size_is_left_over(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    environment.forget_lone_rank()
    assert "RANK" not in os.environ
    assert environment.rank() == 0
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    environment.forget_lone_rank()
    assert environment.rank() == 3


def test_a_closed_pipe_ends_no_run(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        streams.make_lasting()
        os.close(reading)
        for _ in range(3):
            print("step")
            sys.stdout.flush()
        assert sys.stdout.isatty() is False


def test_a_name_of_rank_0s_machine_may_become_known_later_and_is_named_if_nobody_knows_it(
    monkeypatch,
):
    unknown = OSError("Name or service not known")
    look_up = Mock(side_effect=[unknown, unknown, []])
    monkeypatch.setenv("MASTER_ADDR", "node-0.invalid")
    monkeypatch.setattr(environment.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(environment.time, "sleep", lambda seconds: None)
    environment.wait_for_main_address()
    assert look_up.call_count == 3
    look_up.side_effect = unknown
    with pytest.raises(
        ConfigError,
        match=r"MASTER_ADDR=node-0\.invalid: this machine cannot resolve .* hostname -I",
    ):
        environment.wait_for_main_address(seconds=0)


def test_a_first_machine_may_start_later_and_is_named_if_it_does_not(monkeypatch, capsys):
    connect = Mock(side_effect=[OSError("refused"), Mock()])
    monkeypatch.setattr(environment.socket, "create_connection", connect)
    monkeypatch.setattr(environment.time, "sleep", lambda seconds: None)
    environment.wait_for_endpoint("192.0.2.1:29500", seconds=9)
    assert "does not answer (refused). Waiting up to 9 s." in capsys.readouterr().err
    connect.side_effect = OSError("refused")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:29500 does not answer \(refused\). Type"):
        environment.wait_for_endpoint("192.0.2.1:29500", seconds=0)
    connect.reset_mock()
    environment.wait_for_endpoint("localhost:29500", seconds=0)
    connect.assert_not_called()


@pytest.mark.parametrize("typed", [None, "", "7", "random"])
def test_all_ranks_have_one_order_of_sets_unless_the_user_has_chosen(typed, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if typed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", typed)
    variables = supervise.process_variables(2)
    assert variables["PYTHONHASHSEED"] == (typed or "0")
    command = [sys.executable, "-c", "print(list({str(i) for i in range(100)}))"]
    one, other = (
        subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE).stdout
        for _ in range(2)
    )
    assert (one == other) == (typed != "random")
