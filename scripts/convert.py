"""Convert a checkpoint of any layout to one safetensors file and back, or read the weights of a Lightning .ckpt.

python scripts/convert.py outputs/<run.name> model.safetensors
python scripts/convert.py outputs/<run.name>/checkpoints/step=000120 average.safetensors --average
python scripts/convert.py model.safetensors outputs/converted/checkpoints/step=000000
python scripts/convert.py lightning.ckpt outputs/converted/checkpoints/step=000000
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from armature import cli
from armature.checkpoint import resume
from armature.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run directory or a checkpoint in one; .safetensors; .ckpt")
    parser.add_argument("target", type=Path, help="a .safetensors file, or a checkpoint directory to write")
    parser.add_argument("--average", action="store_true", help="the averaged weights of the EMA callback")
    parser.add_argument("--trust", action="store_true", help="load a checkpoint that has no manifest to vouch for it")
    args = parser.parse_args()
    try:
        run(args)
    except ConfigError as error:
        cli.refuse(error.problems)


def run(args: argparse.Namespace) -> None:
    to_file, from_file = args.target.suffix == ".safetensors", args.source.suffix in (".safetensors", ".ckpt")
    if to_file == from_file:
        raise ConfigError(
            f"{args.source} → {args.target}: one of the two must be a file (.safetensors, or a .ckpt to read)."
        )
    if args.target.exists():
        raise ConfigError(f"{args.target} exists already. Name another, or remove it.")
    from armature.checkpoint import convert, storage

    if to_file:
        checkpoint = storage.first_sound(resume.checkpoints_at(args.source), trust=args.trust)
        if checkpoint is None:
            raise ConfigError(f"{args.source}: no complete checkpoint there. Name a run directory or a step=… in one.")
        names = convert.to_safetensors(checkpoint, args.target, average=args.average)
    else:
        names = convert.from_file(args.source, args.target)
    print(f"{args.target}: {len(names)} tensors")


if __name__ == "__main__":
    main()
