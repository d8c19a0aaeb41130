"""What users of Lightning, the lightning-hydra-template and Hugging Face type, and what to type
here instead.

The table answers before any search for a similar name.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields

from armature.config import OF_ONE_CLASS, Config, Keys, key_of
from armature.project import options

_BATCH = (
    "Type data.global_batch_size={value} (samples per optimizer step over all ranks), or "
    "data.micro_batch_size="
)
_ACCUMULATE = (
    "Type data.global_batch_size=… and data.micro_batch_size=…: accumulation follows from both"
)
_EVERY = "Type trainer.val_every_n_steps=… (optimizer steps; null: at the end of each epoch)"
_LR = "Type optimizer.lr={value}"
_ALL_OR_ONE = "Type trainer.devices={value} (processes per machine) with trainer.accelerator=gpu"
_ALL_GPUS = "Type trainer.devices=auto"
_CHOSEN_GPUS = (
    "Set CUDA_VISIBLE_DEVICES={items} before the command and type trainer.devices={count}"
)
_CHECKPOINTS = (
    "Checkpoints are always saved. Type checkpoint.every_n_steps=… or checkpoint.at_end=false"
)
_DEBUG_RUN = "Type debug=fast: a few steps of training, validation and test, and a checkpoint"
_RESUME = "Type resume={value} (a run directory or a checkpoint in it)"
_SAME = "Leave it out: the same command, with its run.name, resumes by itself"

# A key, or key=value if the answer depends on the value, also with `trainer.` in front. `x.*`
# answers for x and every key below it.
# {value}: what was typed.
FOREIGN: dict[str, str] = {
    # ------------------------------------------------------------------ Lightning's Trainer
    "fast_dev_run": _DEBUG_RUN,
    "seed_everything": "Type seed={value}",
    "overfit_batches": "Type debug=overfit: train on one global batch over and over",
    "accumulate_grad_batches": _ACCUMULATE,
    "val_check_interval": _EVERY,
    "check_val_every_n_epoch": _EVERY,
    "min_epochs": "Type trainer.max_steps=… or trainer.max_epochs=…, and callbacks=early_stopping "
    "to end earlier",
    "enable_checkpointing": _CHECKPOINTS,
    "default_root_dir": "Type run.root={value} (holds all runs) and run.name=… (this run)",
    "trainer.strategy": "Type strategy={value}: the strategy is a group of its own",
    "sync_batchnorm": "It is on. To turn it off, type strategy=ddp strategy.sync_batchnorm=false",
    "num_sanity_val_steps": "Leave it out, and type debug=fast to try every part first",
    "checkpoint.save_top_k": "Type checkpoint.keep_best={value}",
    # its older arguments
    "auto_lr_find": "Type -m sweep=lr: one trial per learning rate",
    "gpus": _ALL_OR_ONE,
    "gpus=[…]": _CHOSEN_GPUS,
    "gpus=-1": _ALL_GPUS,
    "resume_from_checkpoint": _RESUME,
    # its values
    "trainer=gpu": "Type trainer.accelerator=gpu",
    "trainer=cpu": "Type trainer.accelerator=cpu",
    "trainer=ddp": "Type strategy=ddp trainer.devices=N",
    "devices=-1": _ALL_GPUS,
    "devices=[…]": _CHOSEN_GPUS,
    "strategy=fsdp_native": "Type strategy=fsdp",
    "strategy=ddp_find_unused_parameters_true": "Type strategy=ddp "
    "strategy.find_unused_parameters=true",
    # ------------------------------------------------------------------ lightning-hydra-template
    "ckpt_path": _RESUME,
    "ckpt_path=last": _SAME,
    "tags": "Type run.tags={value}",
    "task_name": "Type run.name={value}",
    "train": "Type python scripts/evaluate.py outputs/NAME, which measures without training",
    "test": "Type trainer.test_at_end={value}",
    "paths.*": "Leave it out. Type run.root=… for outputs and data=text data.path=… for data",
    "hydra/sweeper=optuna": "Type sweep=optuna",
    "hparams_search": "Type -m sweep=optuna",
    "hydra.sweeper.pruner": "Type hydra.sweeper.pruner.name and a class, such as MedianPruner",
    "debug=default": _DEBUG_RUN,
    "debug=true": _DEBUG_RUN,
    "datamodule": "Type data={value}",
    "datamodule.*": "Type data.… instead of datamodule.…",
    "lr": _LR,
    "model.lr": _LR,
    "optimizer.learning_rate": _LR,
    "model.optimizer": "Type optimizer={value}: the optimizer is a group of its own",
    "model.scheduler": "Type scheduler={value}: the schedule is a group of its own",
    "model.net.*": "Type model.… instead of model.net.…: the group model is the network",
    "callbacks=model_checkpoint": "Type checkpoint.monitor=…: checkpoints are always saved",
    # ------------------------------------------------------------------ data
    "data.batch_size": f"{_BATCH}… (per rank in one forward pass)",
    "batch_size": f"{_BATCH}… (per rank in one forward pass)",
    "data.data_dir": "Type data=text data.path={value}, or the key of your own data module",
    "data.pin_memory": "Nothing to type: memory is pinned if the device is a GPU",
    "data.shuffle": "Nothing to type: training samples are shuffled in each epoch, by seed",
    # ------------------------------------------------------------------ Hugging Face's Trainer and
    # other scripts
    "epochs": "Type trainer.max_epochs={value}",
    "num_train_epochs": "Type trainer.max_epochs={value}",
    "learning_rate": _LR,
    "warmup_steps": "Type scheduler.warmup={value}",
    "per_device_train_batch_size": "Type data.micro_batch_size={value}",
    "gradient_accumulation_steps": _ACCUMULATE,
    "gradient_checkpointing": "Type strategy.activation_checkpointing=every",
    "max_grad_norm": "Type trainer.gradient_clip_val={value}",
    "output_dir": "Type run.root=… (holds all runs) and run.name=… (this run)",
    "report_to": "Type logger={value}",
    "run_name": "Type run.name={value}",
    "name": "Type run.name={value}",
    "bf16": "Type trainer.precision=bf16-mixed",
    "fp16": "Type trainer.precision=16-mixed",
    "deepspeed": "Type strategy=deepspeed, or deepspeed_zero3",
    "save_steps": "Type checkpoint.every_n_steps={value}",
    "eval_steps": "Type trainer.val_every_n_steps={value}",
    "logging_steps": "Type trainer.log_every_n_steps={value}",
}

# Keys of Hydra that compose, and that nothing here reads.
INEFFECTIVE = {
    "hydra.run.dir": "Type run.root=… (holds all runs) and run.name=… (this run)",
    "hydra.sweep.dir": "Type run.root=… (holds all runs) and run.name=… (this sweep)",
    "hydra.sweep.subdir": "A trial's directory is its number. run.root=… and run.name=… hold it",
    "hydra.output_subdir": "config.yaml and overrides.txt are in the run directory. Leave it out",
    "hydra.job.chdir": "A run never changes its directory. Leave it out",
    "hydra.job.name": "Type run.name=…",
}
ONE_OPTION = (*OF_ONE_CLASS, "trainer", "checkpoint", "launch")  # groups
_HARMLESS = {"hydra.job.chdir=false", "hydra.job.chdir=False", "hydra.output_subdir=null"}


def remedy(key: str, value: str = "…") -> str | None:
    """Return the sentence that says what to type instead of a key (or group) with that value, or
    None.
    """
    parts = key.split(".")
    below = [".".join([*parts[:i], "*"]) for i in range(len(parts), 0, -1)]
    items = (
        re.findall(r"\d+", value) if re.fullmatch(r"\[? *\d+ *(, *\d+ *)*,? *\]?", value) else []
    )
    kind = "[…]" if items and not value.isdigit() else value.lower()
    short = key.removeprefix("trainer.")  # trainer.strategy=NAME is answered as strategy=NAME
    names = (f"{short}={kind}", key, short, *below)
    found = next((FOREIGN[name] for name in names if name in FOREIGN), None)
    if found is None:
        return None
    found = found.replace("{value}", value).replace("{items}", ",".join(items))
    return found.replace("{count}", str(len(items))).rstrip("….") + "."


def hint(key: str, value: str, known: Iterable[str], *, word: str | None = None) -> str:
    """Return `remedy`, or else the key of `known` that is nearest to `word`, or the key."""
    found = remedy(key, value)
    return f" {found}" if found else nearest(word or key, known)


def ineffective(overrides: list[str]) -> list[str]:
    """Return the overrides that would change nothing, with what to type instead: those of Hydra's
    own keys, and local=NAME without a file.
    """
    # Hydra needs no file of `local`. A folder that is searched besides may have others
    files = {f"local={each}" for each in ("null", *options("local"))}
    return [
        f"{each}: there is no configs/local/{each[6:]}.yaml.{nearest(each[6:], options('local'))}"
        for each in {*overrides} - files
        if re.fullmatch(r"local=\w+", each) and "searchpath" not in str(overrides)
    ] + [
        f"{each}: this has no effect here. {INEFFECTIVE[key]}."
        for each in overrides
        if (key := key_of(each)) in INEFFECTIVE and each.lstrip("+") not in _HARMLESS
    ]


def of_groups(overrides: Iterable[str]) -> list[str]:
    """Return the `~KEY` of what every run needs, and several options of a group that takes one."""
    groups = {each.name: each.type for each in fields(Config)}
    found = [
        f"{each}: it takes one option, not a list, whose files would be merged. Type {group}=NAME; "
        f"for a run with each of several, -m {group}=A,B."
        for each in overrides
        for group, _, value in [each.partition("=")]
        if value.startswith("[") and value != "[]" and group in ONE_OPTION
    ]
    for override in (each for each in overrides if each.startswith("~")):
        key = override[1:].partition("=")[0]
        group, _, name = key.partition(".")
        if group not in groups or group == "callbacks" or (name and groups[group] is Keys):
            continue
        instead = "Type logger=none" if group == "logger" else f"Leave it out, or type {key}=…"
        found.append(f"{override}: no run is without {key}. {instead}.")
    return found


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' Compares whole keys, and last parts: `trainer.lr` finds `optimizer.lr`."""
    known = [e for e in known if e.startswith("hydra.") == word.startswith("hydra.")]
    group, _, last = word.lower().rpartition(".")
    if not last.startswith("_"):  # Hydra's own, which `_val_test_` would find
        known = [each for each in known if not each.rpartition(".")[2].startswith("_")]
    by_last = {key.rpartition(".")[2]: key for key in reversed(known)}
    own = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == group}
    near = [by_last[last]] if last in by_last and group else []
    # last parts are compared: a group that two keys share would make them alike
    near = near or [own[each] for each in difflib.get_close_matches(last, own, 1, 0.6)]
    near = near or [by_last[each] for each in difflib.get_close_matches(last, by_last, 1, 0.76)]
    near = near or difflib.get_close_matches(word, () if own else {*known} - {group}, 1, 0.6)
    if not near and group and own:
        return f" There are {', '.join([*own.values()][:8])}."
    return f" Did you mean '{near[0]}'?" if near else ""
