"""Convert a checkpoint of any layout to one file for other programs, or read such a file's weights.

python scripts/convert.py outputs/<run.name> model.safetensors
python scripts/convert.py outputs/<run.name>/checkpoints/step=000120 average.safetensors --average
python scripts/convert.py outputs/<run.name> lightning.ckpt
    for Lightning: load_from_checkpoint, ckpt_path
python scripts/convert.py outputs/<run.name> my-model
    a folder that transformers loads (decoders)
python scripts/convert.py outputs/<run.name> my-adapter --adapter
    a folder that peft loads (task=lora)
python scripts/convert.py outputs/<run.name> my-model model.pretrained=FOLDER
    if the base model has moved (task=lora)
python scripts/convert.py model.safetensors outputs/converted/checkpoints/step=000000
python scripts/convert.py lightning.ckpt outputs/converted/checkpoints/step=000000
"""

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from armature import cli
from armature.checkpoint import directory, resume
from armature.errors import ConfigError

FILES, PROGRAMS = (".safetensors", ".ckpt"), (".onnx", ".pt2")
SOURCES = (".safetensors", *directory.FILE_SUFFIXES)


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "source",
        type=Path,
        help="a run directory or a checkpoint in one; .safetensors; .ckpt",
    )
    parser.add_argument("target", type=Path, help=".safetensors, .ckpt; a folder")
    parser.add_argument(
        "--average", action="store_true", help="the averaged weights of the EMA callback"
    )
    parser.add_argument(
        "--best", action="store_true", help="the run's best checkpoint instead of its last"
    )
    parser.add_argument(
        "--dtype", help="of a folder's weights: float32, bfloat16 or float16; default: as imported"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="a folder for peft with the adapters alone"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="load a checkpoint that has no manifest to vouch for it",
    )
    args = cli.parse_arguments(parser)
    try:
        run(args)
    except ConfigError as error:
        cli.refuse(error.problems)
    except OSError as error:  # a full disk, a folder that may not be written
        reason = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        cli.refuse([f"{args.source} → {args.target}: {reason}. Make room, or name another place."])


def run(args: argparse.Namespace) -> None:
    source, target = args.source, args.target
    if target.suffix in PROGRAMS:
        raise ConfigError(
            f"{target}: torch writes programs, from Python: torch.export and torch.onnx take the "
            f"module of armature.load('{source}'), or its model (docs/resume.md)."
        )
    to_file = target.suffix in FILES
    from_file = source.suffix in SOURCES and not source.is_dir()
    to_folder = not to_file and not from_file and not near_suffix(target)
    if to_file == from_file and not to_folder:
        raise ConfigError(
            f"{source} → {target}: one of the two must be a run or a checkpoint directory, and the "
            f"other a file ({', '.join(SOURCES)} to read, {', '.join(FILES)} to write), or the "
            "target a new folder for transformers."
        )
    if target.exists():
        raise ConfigError(f"{target} exists already. Name another, or remove it.")
    if not source.exists():
        raise ConfigError(f"{source}: no such path.")
    if (source / "adapter_config.json").is_file():
        raise ConfigError(
            f"{source}: an adapter's folder. peft adds it to its model "
            "(merge_and_unload: docs/finetune.md); of a run of yours name the run instead."
        )
    check_options(args, from_file=from_file)
    from armature.checkpoint import convert

    if from_file:
        print(f"{target}: {len(convert.from_file(source, target))} tensors")
    elif to_folder:
        print(export_folder(args))
    else:
        write = convert.to_safetensors if target.suffix == ".safetensors" else convert.to_ckpt
        checkpoint = find(args)
        hint_at_average(args, checkpoint)
        if (weights := whole_weights(args, checkpoint)) is None and args.overrides:
            raise ConfigError(
                f"{', '.join(args.overrides)} would change nothing: {checkpoint} holds all weights."
            )
        names = write(checkpoint, target, average=args.average, base=weights)
        print(f"{target}: {len(names)} tensors")


def check_options(args: argparse.Namespace, *, from_file: bool) -> None:
    """Raise ConfigError for options that this conversion does not use."""
    typed = {"--average": args.average, "--best": args.best} if from_file else {}
    for each in args.overrides:
        typed[each] = from_file or not each.startswith("model.pretrained=")
    if from_file or args.target.suffix in FILES:
        own = vars(args)
        typed |= {"--dtype": own.get("dtype") is not None, "--adapter": own.get("adapter", False)}
    if unused := [option for option, is_typed in typed.items() if is_typed]:
        raise ConfigError(
            f"{args.source} → {args.target}: {', '.join(unused)} would change nothing here. Leave "
            "it out."
        )


def near_suffix(target: Path) -> bool:
    """Return whether a target was meant to be a file: its suffix is like one that is written here
    or elsewhere.
    """
    known = (*FILES, *PROGRAMS, *SOURCES, ".bin", ".gguf", ".h5")
    return (
        bool(difflib.get_close_matches(target.suffix.lower(), known, n=1, cutoff=0.7))
        if target.suffix
        else False
    )


def export_folder(args: argparse.Namespace) -> str:
    """Write a folder for transformers, and return what was written."""
    from armature.finetune import export, peft
    from armature.loading import open_run
    from armature.training import process

    process.quiet()
    cfg, checkpoint = open_run(
        args.source, best=args.best, overrides=args.overrides, trust=args.trust
    )
    hint_at_average(args, checkpoint)
    if args.adapter:
        return peft.export(cfg, checkpoint, args.target, average=args.average)
    return export.export(cfg, checkpoint, args.target, dtype=args.dtype, average=args.average)


def find(args: argparse.Namespace) -> Path:
    """Return the checkpoint to convert, verified."""
    from armature.checkpoint import storage

    if args.best:
        from armature.loading import open_run

        return open_run(args.source, best=True, trust=args.trust)[1]
    checkpoint = storage.intact_beside_training(
        lambda: resume.checkpoints_at(args.source), trust=args.trust
    )
    if checkpoint is None:
        raise ConfigError(
            f"{args.source}: no complete checkpoint there. Name a run directory or a step=… in one."
        )
    return checkpoint


def hint_at_average(args: argparse.Namespace, checkpoint: Path) -> None:
    """Say which weights are not written, if the checkpoint holds averaged ones."""
    from armature.checkpoint import convert

    if not args.average and convert.has_averages(checkpoint):
        print(f"{checkpoint} also holds averaged weights (callbacks=ema): --average writes those.")


def whole_weights(args: argparse.Namespace, checkpoint: Path) -> dict[str, Any] | None:
    """Return all weights of a run whose checkpoint leaves out its base model's, or None."""
    from armature.finetune import base

    if base.recorded(checkpoint) is None:
        return None
    from armature.loading import load_task, open_run

    cfg, _ = open_run(checkpoint, overrides=args.overrides, trust=args.trust)
    weights = load_task(cfg, checkpoint, averaged=False).state_dict()
    return {name: value for name, value in weights.items() if hasattr(value, "numel")}


if __name__ == "__main__":
    main()
