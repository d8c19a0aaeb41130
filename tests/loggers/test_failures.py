"""A service that fails does not end a run, and says so."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf

from armature import errors, loggers
from armature.errors import ConfigError
from armature.loggers import CALLED, MOST_FAILURES, guarded, open_problems


class Away:
    """A service that answers only the calls that are named."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.calls = answers, []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _method(name: str) -> Any:
    def method(self: Away, *_: Any, **__: Any) -> None:
        self.calls.append(name)
        if name not in self.answers:
            raise ConnectionError(f"no answer to {name}")

    return method


for each in CALLED:
    setattr(Away, each, _method(each))


@pytest.mark.parametrize("name", CALLED)
def test_a_failure_of_any_method_is_reported_once_and_the_run_continues(name, caplog):
    logger: Any = guarded(Away)()
    for _ in range(MOST_FAILURES + 2):
        getattr(logger, name)({"a": 1})
    assert logger.calls == [name] * MOST_FAILURES
    assert caplog.text.count(f"Away failed in {name} (no answer") == 1
    assert caplog.text.count("is not used again") == 1


def test_a_service_that_comes_back_is_used_again(caplog):
    logger: Any = guarded(Away)("log_metrics", "finalize")
    for _ in range(2 * MOST_FAILURES):
        logger.save()
        logger.log_metrics({"a": 1})
    logger.finalize("success")
    assert logger.calls[-1] == "finalize"
    assert caplog.text.count("failed") == 1


def test_what_fails_within_log_metrics_counts(caplog):
    class Rows(Away):
        def log_metrics(self, metrics: Any, step: int) -> None:
            self.save()

    logger: Any = guarded(Rows)()
    for step in range(2 * MOST_FAILURES):
        logger.log_metrics({"a": 1}, step)
    assert logger.calls == ["save"] * MOST_FAILURES
    assert "Rows failed in save" in caplog.text


def test_a_logger_is_named_by_its_class():
    node = {"_target_": "builtins.print"}
    with pytest.raises(ConfigError, match=r"logger\.mine\._target_=builtins\.print: name a class"):
        loggers.build(OmegaConf.create({"logger": {"mine": node}}), step=None)
    assert guarded(CSVLogger).__name__ == "CSVLogger"


class Unreachable:
    @property
    def experiment(self) -> Any:
        raise ConnectionError("no route to host")


def test_a_secret_is_masked_where_a_service_cannot_be_opened(monkeypatch):
    monkeypatch.setattr(errors, "_hidden", {"to host"})
    assert "no route ***" in open_problems([Unreachable()])[0]


def test_a_service_that_cannot_be_opened_ends_the_first_start_and_no_resume(caplog):
    others: Any = SimpleNamespace(experiment=None)
    given = [Unreachable(), others]
    problems = open_problems(given)
    with pytest.raises(ConfigError, match=r"logger: Unreachable could not be opened .* Correct"):
        loggers.without_failed(given, problems, resumes=False)
    first: Any
    first, second = loggers.without_failed(given, problems, resumes=True)
    first.experiment.add_image("a", None)
    assert second is others
    assert "The run resumes without it" in caplog.text
