"""Write what a trained model's `predict_step` returns: one row per sample, in the order of the data.

python scripts/predict.py outputs/<run.name> out=predictions.csv
python scripts/predict.py outputs/<run.name> data.path=new.csv out=predictions.parquet trainer.devices=2

The samples are those of the data module's `predict_dataloader` (a data module of this project: of its `predict_split`),
else of the test split. With trainer.devices above 1 each process holds the whole model and predicts its share.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from armature import cli, hardware
from armature.errors import ConfigError

SHARE = "ARMATURE_PREDICT_SHARE"  # set for the processes that this script starts: RANK/FOLDER


def main() -> None:
    parser = cli.run_parser(__doc__)
    parser.add_argument("--out", type=Path, help="a .csv, .jsonl or .parquet file to write (or out=FILE)")
    args = cli.parse_arguments(parser)
    try:
        run(args)
    except ConfigError as error:
        cli.refuse(error.problems)


def run(args: argparse.Namespace) -> None:
    from armature.loading import open_run

    typed = [each for each in args.overrides if each.startswith("out=")]
    overrides = [each for each in args.overrides if each not in typed]
    out = Path(typed[-1].removeprefix("out=")) if typed else args.out
    if out is None:
        raise ConfigError("Where to? Type out=predictions.csv, or a .jsonl or .parquet file.")
    keys = {each.partition("=")[0]: each.partition("=")[2] for each in overrides}
    if (strategy := keys.get("strategy")) not in (None, "auto", "single", "ddp"):
        raise ConfigError(
            f"strategy={strategy}: each process of this script holds the whole model, whatever the run was trained "
            "with. Leave it out; trainer.devices=2 divides the samples over two processes."
        )
    cfg, checkpoint = open_run(
        args.path, best=args.best, overrides=overrides, trust=args.trust, verified=SHARE in os.environ
    )

    from armature import worker
    from armature.loading import load_data, load_task
    from armature.training import predict

    predict.check_output(out)
    accelerator = cli.accelerator(args.accelerator)
    ranks = count_ranks(cfg.trainer.devices, accelerator) if "trainer.devices" in keys else 1
    worker.quiet()

    def write_share(folder: Path, rank: int, data: Any) -> None:
        predict.predict(
            load_task(cfg, checkpoint), data, folder / f"{rank}.jsonl", rank=rank, ranks=ranks,
            accelerator=accelerator, precision=cfg.trainer.precision,
        )  # fmt: skip

    if SHARE in os.environ:
        rank, _, name = os.environ[SHARE].partition("/")
        data = load_data(cfg)
        data.prepare_data = lambda: None  # the parent has
        write_share(Path(name), int(rank), data)
        return
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".predictions-") as name:
        folder = Path(name)
        if ranks == 1:
            write_share(folder, 0, load_data(cfg))
        else:
            load_data(cfg).prepare_data()  # once, before the processes open it
            start_ranks(ranks, folder, checkpoint, overrides, out=out, accelerator=accelerator, trust=args.trust)
        count = predict.merge([folder / f"{rank}.jsonl" for rank in range(ranks)], out)
    print(f"{out}: {count} predictions of {checkpoint}")


def count_ranks(devices: Any, accelerator: str) -> int:
    """Return the number of processes that trainer.devices asks for. Raises ConfigError if it is none."""
    if type(devices) is not int or devices < 1:
        raise ConfigError(f"trainer.devices={devices}: type a number of processes of at least 1.")
    if accelerator == "gpu" and devices > (found := hardware.gpu_count()):
        raise ConfigError(
            f"trainer.devices={devices}: this machine has {found} GPUs. Type trainer.devices={found}, or --accelerator "
            "cpu."
        )
    return devices


def start_ranks(
    ranks: int, folder: Path, checkpoint: Path, overrides: list[str], *, out: Path, accelerator: str, trust: bool
) -> None:
    """Run this script once per rank. If one fails, end the others and leave with its exit code."""
    command = [sys.executable, "-P", __file__, str(checkpoint), *overrides, f"out={out}", "--accelerator", accelerator]
    processes = []
    try:
        for rank in range(ranks):
            variables = {**os.environ, SHARE: f"{rank}/{folder}"}
            if accelerator == "cpu":
                variables.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
            processes.append(subprocess.Popen([*command, *["--trust"] * trust], env=variables))
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
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()


if __name__ == "__main__":
    main()
