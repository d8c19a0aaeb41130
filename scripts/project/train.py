"""Train: `python train.py` and `armature train` are the same."""

from armature.command.__main__ import enter

if __name__ == "__main__":
    enter()

    from armature.launcher.train import command

    command()
