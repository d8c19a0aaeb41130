"""ddp names our own remedy for parameters that take no part in a step."""

from armature.strategies.ddp import DDP


def test_the_remedy_for_unused_parameters_is_an_option_that_exists():
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")
    DDP().on_exception(error)
    assert "strategy.find_unused_parameters=true" in str(error)
    assert "ddp_find_unused_parameters_true" not in str(error)


def test_other_errors_stay_as_they_are():
    error = RuntimeError("another one")
    DDP().on_exception(error)
    assert str(error) == "another one"
