"""A checkpoint, saved under whatever layout, as one safetensors file, and back.

python scripts/convert.py outputs/<run.name> model.safetensors
python scripts/convert.py outputs/<run.name>/checkpoints/step=000120 average.safetensors --average
python scripts/convert.py model.safetensors outputs/converted/checkpoints/step=000000
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from armature import cli, resume
from armature.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run directory, a checkpoint in one, or a .safetensors file")
    parser.add_argument("target", type=Path, help="a .safetensors file, or a checkpoint directory to write")
    parser.add_argument("--average", action="store_true", help="the averaged weights of the EMA callback")
    args = parser.parse_args()
    try:
        convert(args)
    except ConfigError as error:
        cli.refuse(error.problems)


def convert(args: argparse.Namespace) -> None:
    to_file = args.target.suffix == ".safetensors"
    if to_file == (args.source.suffix == ".safetensors"):
        raise ConfigError(f"{args.source} → {args.target}: one of the two must end in .safetensors, and only one.")
    if args.target.exists():
        raise ConfigError(f"{args.target} exists already. Name another, or remove it.")
    from armature.parallel.convert import from_safetensors, to_safetensors

    if to_file:
        checkpoint = resume.find(args.source)
        if checkpoint is None:
            raise ConfigError(f"{args.source}: no complete checkpoint there. Name a run directory or a step=… in one.")
        names = to_safetensors(checkpoint, args.target, average=args.average)
    else:
        names = from_safetensors(args.source, args.target)
    print(f"{args.target}: {len(names)} tensors")


if __name__ == "__main__":
    main()
