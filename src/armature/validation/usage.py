"""The words of a command line: what `--help` prints, and what is said of misplaced words."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from armature.config import Config
from armature.project import FOLDERS, options

WIDTH = 100
INDENT = 15 * " "  # of the options of a group
HEAD = """Train a model. GROUP=NAME and KEY=VALUE choose model, data and number of processes.

usage: python train.py [GROUP=NAME …] [KEY=VALUE …] [-m] [--cfg job]

Examples
  python train.py                a small language model, on this machine
  python train.py experiment=digits strategy=ddp trainer.devices=2
  python train.py data=text data.path='corpus/**/*.txt' run.name=mine
                                 the same command again resumes
  python train.py -m optimizer.lr=1e-3,3e-3 seed=0,1
                                 a sweep: four trials, and a ranked table at the end; side by
                                 side with sweep.parallel=auto

Options
  --cfg job                      print the configuration of this command with all values, and do
                                 not train
  --cfg job --package trainer    the same for one group
  -m, --multirun                 train once for each combination of the comma-separated values
                                 (docs/sweeps.md)
  -sc install=bash               print tab completion for a shell:
                                 eval "$(python train.py -sc install=bash)"
  --config-dir FOLDER            also look for GROUP/NAME.yaml in this folder
  --hydra-help                   Hydra's own options

Groups: GROUP=NAME takes configs/GROUP/NAME.yaml
"""
TAIL = """A key is typed with its group in front, as in trainer.max_steps=100. The comments in
configs/ explain all keys. Mistakes are reported together, before anything starts. make help
lists the other commands."""
GROUPS = {  # in the order in which a user meets them
    "experiment": "a whole run: model, data, task and their settings; the best place for your own",
    "model": "what is trained",
    "data": "what it is trained on",
    "task": "loss and metrics",
    "strategy": "how the run is spread over processes; the result stays the same",
    "trainer": "devices, precision, limits of steps and time, validation, clipping",
    "optimizer": "optimizer, learning rate and weight decay",
    "scheduler": "how the learning rate changes",
    "checkpoint": "when checkpoints are saved and which are kept",
    "callbacks": "additions to training; several: callbacks=[ema,monitors]",
    "logger": "where metrics go besides metrics.csv; several: logger=[tensorboard,wandb]",
    "launch": "restarts, hang timeout, machines",
    "debug": "short runs that look for mistakes",
    "sweep": "values to try, with -m",
    "hardware": "devices for scripts/plan.py and scripts/simulate.py; no part of a run",
    "local": "settings of this machine for every run",
}


def text() -> str:
    """Return the help text, with the groups of all folders: a user's own ones as well."""
    found = {file.parent.name for folder in FOLDERS for file in folder.glob("*/*.yaml")}
    names = [*(name for name in GROUPS if name in found), *sorted(found - {*GROUPS})]
    return "\n".join([HEAD, *map(_group, names), TAIL])


def _group(name: str) -> str:
    head = f"  {name:<12} {GROUPS.get(name, '')}".rstrip()
    listed = textwrap.fill(
        " ".join(options(name)), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT
    )
    return f"{head}\n{listed}\n"


def misplaced(words: Sequence[str]) -> list[str]:
    """Return what to type instead of words that no option of the command takes, where they
    stand.
    """
    hyphens = [each for each in words if each.startswith("-")]
    behind = [each for each in words if each not in hyphens]
    found = [
        f"{each}: keys have no hyphens. Type {each.lstrip('-')}."
        if "=" in each
        else f"{each}: there is no such option. A key is typed as {each.lstrip('-')}=VALUE; --help "
        "shows the options."
        for each in hyphens
    ]
    if behind and not hyphens:
        found.append(
            f"{' '.join(behind)}: not read, since an option stands before. Type options such as -m "
            "first."
        )
    return found


def repeated(overrides: Sequence[str]) -> list[str]:
    """Return a line for each key with several values, of which Hydra takes the last.

    The values may be secret.
    """
    values: dict[str, set[str]] = {}
    for each in overrides:
        key, _, value = each.lstrip("+").partition("=")
        values.setdefault(key, set()).add(value)
    return [
        f"{key} has {len(each)} values here: the last one counts."
        for key, each in values.items()
        if len(each) > 1
    ]


def option_problems(typed: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Return what to type instead of each KEY=VALUE that a script takes as an option, or as the
    path of its run.

    Args:
        options: the script's, with their values.
    """
    found, keys = [], {*_NO_OPTIONS, *(each.name for each in fields(Config))}
    for each in typed:
        key, _, value = each.partition("=")
        if key == "ckpt_path":
            found.append(f"{each}: type the path alone, in the place of the run directory.")
        elif (name := key.replace("-", "_")) in options and name not in keys:
            words = [
                f"--{name.replace('_', '-')}",
                *([] if isinstance(options[name], bool) else [value]),
            ]
            found.append(f"{each}: here it is an option. Type {' '.join(words)}.")
    return found


_NO_OPTIONS = ("path", "source", "target", "overrides", "out")  # out=FILE is taken, too
