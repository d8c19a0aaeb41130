"""Train a model.

What is trained, on what, and over how many processes is chosen on the command line:

    python train.py
    python train.py strategy=ddp trainer.devices=2
    python train.py experiment=digits optimizer.lr=1e-3

From here to the loss: launch.py starts the ranks, worker.py builds the objects that the
configuration names and passes
them to Lightning's Trainer, and the task's `training_step` in src/armature/tasks/ computes the
loss.
"""

import signal
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C before the training ends the command without a traceback

import hydra
from omegaconf import DictConfig

from armature import cli, launch, run_dir
from armature.errors import ConfigError
from armature.training.limits import prefer_typed
from armature.validation.checks import check


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
@cli.report_errors
def main(cfg: DictConfig) -> float | None:
    overrides = cli.overrides()
    with cli.checking():
        cfg = cli.with_run_dir(check(prefer_typed(cfg, overrides), overrides=overrides))
    try:
        return launch.launch(cfg, overrides)
    except ConfigError:
        run_dir.release(cfg)
        raise


if __name__ == "__main__":
    cli.run(main, config_dir=ROOT / "configs", check=partial(check, prepare=False))
