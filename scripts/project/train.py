"""Train: `python train.py` and `armature train` are the same."""

import sys

from armature.command.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
