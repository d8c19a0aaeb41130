"""The command line around Hydra: config types, .env, the run's name and error messages."""

import argparse
import functools
import gc
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from dotenv import load_dotenv
from hydra._internal import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from armature import config, files, hardware, project, run_dir
from armature.errors import (
    EXIT_CONFIG,
    ConfigError,
    EndedByCode,
    RunFailed,
    brief,
    error_line,
    masked,
)
from armature.launcher import environment
from armature.launcher.rank import leave
from armature.launcher.streams import make_lasting
from armature.sweeps.conclude import concluding
from armature.validation import foreign_keys, signatures, usage
from armature.validation.compose import (
    CONFIG_ERRORS,
    composed,
    explain,
    explain_sweep,
    plain_text,
    searching,
)
from armature.validation.quoting import addable, quoted

Task = Callable[[DictConfig], float | None]  # of a command: returns what a sweep optimizes
_composed = threading.Event()  # the configuration composed, and the command itself began
full_error = bool(os.environ.get("HYDRA_FULL_ERROR"))  # `run` sets it for its own purpose
# a line of Hydra's completion for bash, which ignores its result
_SOUGHT = 'grep "@hydra.main" $file_path -q'
_OF_TRAINING = {"run", "resume", "strategy", "trainer", "logger", "optimizer", "scheduler"}
_OF_TRAINING |= {"data.global_batch_size", "data.micro_batch_size"}
TRIAL_OPTION = "--trial"  # of the command of a trial's process


class _Parser(argparse.ArgumentParser):
    """Takes Hydra's help of --shell-completion, which is no text before it is printed: Python 3.14
    reads each text that an argument is added with.
    """

    def add_argument(self, *args: Any, help: Any = None, **kwargs: Any) -> Any:
        action = super().add_argument(*args, **kwargs)
        action.help = help
        return action


def run(main: Callable[[], None], *, check: Callable[[DictConfig], object] | None = None) -> None:
    """Run a `@hydra.main` function.

    A mistake in the configuration ends with one message and exit code 2.

    `check` checks a configuration as `main` does: a sweep checks all its values before the first
    trial.
    """
    make_lasting()
    # garbage collection during imports takes a quarter of the start; the worker enables it again
    gc.disable()
    if not {*hardware.WAITING} & {*os.environ}:
        os.environ |= hardware.WAITING
    _load_env(Path.cwd() / ".env")
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    if sys.argv[1:2] == [TRIAL_OPTION]:
        return _run_trial(main)
    # Hydra then raises its exceptions instead of printing and exiting
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = [sys.argv[0], *(addable(quoted(argument)) for argument in sys.argv[1:])]
    hydra_utils.argparse = SimpleNamespace(ArgumentParser=_Parser)  # pyright: ignore
    hydras = hydra_utils.get_args_parser()
    hydras.allow_abbrev = False  # else --experiment=NAME is Hydra's --experimental-rerun
    arguments, misplaced = hydras.parse_known_args()
    if arguments.help:
        print(usage.text())
        return
    default_config = not (arguments.config_name or arguments.config_path)
    folders = filter(os.path.isdir, filter(None, [arguments.config_dir]))
    typed = [*map(searching, folders), *arguments.overrides]
    problems = [*usage.misplaced(misplaced), *foreign_keys.of_groups(arguments.overrides)]
    problems += foreign_keys.ineffective(typed) + config_dir_problems(arguments.config_dir)
    if default_config and not arguments.cfg:
        problems += _sweep_problems(
            arguments.overrides,
            multirun=arguments.multirun or any("hydra.mode" in e for e in arguments.overrides),
        )
    if problems:
        refuse(problems)
    try:
        if environment.is_first("RANK", "SLURM_PROCID"):
            for line in usage.repeated(arguments.overrides):
                print(line, file=sys.stderr)
        sweep = arguments.multirun and default_config
        if sweep and check is not None and (problems := explain_sweep(typed, check)):
            refuse(problems)
        if arguments.multirun:
            environment.share_sources()
        with concluding(), _completing_ours_only() if arguments.shell_completion else nullcontext():
            main()
    except CONFIG_ERRORS as error:
        sound = _composed.is_set() and not arguments.multirun
        refuse([plain_text(error)] if sound else explain(error, typed, sweep=arguments.multirun))
    except ConfigError as error:  # such as that of a search, whose cause says less
        refuse(error.problems)
    except RunFailed as error:  # a trial of a sweep failed; the other trials have run
        _end(error)
    except Exception as error:
        if _composed.is_set():  # training had begun: this is no mistake in the command
            raise
        refuse(explain(error, typed, sweep=arguments.multirun))
    if environment.is_joined():
        leave()


