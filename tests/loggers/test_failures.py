"""A service that fails does not end a run, and says so."""

from types import SimpleNamespace
from typing import Any

import pytest

from armature import errors
from armature.errors import ConfigError
from armature.loggers import CALLED, MOST_FAILURES, forgive_failures, open_problems, writes_rows
from armature.loggers.tensorboard import TensorBoard
from armature.training import loggers


class Away:
    """A service that answers only the calls that are named."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.calls = answers, []

    def __getattr__(self, name: str) -> Any:
        if name not in CALLED:
            raise AttributeError(name)

        def call(*_: Any, **__: Any) -> str:
            self.calls.append(name)
            if name not in self.answers:
                raise ConnectionError(f"no answer to {name}")
            return "answer"

        return call


@pytest.mark.parametrize("name", CALLED)
def test_a_failure_of_any_method_is_reported_once_and_the_run_continues(name, caplog):
    logger: Any = Away()
    forgive_failures([logger])
    for _ in range(MOST_FAILURES + 2):
        assert getattr(logger, name)({"a": 1}) is None
    assert logger.calls == [name] * MOST_FAILURES
    assert (
        caplog.text.count(f"Away failed in {name} (no answer to {name}). The run continues; ") == 1
    )
    assert (
        caplog.text.count(f"Away failed {MOST_FAILURES} times in a row and is not used again") == 1
    )


def test_a_service_that_comes_back_is_used_again(caplog):
    logger: Any = Away("log_metrics", "finalize")
    forgive_failures([logger])
    for _ in range(2 * MOST_FAILURES):
        logger.save()
        assert logger.log_metrics({"a": 1}) == "answer"
    assert logger.finalize("success") == "answer"
    assert caplog.text.count("failed") == 1


def test_rows_that_fail_within_log_metrics_count(caplog):
    class Rows(Away):
        def log_metrics(self, metrics: Any, step: int) -> None:
            self.write_rows([{**metrics, "step": step}])

    logger: Any = Rows("save")
    forgive_failures([logger])
    for step in range(2 * MOST_FAILURES):
        logger.log_metrics({"a": 1}, step)
    assert logger.calls == ["write_rows"] * MOST_FAILURES
    assert "Rows failed in write_rows (no answer to write_rows)" in caplog.text


def test_rows_are_still_written_together(tmp_path):
    logger = TensorBoard(str(tmp_path), name="", version="")
    forgive_failures([logger])
    assert writes_rows(logger)
    logger.log_metrics({"a": 1.0}, 1)
    logger.finalize("success")
    assert [*tmp_path.glob("events.*")]


class Unreachable:
    @property
    def experiment(self) -> Any:
        raise ConnectionError("no route to host")


def test_a_secret_is_masked_where_a_service_cannot_be_opened(monkeypatch):
    monkeypatch.setattr(errors, "_hidden", {"to host"})
    assert open_problems([Unreachable()]) == {0: "Unreachable could not be opened (no route ***)."}


def test_a_service_that_cannot_be_opened_ends_the_first_start_and_no_resume(caplog):
    others = SimpleNamespace(experiment=None)
    trainer: Any = SimpleNamespace(loggers=[Unreachable(), others])
    with pytest.raises(
        ConfigError, match=r"logger: Unreachable could not be opened \(no route to host\). Correct"
    ):
        loggers.open_services(trainer, resumes=False)
    loggers.open_services(trainer, resumes=True)
    first, second = trainer.loggers
    first.experiment.add_image("a", None)
    assert second is others
    assert (
        "Unreachable could not be opened (no route to host). The run resumes without it"
        in caplog.text
    )
