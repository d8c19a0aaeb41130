r"""Simulate one step of a GPU run without a GPU and without data: memory, communication, tokens/s.

python scripts/simulate.py model=llama3_8b data=synthetic strategy=fsdp_tensor \
    trainer.devices=8 trainer.num_nodes=8 hardware=h100_80gb
python scripts/simulate.py model=llama3_70b data=synthetic strategy=hsdp \
    trainer.devices=8 trainer.num_nodes=64 hardware=h200 --depths 3,5 --ranks 0
python scripts/simulate.py model=gpt_nano data=synthetic strategy=fsdp trainer.devices=4 --order

Takes train.py's command line. hardware=NAME is a file of configs/hardware/, or `this`.
docs/predicting.md says how well predictions agree with measured runs.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from omegaconf import DictConfig, OmegaConf

from armature import cli, hardware, project
from armature.errors import ConfigError
from armature.finetune import check as pretrained
from armature.layout import Layout
from armature.planning import auto, devices, simulation
from armature.planning.simulation import settings
from armature.validation import checks

sys.path.insert(1, str(project.ROOT))  # modules of users, as for train.py

DEFAULT = "h100_80gb"  # on a machine without a GPU


def main() -> None:
    parser = cli.train_parser(__doc__)
    parser.add_argument(
        "--ranks",
        help="ranks to simulate, such as 0,63; without it the first, a middle and the last",
    )
    parser.add_argument(
        "--depths",
        help="two numbers of layers, such as 3,5: simulate these and extrapolate (faster)",
    )
    parser.add_argument(
        "--order",
        action="store_true",
        help="check that the collectives of all ranks meet (of a classifier in a pipeline: those "
        "of training)",
    )
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    arguments, typed = cli.parse_overrides(parser, purpose=", as for train.py")
    try:
        run(arguments, typed)
    except ConfigError as error:
        cli.refuse(error.problems)
    except simulation.SimulationFailed as error:
        print(f"The run raises this error:\n{error}", file=sys.stderr)
        sys.exit(1)


def run(arguments: argparse.Namespace, typed: list[str]) -> None:
    cfg, device = composed(typed)
    if problems := settings.problems(cfg, device):  # before the simulator's process is started
        raise ConfigError(problems)
    decide_auto(cfg, device)
    if arguments.order:
        from armature.planning.simulation import order

        problems = order.check(cfg, device=device)
        print("\n".join(problems) if problems else "The collectives of all ranks meet.")
        sys.exit(bool(problems))
    world_size = cfg.trainer.devices * cfg.trainer.num_nodes
    ranks = numbers("--ranks", arguments.ranks) or sorted({0, world_size // 2, world_size - 1})
    if not all(0 <= rank < world_size for rank in ranks):
        raise ConfigError(f"--ranks {arguments.ranks}: the run has ranks 0 to {world_size - 1}.")
    depths = numbers("--depths", arguments.depths)
    if depths and (len(depths) != 2 or depths[0] >= depths[1]):
        raise ConfigError(
            f"--depths {arguments.depths}: type two numbers of layers, the smaller one first."
        )
    layers = OmegaConf.select(cfg, "model.layers")
    if depths and (depths[0] < 1 or (isinstance(layers, int) and depths[1] > layers)):
        raise ConfigError(
            f"--depths {arguments.depths}: type numbers from 1 to model.layers={layers}, or leave "
            "it out."
        )
    pair = (depths[0], depths[1]) if depths else None
    requests = [
        simulation.Request(cfg=cfg, rank=rank, device=device, depths=pair) for rank in ranks
    ]
    reports = []
    for result in simulation.simulate_all(requests):
        if isinstance(result, Exception):
            raise result
        reports.append(result)
    print(
        json.dumps([report.to_dict() for report in reports])
        if arguments.json
        else simulation.text(reports)
    )


def composed(typed: list[str]) -> tuple[DictConfig, devices.Device]:
    """Return the configuration of a command line, unchecked, with the number of devices decided,
    and the device.
    """
    name, overrides = devices.take_name(typed)
    default = devices.THIS if hardware.gpu_count() else DEFAULT
    device = devices.named(default if name is None else name)
    if device.accelerator != "gpu":
        raise ConfigError(
            f"hardware={device.name}: only GPUs are simulated, and this is a CPU. Type "
            f"hardware={DEFAULT} or another "
            "GPU of configs/hardware/; scripts/plan.py … --quick compares layouts of a CPU by "
            "formulas."
        )
    cfg = pretrained.fill(cli.compose(overrides))
    for key in ("devices", "num_nodes"):
        typed_number = "null" if cfg.trainer[key] is None else str(cfg.trainer[key])
        cfg.trainer[key] = cli.whole_number(f"trainer.{key}", typed_number) or 1
    return cfg, device


def decide_auto(cfg: DictConfig, device: devices.Device) -> None:
    """Replace strategy and micro-batch `auto` by what they would be on a machine with this device,
    and print why.
    """
    there = cfg.copy()
    there.trainer.accelerator = "gpu"
    if there.trainer.precision == "auto":
        there.trainer.precision = device.precision
    decided, chosen = auto.decide(
        checks.decide(there), memory_bytes=device.memory_bytes, problems=checks.layout_problems
    )
    if chosen is not None:
        cfg.strategy = decided.strategy
        print(chosen, file=sys.stderr)
    found = auto.micro_batch_size(decided, Layout.of(decided), memory_bytes=device.memory_bytes)
    if found is not None:
        cfg.data.micro_batch_size, line = found
        print(line, file=sys.stderr)


def numbers(option: str, text: str | None) -> list[int]:
    try:
        return [int(each) for each in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(
            f"{option} {text}: type whole numbers with commas between them."
        ) from None


if __name__ == "__main__":
    main()
