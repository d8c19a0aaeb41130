"""Write what a trained model's `predict_step` returns: a row per sample, in the data's order.

python scripts/predict.py outputs/<run.name> out=predictions.csv
python scripts/predict.py outputs/<run.name> data.path=new.csv out=new.parquet trainer.devices=2

The samples are those of the data module's `predict_dataloader` (a data module of this project: of
its `predict_split`), else of the test split. With trainer.devices above 1 each process holds the
whole model and predicts its share.

The run's callbacks are called, too, such as a BasePredictionWriter: in each process, with its rank
and its samples. Type +callbacks.NAME={_target_:…} for another, '~callbacks.NAME' to leave one out.
"""

import argparse
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from armature import cli, files, hardware
from armature.errors import ConfigError
from armature.launcher import rank as launched

# set for the processes that this script starts: RANK/CHECKPOINT/FOLDER
SHARE = "ARMATURE_PREDICT_SHARE"
SHUTDOWN_SECONDS = 10


def main() -> None:
    parser = cli.run_parser(__doc__)
    parser.add_argument(
        "--out", type=Path, help="a .csv, .jsonl or .parquet file to write (or out=FILE)"
    )
    args = cli.parse_arguments(parser)
    args.overrides, args.out = cli.out_file(args.overrides, args.out)
    end_on_signals()
    try:
        run(args, out=args.out)
    except ConfigError as error:
        cli.refuse(error.problems)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def end_on_signals() -> None:
    """Let signals end this process by an exception, so that it ends its processes and removes its
    files.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    if SHARE in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports Ctrl-C
        launched.end_with_parent()


def run(args: argparse.Namespace, *, out: Path | None) -> None:
    from armature.loading import open_run

    overrides: list[str] = args.overrides
    if out is None:
        raise ConfigError("Where to? Type out=predictions.csv, or a .jsonl or .parquet file.")
    keys = {each.partition("=")[0]: each.partition("=")[2] for each in overrides}
    if (strategy := keys.get("strategy")) not in (None, "auto", "single", "ddp"):
        raise ConfigError(
            f"strategy={strategy}: each process of this script holds the whole model, whatever the "
            "run was trained "
            "with. Leave it out; trainer.devices=2 divides the samples over two processes."
        )
    share = os.environ.get(SHARE, "").split("/", 2)
    cfg, checkpoint = open_run(
        args.path,
        best=args.best,
        overrides=overrides,
        trust=args.trust,
        verified=share[1] if share[0] else None,
        calls_callbacks=True,
    )

    from armature.loading import build_callbacks, load_data, task_and_weights, weights_note
    from armature.training import predict, process

    predict.check_output(out)
    accelerator = cli.accelerator(args.accelerator)
    ranks = count_ranks(cfg.trainer.devices, accelerator) if "trainer.devices" in keys else 1
    process.quiet()

    def write_share(folder: Path, rank: int, feed: Any) -> None:
        task, read = task_and_weights(cfg, checkpoint)
        trainer = predict.make_trainer(
            folder / f"{rank}.jsonl", run_dir=Path(cfg.run.dir), rank=rank, ranks=ranks,
            accelerator=accelerator, precision=cfg.trainer.precision,
            callbacks=build_callbacks(cfg), read=read,
        )  # fmt: skip
        predict.predict(task, feed, trainer)
        if rank == 0 and (note := weights_note(task)):
            print(f"{checkpoint}{note}")

    if share[0]:
        feed = load_data(cfg)
        feed.data.prepare_data = lambda: None  # the parent has
        write_share(Path(share[2]), int(share[0]), feed)
        return
    files.clear_parts(out.absolute().parent)
    with files.folder_beside(out.absolute()) as folder:
        if ranks == 1:
            write_share(folder, 0, load_data(cfg))
        else:
            load_data(cfg).data.prepare_data()  # once, before the processes open it
            start_ranks(ranks, f"{checkpoint.name}/{folder}", args, accelerator=accelerator)
        count = predict.merge(
            [folder / f"{rank}.jsonl" for rank in range(ranks)], folder / out.name
        )
        if not count:
            raise ConfigError(
                f"data._target_={cfg.data._target_}: there are no samples to predict, neither of "
                "its "
                "predict_dataloader nor of its test_dataloader. Give it one of them, or name other "
                "data (data.path=…)."
            )
        predict.require_new(out)  # another command may have written it meanwhile
        (folder / out.name).replace(out)
        files.sync(out.absolute().parent)
    print(f"{out}: {count} predictions of {checkpoint}")


def count_ranks(devices: Any, accelerator: str) -> int:
    """Return the number of processes that trainer.devices asks for.

    Raises ConfigError if it is none.
    """
    if type(devices) is not int or devices < 1:
        raise ConfigError(f"trainer.devices={devices}: type a number of processes of at least 1.")
    if accelerator == "gpu" and devices > (found := hardware.gpu_count()):
        raise ConfigError(
            f"trainer.devices={devices}: this machine has {found} GPUs. Type "
            f"trainer.devices={found}, or --accelerator "
            "cpu."
        )
    return devices


def start_ranks(ranks: int, share: str, args: argparse.Namespace, *, accelerator: str) -> None:
    """Run this script once per rank. If one fails, end the others and leave with its exit code."""
    command = [sys.executable, "-P", __file__, str(args.path), *args.overrides, f"out={args.out}"]
    command += ["--accelerator", accelerator, *["--trust"] * args.trust, *["--best"] * args.best]
    processes = []
    try:
        for rank in range(ranks):
            variables = {**os.environ, SHARE: f"{rank}/{share}"}
            variables["PYTHONHASHSEED"] = (
                variables.get("PYTHONHASHSEED") or "0"
            )  # as in training: one order of sets
            if accelerator == "cpu":
                variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
            processes.append(subprocess.Popen(command, env=variables))
        waiting = list(processes)
        while waiting:
            for process in list(waiting):
                try:
                    code = process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
                waiting.remove(process)
                if code:
                    sys.exit(code if code > 0 else 128 - code)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=SHUTDOWN_SECONDS)
            process.kill()


if __name__ == "__main__":
    main()
