r"""Which strategy, how many GPUs, will it fit, how long will it take? Needs no GPU and no data.

python scripts/plan.py model=llama3_8b data=synthetic hardware=h100_80gb
    tries 1, 2, 4 … 64 GPUs
python scripts/plan.py model=llama3_1b data=synthetic hardware=a100_40gb trainer.devices=8
python scripts/plan.py experiment=llama3_70b data.path=tokens hardware=h200 trainer.devices=8 \
    trainer.num_nodes=8

Takes train.py's command line. hardware=NAME is a file of configs/hardware/, or `this`. The
micro-batch and recomputation are chosen, unless they are typed. docs/predicting.md explains the
result.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from omegaconf import DictConfig

from armature import cli
from armature.data import batching
from armature.errors import ConfigError
from armature.finetune import check as pretrained
from armature.layout import Layout
from armature.planning import devices, layouts, ranking, text
from armature.planning.setup import cost_of, setup_of
from armature.planning.simulation import settings
from armature.training.limits import prefer_typed
from armature.validation import checks

KEPT = tuple(
    f"strategy.{name}" for name in ("activation_checkpointing", "compile", "compile_mode", "float8")
)
CHOSEN = (
    "strategy",
    "trainer.devices",
    "trainer.num_nodes",
    "hardware",
    "hydra.searchpath",
)  # keys that the plan's command replaces


def main() -> None:
    parser = cli.train_parser(__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="closed formulas alone: do not simulate the best layouts",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        help="tokens (or samples) to train on, instead of the configuration's",
    )
    arguments, typed = cli.parse_overrides(parser, purpose=", as for train.py")
    try:
        check(arguments)
        plan(arguments, typed)
    except ConfigError as error:
        cli.refuse(error.problems)


def check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that would fail only after the work."""
    if arguments.tokens is not None and not 0 < arguments.tokens < math.inf:
        raise ConfigError(f"--tokens {arguments.tokens:g}: type a number above 0, such as 1e11.")


def kept_words(arguments: argparse.Namespace, typed: list[str]) -> str:
    """Return the typed words that the plan's command keeps, quoted for a shell."""
    words = ["--config-dir", arguments.config_dir] if arguments.config_dir else []
    for each in typed:
        key = each.partition("=")[0].lstrip("+~")
        if key in KEPT or not (key in CHOSEN or key.startswith("strategy.")):
            words.append(each)
    return shlex.join(words)


def plan(arguments: argparse.Namespace, typed: list[str]) -> None:
    cfg, device = composed(typed)
    if problems := settings.problems(alone(cfg), device):  # what no layout can mend
        raise ConfigError(problems)
    cost = cost_of(cfg)
    if cost is None:
        raise ConfigError(
            f"model={cfg.model._target_}: no file cost.py beside the model says what it costs. "
            "Write one, as "
            "src/armature/models/decoder/cost.py, or type scripts/simulate.py with this command "
            "line."
        )
    single = alone(cfg)
    single.data.global_batch_size = single.data.micro_batch_size = (
        1  # a plain LightningDataModule may name none
    )
    if setup_of(single, Layout.of(single)) is None:
        raise ConfigError(
            "There is no formula for pairs of answers, nor for adapters of a mixture, of some "
            "Linears or with other weights (task.adapter.targets, train). "
            "Type scripts/simulate.py with this command line."
        )
    values = {key: value for key, _, value in (each.lstrip("+").partition("=") for each in typed)}
    micro, count, num_nodes = (
        cli.whole_number(key, values.get(key, "auto"))
        for key in ("data.micro_batch_size", "trainer.devices", "trainer.num_nodes")
    )
    fixed = ranking.Fixed(micro=micro, recompute=values.get("strategy.activation_checkpointing"))
    pairs = ranking.counts(device, devices=count, num_nodes=num_nodes)
    runs, refused = ranking.rank(cfg, device, pairs, fixed=fixed)
    if not arguments.quick:
        runs = ranking.simulated(cfg, device, runs)
    units = arguments.tokens or configured_units(cfg, cost.units_per_sample)
    kept = kept_words(arguments, typed)
    print(
        f"{cost.parameters:,} parameters on {device.name}: {cost.parameters * 2 / 1e9:,.1f} GB of "
        "weights in 16 bits"
    )
    if units:
        print(
            f"Run: {units:,.0f} {cost.unit}, "
            f"{'as typed' if arguments.tokens else 'by trainer.max_steps'}"
        )
    chosen = "trainer.precision" not in values and cfg.trainer.precision == device.precision
    if chosen and (slower := device.slow_in_fp32):
        print(slower)
    print()
    print("\n".join(text.report(runs, refused, typed=kept, units=units, unit=cost.unit)))
    if not any(each.fits for each in runs):
        needed = ranking.devices_needed(cfg, device, fixed=fixed)
        print(
            f"It fits on {needed} GPUs."
            if needed
            else "It does not fit on 4,096 GPUs either: take a smaller model."
        )


def composed(typed: list[str]) -> tuple[DictConfig, devices.Device]:
    """Return the configuration of a command line, with `auto` values decided for the device, and
    the device.
    """
    name, overrides = devices.take_name(typed)
    problems, device, cfg = [], None, None
    try:
        if name is None:
            raise ConfigError(
                "hardware: a value is required. Type hardware=NAME, of "
                f"{', '.join(devices.names())}."
            )
        device = devices.named(name)
    except ConfigError as error:
        problems += error.problems
    try:
        cfg = cli.compose(overrides)
    except ConfigError as error:
        problems += error.problems
    if device is None or cfg is None:
        raise ConfigError(problems)
    cfg = prefer_typed(pretrained.fill(cfg), overrides)
    cfg.trainer.accelerator = device.accelerator
    if cfg.trainer.precision == "auto":
        cfg.trainer.precision = device.precision
    cfg.trainer.devices, cfg.trainer.num_nodes = 1, 1  # the layouts decide them
    return checks.decide(cfg), device


def alone(cfg: DictConfig) -> DictConfig:
    """Return the run on one device, without the typed strategy, which a plan replaces."""
    one = layouts.choices(devices=1, num_nodes=1)
    changed = layouts.applied(cfg, next(one), devices=1, num_nodes=1)
    if "activation_checkpointing" in cfg.strategy:  # a plan keeps it, so it is checked
        changed.strategy.activation_checkpointing = cfg.strategy.activation_checkpointing
    return changed


def configured_units(cfg: DictConfig, units_per_sample: int) -> float | None:
    """Return the tokens or samples of the configured steps; None if epochs or time end the run."""
    size = batching.configured_batch_size(cfg.data)
    return (
        cfg.trainer.max_steps * size * units_per_sample if cfg.trainer.max_steps and size else None
    )


if __name__ == "__main__":
    main()
