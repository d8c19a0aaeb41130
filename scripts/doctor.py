"""Examine a run before it is started: the machine, the launch, the links, one real step, the data,
the run directory.

    python scripts/doctor.py strategy=ddp trainer.devices=2
    torchrun --nproc-per-node=8 scripts/doctor.py strategy=fsdp trainer.devices=8
    srun python scripts/doctor.py experiment=digits trainer.devices=8 trainer.num_nodes=2

Type the overrides of the run, and start it as you start the run. Nothing is trained on or written
to the run directory.

    --json              print the findings as JSON
    --deadline=SECONDS  for a check of the links; for the ranks to start, four times as long (30)
    --step-seconds=SECONDS  for building the model, and for a few steps of training (600)

Exit code: 0 if all is well, 1 for warnings, 2 for failures.
"""

import os
import sys
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import hydra
from omegaconf import DictConfig

from armature import cli, project
from armature.doctor import finding
from armature.doctor.examine import examine
from armature.errors import ConfigError, error_line, masked
from armature.launcher import environment
from armature.launcher.streams import make_lasting
from armature.training.limits import prefer_typed
from armature.validation.checks import check
from armature.validation.composing import MAIN

sys.path.insert(1, str(project.ROOT))  # modules of users, as for train.py

OPTIONS = {"--json": 0.0, "--deadline": 30.0, "--step-seconds": 600.0}
MOST_SECONDS = 1e6
options = dict(OPTIONS)


def take_options() -> dict[str, float]:
    """Remove our own options from the command line and return their values; the rest is Hydra's."""
    values, rest = dict(OPTIONS), []
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name not in OPTIONS:
            rest.append(argument)
            continue
        try:
            values[name] = float(value) if name != "--json" else 1.0
        except ValueError:
            values[name] = 0.0
        if not 0 < values[name] <= MOST_SECONDS:
            cli.refuse([f"{argument}: type a number of seconds, as in {name}={OPTIONS[name]:.0f}."])
    sys.argv[1:] = rest
    return values


def show(found: list[finding.Finding], *, as_json: bool) -> None:
    print(finding.as_json(found) if as_json else finding.as_text(found), flush=True)


@hydra.main(**MAIN)
@cli.report_errors
def main(cfg: DictConfig) -> None:
    shows, overrides = partial(show, as_json=bool(options["--json"])), cli.overrides()
    try:
        with cli.checking():
            cfg = check(prefer_typed(cfg, overrides), overrides=overrides)
    except ConfigError as error:
        if environment.is_first("RANK", "SLURM_PROCID"):
            shows(finding.refused("launch", error.problems))
        code = 2
    else:
        deadlines = {"collective": options["--deadline"], "steps": options["--step-seconds"]}
        try:
            code = examine(cfg, deadlines=deadlines, show=shows)
        except Exception as error:  # exit code 1 would mean that there are only warnings
            traceback.print_exc()
            what = f"The examination ended with an error: {masked(error_line(error))}."
            shows([finding.failure("launch", what, remedy="Correct it, then examine again.")])
            code = 2
    sys.stdout.flush()
    os._exit(
        code
    )  # a thread of gloo can abort the interpreter's teardown, and torchrun would report that


def command() -> None:
    make_lasting()
    if any(each in ("-h", "--help") for each in sys.argv[1:]):
        print(__doc__)
        return
    as_json = "--json" in sys.argv
    try:
        options.update(take_options())
        cli.run(main)
    except cli.Refused as refused:
        if as_json and environment.is_first("RANK", "SLURM_PROCID"):
            show(finding.refused("launch", refused.problems), as_json=True)
        raise
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    command()
