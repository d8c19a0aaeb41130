"""Errors that are shown to the user without a traceback.

Torch-free: a mistake is reported before torch is imported.
"""

import logging
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from traceback import FrameSummary

from armature.project import PACKAGE, ROOT, shipped

# torch adds the traceback of its worker to the text
_OF_LOADER = "Caught ConfigError in DataLoader worker process"
EXIT_CONFIG = 2  # the exit code of a mistake in the configuration


class ConfigError(ValueError):
    """One or more mistakes in a command, a config or the data that it names.

    Each problem quotes the key and the value, or both values, and says what to type instead. They
    are shown together, without a traceback, and the command ends with exit code 2.
    """

    def __init__(self, problems: list[str] | str) -> None:
        if isinstance(problems, str) and problems.startswith(_OF_LOADER):
            problems = (
                problems.rpartition(f"{__name__}.{type(self).__name__}: ")[2].strip().splitlines()
            )
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self):  # else pickling keeps only the message, as one problem
        return ConfigError, (self.problems,)


class RunFailed(Exception):
    """The run ended early, by a signal or an error.

    The text is the traceback of the rank that failed first.
    """

    def __init__(self, message: str, exit_code: int = 1, *, run_name: str | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # of the command
        self.run_name = run_name  # of a run that resumes when it is started again

    def __str__(self) -> str:
        resume = f" The same command with run.name={self.run_name} resumes it."
        return super().__str__() + (resume if self.run_name is not None else "")


class MicroBatchTooLarge(RuntimeError):
    """Memory ran out in a step that a smaller micro-batch repeats: recorded for the process that
    starts the ranks.
    """


class NotFinite(RunFailed):
    """The loss or a gradient was not finite, which ends the run (`trainer.on_nan`).

    A restart would not help.
    """


class NotSaved(RunFailed):
    """A checkpoint could not be saved, and the run ends because of it."""


class EndedByCode(RunFailed):
    """The user's code ended the process, as by sys.exit(). A restart would not help."""

    @classmethod
    def by(cls, error: SystemExit | KeyboardInterrupt) -> "EndedByCode":
        # Lightning exits then
        cause = error.__context__ if isinstance(error.__context__, KeyboardInterrupt) else error
        return cls(
            f"The run ended early, since {cause!r} was raised at {place_of(cause)}. To stop "
            "training there, set "
            "trainer.should_stop = True; if something is wrong, raise an error that says what."
        )


MASK = "***"  # stands for a secret
_hidden: set[str] = set()  # values that no message and no log shows


def hide(values: Iterable[str]) -> None:
    """Never show these values, such as those of secret environment variables, in messages and
    logs.
    """
    # a shorter one would hide parts of words
    _hidden.update(value for value in values if len(value) >= 4)


def masked(text: str) -> str:
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


class MaskingFormatter(logging.Formatter):
    """Writes log records without hidden values."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def own_frames(frames: Sequence[FrameSummary]) -> list[FrameSummary]:
    """Return those of a traceback or a stack that lie outside of installed packages; all of them if
    none does.
    """
    return [each for each in frames if f"{os.sep}site-packages{os.sep}" not in each.filename] or [
        *frames
    ]


# not the user's code: Python, what is installed, and this project's own commands
_FOLDERS = (
    sysconfig.get_path("stdlib"),
    PACKAGE,
    PACKAGE.parent / "hydra_plugins",
    shipped("scripts"),
)
_OTHERS = (*(f"{folder}{os.sep}" for folder in _FOLDERS), str(ROOT / "train.py"), "<")
_CHAINS = (
    "\n\nThe above exception was the direct cause of the following exception:\n\n",
    "\n\nDuring handling of the above exception, another exception occurred:\n\n",
)
LOG_NOTE = "The whole traceback is in"
_FRAME = re.compile(r'  File "(.+)", line \d+, in .+')


def brief(text: str, *, points: bool = True) -> str:
    """Return a traceback without its lines of libraries and of this project.

    Args:
        text: of `traceback.format_exc()`.
        points: say where the whole traceback is.
    """
    *causes, last = re.split(f"({'|'.join(_CHAINS)})", text)
    parts = [*map(_brief_part, causes[::2]), _brief_part(last)]
    shown = ["Traceback (most recent call last), of your code alone:"] * any(e[0] for e in parts)
    for i, (users, message) in enumerate(parts):
        if users or i == len(parts) - 1:
            shown += [*users, message]
            shown += [causes[2 * i + 1].strip()] if i < len(parts) - 1 else []
    if points and LOG_NOTE not in shown[-1]:
        shown.append("HYDRA_FULL_ERROR=1 shows the whole traceback.")
    return "\n".join(shown)


def _brief_part(text: str) -> tuple[list[str], str]:
    """Return the user's lines of one exception's traceback, and its message."""
    lines, shown, end = text.splitlines(), [], 0
    for i, line in enumerate(lines):
        if (frame := _FRAME.fullmatch(line)) is None:
            continue
        end = i + 1
        while end < len(lines) and lines[end].startswith(("    ", "  [Previous line")):
            end += 1
        if is_users(frame[1]):
            shown.append("\n".join(lines[i : min(i + 2, end)]))
    return [*dict.fromkeys(shown)], "\n".join(lines[end:]).rstrip()


def is_users(file: str) -> bool:
    """Return whether a file of a traceback holds the user's own code."""
    installed = any(
        f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages")
    )
    return not (installed or file.startswith(_OTHERS))


def users_frames(frames: Iterable[FrameSummary]) -> list[FrameSummary]:
    """Return those of a traceback or a stack that are lines of the user's code."""
    return [frame for frame in frames if is_users(frame.filename)]


def by_user(error: BaseException) -> bool:
    """Return whether a line of the user's code led to an error."""
    return bool(users_frames(traceback.extract_tb(error.__traceback__)))


def place_of(error: BaseException) -> str:
    """Return `file:line` of the user's code that led to an error, or of its last line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = (users_frames(frames) or frames)[-1]
    return f"{place.filename}:{place.lineno}"


def place_of_call() -> str:
    """Return `file:line` of the user's code that is running, or "" if none is."""
    frames = users_frames(traceback.extract_stack())
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def error_line(error: BaseException) -> str:
    """Return an error of Python or a library as one line."""
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, OSError) and text
        else f"{type(error).__name__}: {text}".removesuffix(": ")
    )


def end_of_data(place: str) -> RuntimeError:
    """Return the error for a StopIteration of the user's code: Lightning's loops and torch's
    loaders would take it for the end of data.
    """
    return RuntimeError(
        f"{place} raised StopIteration, as next() does when an iterator has ended. It would end "
        "the epoch here, as if the data had ended. Begin the iterator anew, or make it endless "
        "(itertools.cycle)."
    )
