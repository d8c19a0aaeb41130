"""The command of train.py and of `armature train`."""

from functools import partial

import hydra
from omegaconf import DictConfig

from armature import cli, launch, run_dir
from armature.errors import ConfigError
from armature.training.limits import prefer_typed, report_replaced
from armature.validation.checks import check
from armature.validation.composing import MAIN


@hydra.main(**MAIN)
@cli.report_errors
def main(cfg: DictConfig) -> float | None:
    overrides = cli.overrides()
    with cli.checking():
        preferred = prefer_typed(cfg, overrides)
        checked = cli.with_run_dir(check(preferred, overrides=overrides))
        report_replaced(cfg, preferred)
    try:
        return launch.launch(checked, overrides)
    except ConfigError:
        run_dir.release(checked)
        raise


def command() -> None:
    cli.run(main, check=partial(check, prepare=False))