def _run_trial(main: Callable[..., None]) -> None:
    """Run the trial that the pool of a sweep sends (`sweeps.pool`)."""
    from armature.sweeps import pool

    cfg = pool.receive()
    HydraConfig.instance().set_config(cfg)
    of_trial = cfg.copy()
    with read_write(of_trial), open_dict(of_trial):
        del of_trial["hydra"]
    try:
        main(of_trial)
    except RunFailed as error:
        if error.exit_code != EXIT_CONFIG:  # else its message was printed
            print(masked(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)


@contextmanager
def _completing_ours_only() -> Iterator[None]:
    """Correct the bash function that Hydra prints: at Tab it would run any Python file, and not
    only Hydra's.
    """
    printed = io.StringIO()
    with redirect_stdout(printed):
        yield
    print(printed.getvalue().replace(_SOUGHT, f"{_SOUGHT} || return"), end="")


def _load_env(file: Path) -> None:
    try:
        load_dotenv(file)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL
        refuse(
            [
                f"{file} cannot be read ({error_line(error)}). Save it as UTF-8 text, make it "
                "readable, or remove it."
            ]
        )


def compose(typed: Sequence[str]) -> DictConfig:
    """Return the configuration of a command line of KEY=VALUE, unchecked.

    ConfigError: all that does not compose.
    """
    overrides = [addable(quoted(each)) for each in typed]
    if problems := foreign_keys.of_groups(overrides):
        raise ConfigError(problems)
    return composed(overrides)


def report_errors(task: Task) -> Task:
    """Print a ConfigError or RunFailed and end the process.

    A sweep's failed trial raises, and the others run.
    """

    @functools.wraps(task)
    def wrapper(cfg: DictConfig) -> float | None:
        # by name: joblib and submitit pickle this function with all that it mentions
        return _run_task(task, cfg)

    return wrapper


def _run_task(task: Task, cfg: DictConfig) -> float | None:
    _composed.set()
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        return _ended_by_itself(task, cfg)
    except ConfigError as error:
        if not sweep:
            refuse(error.problems)
        # of these values only: the other trials run
        text = f"trial {HydraConfig.get().job.num} was refused: {_text_of(error.problems)}"
        print(masked(text), file=sys.stderr)
        raise RunFailed(text, EXIT_CONFIG) from error
    except RunFailed as error:
        if error.exit_code in (1, EXIT_CONFIG) and sweep:
            raise
        if sweep and error.run_name is not None:
            error.run_name = _sweep_name(cfg)  # run.name of the whole sweep
        _end(error)
    except Exception:
        if full_error:
            raise
        text = brief(traceback.format_exc())
        if sweep:
            raise RunFailed(text) from None
        print(masked(text), file=sys.stderr)
        sys.exit(1)


def _ended_by_itself(task: Task, cfg: DictConfig) -> float | None:
    """Run a command whose end is not decided by the user's code, as by sys.exit() in a module that
    it imports.
    """
    try:
        return task(cfg)
    except Refused:
        raise
    except SystemExit as error:
        raise EndedByCode.by(error) from error


@contextmanager
def checking() -> Iterator[None]:
    """Let the first of several ranks alone say what all of them find."""
    if not environment.is_first("RANK", "SLURM_PROCID"):
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


class Refused(SystemExit):
    """Ends a command whose configuration is wrong; the problems have been printed."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(EXIT_CONFIG)
        self.problems = problems


def _end(error: RunFailed) -> NoReturn:
    print(masked(str(error)), file=sys.stderr)
    sys.exit(error.exit_code)


def refuse(problems: list[str]) -> NoReturn:
    print(masked(_text_of(problems)), file=sys.stderr)
    raise Refused(problems)


def _text_of(problems: list[str]) -> str:
    head = "1 problem:" if len(problems) == 1 else f"{len(problems)} problems:"
    return project.as_typed("\n".join([head, *(f"  - {problem}" for problem in problems)]))


def with_run_dir(cfg: DictConfig) -> DictConfig:
    """Return the configuration with run.name and run.dir, named after the experiment, or the sweep
    and the trial.
    """
    hydra = HydraConfig.get()
    if hydra.job.chdir:
        raise ConfigError(
            "hydra.job.chdir=true: paths would be read from another folder. Remove it; run.root=… "
            "names the outputs."
        )
    if str(hydra.run.dir) != ".":  # of a file
        raise ConfigError(
            f"hydra.run.dir={hydra.run.dir}: this has no effect here. Remove it from the file that "
            "sets it. Type run.root=… (holds all runs) and run.name=… (this run)."
        )
    chosen = hydra.runtime.choices
    group = "task" if "model" in signatures.unused(cfg.task) else "model"
    label = str(chosen.get("experiment") or chosen.get(group))
    trial = f"{_sweep_name(cfg)}/{hydra.job.num}" if hydra.mode == RunMode.MULTIRUN else None
    return run_dir.decide(cfg, label=label, trial=trial)


def _sweep_problems(overrides: Sequence[str], *, multirun: bool) -> list[str]:
    """Return what is wrong with sweep=NAME and sweep.parallel=: several values, or one where a
    single run is started.
    """
    chosen = {
        each: value
        for each in overrides
        for key, _, value in [each.partition("=")]
        if key == "sweep.parallel" or (key == "sweep" and value not in ("null", "[]"))
    }
    several = [
        f"{each}: it takes one value. Type sweep=NAME, a file of configs/sweep/, and "
        "sweep.parallel=auto, or a number of trials."
        for each, value in chosen.items()
        if value.startswith("[") or "," in value or "(" in value
    ]
    return several or [
        f"{e}: here it has no effect. Leave it out; python train.py -m {e} starts the sweep."
        for e in (() if multirun else chosen)
    ]


def _sweep_name(cfg: DictConfig) -> str:
    folder, root = Path(HydraConfig.get().sweep.dir).absolute(), Path(cfg.run.root).absolute()
    return str(folder.relative_to(root)) if root in folder.parents else folder.name


def overrides() -> list[str]:
    """Return the typed overrides, with references to the environment unresolved."""
    return [
        str(override)
        for override in OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        or ()
    ]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints a script's docstring as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def train_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for scripts that take train.py's command line."""
    made = parser(description)
    made.add_argument("--config-dir", help="a folder with your configurations, as for train.py")
    return made


def run_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every script that loads a run."""
    made = parser(description)
    made.add_argument("path", type=Path, help="a run directory, or a checkpoint in one")
    made.add_argument(
        "--best", action="store_true", help="the run's best checkpoint instead of its last"
    )
    made.add_argument("--accelerator", choices=("auto", "cpu", "gpu", "mps"), default="auto")
    made.add_argument(
        "--trust",
        action="store_true",
        help="load a checkpoint that has no manifest to vouch for it",
    )
    return made


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse a script's command line.

    `overrides` of the result holds its KEY=VALUE.

    A path that does not exist is refused here, before torch is imported.
    """
    args, typed = parse_overrides(parser, purpose=" to change the run's configuration")
    args.overrides = typed
    if wrong := usage.option_problems(typed, vars(args)):
        refuse(wrong)
    if (path := getattr(args, "path", None)) is not None and not os.path.exists(path):
        refuse([f"{path}: no such path. Name a run directory, such as outputs/<run.name>."])
    return args


def refuse_training_keys(typed: Sequence[str], *, used: Sequence[str] = ()) -> None:
    """Refuse KEY=VALUE that only a training reads, but for the keys `used`: they would be ignored
    in silence.
    """
    keys = {each: config.key_of(each) for each in typed}
    if ignored := [
        each
        for each, key in keys.items()
        if _OF_TRAINING & {key, key.split(".")[0]} and key not in used
    ]:
        refuse(
            [
                f"{', '.join(ignored)} would change nothing here: only a training reads it. Leave "
                "it out."
            ]
        )


def out_file(words: Sequence[str], given: Path | None) -> tuple[list[str], Path | None]:
    """Return the words but out=FILE, and the file of the last such word, or `given` by --out."""
    typed = [word for word in words if word.startswith("out=")]
    return [word for word in words if word not in typed], Path(
        typed[-1].removeprefix("out=")
    ) if typed else given


def output_problems(option: str, file: Path, suffix: str) -> list[str]:
    """Return why a script could not write its result to a file of this suffix, before the work; []
    if it can.
    """
    if file.suffix != suffix or not os.path.isdir(file.absolute().parent):
        return [f"{option}{file}: name a file that ends in {suffix}, in a folder that exists."]
    reason = files.why_not_writable(file)
    return (
        [f"{option}{file}: it cannot be written ({reason}). Name another file."] if reason else []
    )


def write_output(option: str, file: Path, text: str) -> None:
    """Write a script's result, as a whole or not at all.

    Refuse a file that cannot be written, as on a full disk.
    """
    try:
        files.replace(file.absolute(), text)
    except OSError as error:
        refuse(
            [
                f"{option}{file}: it cannot be written ({error.strerror}). Make room, or name "
                "another file."
            ]
        )


def config_dir_problems(folder: str | None) -> list[str]:
    if folder is None or os.path.isdir(folder):
        return []
    return [
        f"--config-dir {folder}: there is no such folder. Name the one that holds your "
        "configurations."
    ]


def parse_overrides(
    parser: argparse.ArgumentParser, *, purpose: str
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command line, and its KEY=VALUE.

    `purpose` of these is said of any other word.

    Secrets of .env, such as HF_TOKEN, are in the environment afterwards, as they are for train.py.
    """
    make_lasting()
    _load_env(Path.cwd() / ".env")
    args, typed = parser.parse_known_args()
    if wrong := [
        each for each in typed if each[:1] == "-" or ("=" not in each and each[:1] != "~")
    ]:
        parser.error(f"{' '.join(wrong)}: type KEY=VALUE{purpose}, or an option")
    folder = getattr(args, "config_dir", None)
    if problems := _sweep_problems(typed, multirun=False) + config_dir_problems(folder):
        refuse(problems)
    return args, [*map(searching, filter(None, [folder])), *typed]


def whole_number(key: str, typed: str) -> int | None:
    """Return a typed whole number, or None for auto."""
    if typed == "auto":
        return None
    if not typed.isdecimal() or int(typed) < 1:
        raise ConfigError(f"{key}={typed}: type a whole number from 1, or leave it out.")
    return int(typed)


def accelerator(name: str) -> str:
    """Return cpu, gpu or mps; `auto` is what this machine has."""
    if name == "gpu" and not hardware.gpu_count():
        raise ConfigError("--accelerator gpu: this machine has no GPU. Type --accelerator cpu.")
    return hardware.default_accelerator() if name == "auto" else name
