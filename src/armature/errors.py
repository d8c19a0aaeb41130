"""What a user got wrong. Torch-free, so that a mistake is answered before anything heavy is imported."""


class ConfigError(ValueError):
    """One or more mistakes in a command, a config or the data it names.

    Each problem quotes the key, the value or both values, and what to type instead. They are shown together, without a
    traceback, and the command ends with exit code 2.
    """

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self):  # a ValueError pickles its message, which would come back as one problem
        return ConfigError, (self.problems,)


class RunFailed(Exception):
    """The run ended early: by a signal, or by an error. The text is the traceback of the rank that failed first.

    Attributes:
        exit_code: of the command.
        run_name: of a run that goes on when it is started again.
    """

    def __init__(self, message: str, exit_code: int = 1, *, run_name: str | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.run_name = exit_code, run_name

    def __str__(self) -> str:
        go_on = f" The same command with run.name={self.run_name} goes on from the last checkpoint."
        return super().__str__() + (go_on if self.run_name is not None else "")
