"""Measure a trained model on held-out data.

python scripts/evaluate.py outputs/<run.name>
python scripts/evaluate.py outputs/<run.name> --split val --best
python scripts/evaluate.py outputs/<run.name>/checkpoints/step=000120 data.eval_batch_size=64
python scripts/evaluate.py outputs/<run.name> data.path='other/**/*.txt'
    read with the run's own tokenizer

The run's callbacks are called, too. Type +callbacks.NAME={_target_:…} for another,
'~callbacks.NAME' to leave one out.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from armature import cli
from armature.errors import ConfigError


def main() -> None:
    parser = cli.run_parser(__doc__)
    parser.add_argument("--split", choices=("val", "test"), default="test")
    args = cli.parse_arguments(parser)
    cli.refuse_training_keys(args.overrides, used=["trainer.precision"])
    try:
        evaluate(args)
    except ConfigError as error:
        cli.refuse(error.problems)


def evaluate(args: argparse.Namespace) -> None:
    from armature.loading import open_run

    cfg, checkpoint = open_run(
        args.path,
        best=args.best,
        overrides=args.overrides,
        trust=args.trust,
        calls_callbacks=True,
    )

    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from armature.loading import (
        WithWeights,
        build_callbacks,
        load_data,
        task_and_weights,
        weights_note,
    )
    from armature.loggers import NoLogger
    from armature.training import process

    process.quiet()
    feed = load_data(cfg)
    run_dir = Path(cfg.run.dir)
    of_test = args.split == "test"
    step, other = ("test_step", "val") if of_test else ("validation_step", "test")
    accelerator = cli.accelerator(args.accelerator)
    task, read = task_and_weights(cfg, checkpoint)
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=WithWeights(torch.device({"gpu": "cuda:0"}.get(accelerator, accelerator)), read),
        logger=NoLogger(run_dir),
        default_root_dir=run_dir,
        precision=cfg.trainer.precision,
        callbacks=[*build_callbacks(cfg), feed],
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    if not is_overridden(step, task):
        raise ConfigError(
            f"{args.path}: {type(task).__name__} has no {step}. Add it, or type --split {other}."
        )
    run = trainer.validate if args.split == "val" else trainer.test
    metrics = {
        name: value
        for loader in run(task, datamodule=feed.data, verbose=False)
        for name, value in loader.items()
    }
    if not metrics:
        raise ConfigError(
            f"{args.path}: nothing was measured on {args.split}: the data have no such split, or "
            "the task logs "
            f"nothing. Try --split {other}."
        )
    print(f"{checkpoint}{weights_note(task)} on {feed.measured:,} samples of {args.split}:")
    for name, value in metrics.items():
        print(f"  {name:24} {value:.6f}")


if __name__ == "__main__":
    main()
