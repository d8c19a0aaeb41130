"""The values that a search may choose, in Hydra's words: interval(…), tag(log,interval(…)),
range(…), choice(a,b).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from armature.errors import ConfigError
from armature.sweeps.study import load_optuna


@dataclass(frozen=True)
class Parameter:
    """One key, and the values it may take."""

    key: str
    text: str  # as typed
    distribution: Any  # Optuna's

    def extremes(self) -> list[str]:
        """Return overrides to check before the first trial: every choice, or both ends."""
        ends = getattr(self.distribution, "choices", None)
        ends = ends or (self.distribution.low, self.distribution.high)
        return [f"{self.key}={value}" for value in ends]


def read(params: Mapping[str, Any], typed: Sequence[str]) -> tuple[list[Parameter], list[str]]:
    """Return the parameters to choose, and the overrides that stay.

    Raises:
        ConfigError: no values to choose from, or none between the ends.
    """
    swept, fixed = split(params, typed, OverridesParser.create())
    if not swept:
        raise ConfigError(
            "sweep=optuna: nothing to choose. Type an interval, as in "
            "'optimizer.lr=tag(log,interval(1e-4,1e-2))', "
            "or write it under hydra.sweeper.params."
        )
    found = [_parameter(each) for each in swept]
    if problems := [each for each in found if isinstance(each, str)]:
        raise ConfigError(problems)
    return [each for each in found if isinstance(each, Parameter)], fixed


def split(
    params: Mapping[str, Any], typed: Sequence[str], parser: OverridesParser
) -> tuple[list[Override], list[str]]:
    """Return the overrides that vary, and those that stay. Typed ones replace those of `params`."""
    parsed = parser.parse_overrides([*typed])
    keys = {each.key_or_group for each in parsed}
    lines = [f"{key}={_typed(value)}" for key, value in params.items()]  # a key may have a plus
    parsed += [each for each in parser.parse_overrides(lines) if each.key_or_group not in keys]
    swept = [each for each in parsed if each.is_sweep_override()]
    return swept, [str(each.input_line) for each in parsed if each not in swept]


def grid(swept: Sequence[Override]) -> list[list[str]]:
    """Return the values of each key, as overrides.

    Raises:
        ConfigError: they cannot be tried one by one: an interval has no end of them, a pattern may
            have none.
    """
    found, problems = [], []
    for each in swept:
        key, text = each.get_key_element(), str(each.input_line)
        instead = f"a list, as in {key}=A,B."
        if isinstance(each.value(), IntervalSweep):
            problems.append(
                f"{text}: an interval has no end of values. Type sweep=optuna, which chooses them, "
                f"or {instead}"
            )
            continue
        found.append([f"{key}={value}" for value in each.sweep_string_iterator()])
        if not found[-1]:
            problems.append(
                f"{text}: it names no value, and there would be no trial. Type {instead}"
            )
    if problems:
        raise ConfigError(problems)
    return found


def _typed(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _parameter(override: Override) -> Parameter | str:
    """Return the parameter, or what is wrong with it."""
    key, text, value = override.get_key_element(), str(override.input_line), override.value()
    known = load_optuna().distributions
    if isinstance(value, IntervalSweep):
        low, high, step, log = value.start, value.end, None, "log" in value.tags
        assert low is not None
        assert high is not None
    elif isinstance(value, RangeSweep):
        numbers = [*value.range()]
        if not numbers:
            return f"{text}: holds no value."
        # Optuna wants a last number that the steps reach to the last digit
        low, high, step, log = numbers[0], round(numbers[-1], 12), value.step, False
    else:
        choices = tuple(dict.fromkeys(override.sweep_string_iterator()))
        return Parameter(key, text, known.CategoricalDistribution(choices))
    whole = all(isinstance(each, int) for each in (low, high, step or 1))
    kind, step = (known.IntDistribution, step or 1) if whole else (known.FloatDistribution, step)
    try:
        return Parameter(key, text, kind(low, high, log=log, step=step))
    except ValueError as error:  # such as an end below the beginning
        return f"{text}: {error}"
