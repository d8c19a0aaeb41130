"""Train a model.

What is trained, on what, and over how many processes is chosen on the command line:

    python train.py
    python train.py strategy=ddp trainer.devices=2
    python train.py experiment=digits optimizer.lr=1e-3

From here to the loss: src/armature/launcher/train.py has the `@hydra.main` function, launch.py
starts the ranks, worker.py builds the objects that the configuration names and passes them to
Lightning's Trainer, and the task's `training_step` in src/armature/tasks/ computes the loss.
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))
if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C before the training ends the command without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from armature.launcher.train import command

    command()
