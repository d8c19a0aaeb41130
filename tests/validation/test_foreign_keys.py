"""What users of Lightning and of the lightning-hydra-template type: it works, or the message says
what to type here.
"""

import re
from pathlib import Path

import pytest

from armature.project import options
from armature.validation import foreign_keys
from tests.in_process import problems_of

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


def answer(*typed: str) -> list[str]:
    """What the command line says to these overrides, as far as it is found without a sweep."""
    return foreign_keys.ineffective([*typed]) or problems_of(*typed)


# What users of the template type and what they are told. All of a list are answered together.
REFUSED_AS_HYDRA_COMPOSES = {
    "trainer=cpu": "Type trainer.accelerator=cpu.",
    "trainer=ddp": "Type strategy=ddp trainer.devices=N.",
    "trainer.strategy=ddp_find_unused_parameters_true": "strategy.find_unused_parameters=true",
    "trainer.strategy=fsdp": "Type strategy=fsdp:",
    "strategy=fsdp_native": "Type strategy=fsdp.",
    "debug=default": "Type debug=fast:",
    "callbacks=model_checkpoint": "Type checkpoint.monitor=…:",
    "launch.allowed_packages=null": "must be a list of packages",
    "trainer.fast_dev_run=true": "Type debug=fast:",
    "trainer.auto_lr_find=true": "Type -m sweep=lr: ",
    "trainer.val_check_interval=0.25": "Type trainer.val_every_n_steps=",
    "trainer.accumulate_grad_batches=10": "Type data.global_batch_size=… and "
    "data.micro_batch_size=…",
    "trainer.overfit_batches=1": "Type debug=overfit:",
    "trainer.min_epochs=5": "Type trainer.max_steps=",
    "trainer.default_root_dir=/out": "Type run.root=/out ",
    "ckpt_path=/logs/last.ckpt": "Type resume=/logs/last.ckpt ",
    "data.batch_size=64": "Type data.global_batch_size=64 ",
    "data.data_dir=/data": "Type data=text data.path=/data",
    "datamodule=mnist": "Type data=mnist.",
    "model.lr=0.001": "Type optimizer.lr=0.001.",
    "model.net.lin1_size=64": "Type model.",
    "seed=null": "must be a whole number",
    "tags=[mnist,experiment_X]": "Type run.tags=[mnist,experiment_X].",
    "task_name=eval": "Type run.name=eval.",
    "train=False": "python scripts/evaluate.py",
    "paths=default": "Leave it out. Type run.root=",
    "trainer.gpus=[0,2]": "Set CUDA_VISIBLE_DEVICES=0,2 before the command and type "
    "trainer.devices=2.",
    "+trainer.gradient_clip_val=0.5": "exists already. Leave out the plus: type "
    "trainer.gradient_clip_val=0.5.",
    "+trainer.max_steps=many": "must be a whole number from 1",
    "+strategy=ddp": "exists already. Leave out the plus: type strategy=ddp.",
    "model.kv_heads=2": "type +model.kv_heads=2.",
    "test=False": "Type trainer.test_at_end=False.",
    "hydra/sweeper=optuna": "Type sweep=optuna",
    "hparams_search=mnist_optuna": "Type -m sweep=optuna",
    "trainer.limit_trian_batches=3": "Did you mean 'trainer.limit_train_batches'?",
    "trainer.devces=3": "Did you mean 'trainer.devices'?",
    "training.steps=3": "Did you mean 'trainer.max_steps'?",
}
REFUSED_BY_THE_CHECK = {
    "trainer.accelerator=cuda": "Did you mean trainer.accelerator=gpu?",
    "trainer.precision=16": "Did you mean trainer.precision=16-mixed?",
    "trainer.devices=[0,1,2,3]": "Set CUDA_VISIBLE_DEVICES=0,1,2,3 before the command and type "
    "trainer.devices=4.",
    "trainer.limit_train_batches=1.5": "a share of them above 0.0 and up to 1.0",
    "+data.batch_size=64": "Type data.global_batch_size=",
    "+model.new_param=owo": "takes no argument 'new_param'",
}
UNKNOWN_TO_THE_CHECK = {
    "+trainer.fast_dev_run=true": "Type debug=fast:",
    "+ckpt_path=x": "Type resume=",
    "+trainer.min_time=3": "trainer.min_time: there is no such key.",
    "model=null": "model: a value is required.",
}
WORKS = [
    "logger=null callbacks=null debug=null seed=12345 trainer.deterministic=true "
    "trainer.gradient_clip_val=0.5",
    "logger=[csv,tensorboard] callbacks=none run.tags=[mnist,experiment_X] "
    "trainer.max_time=00:12:00:00",
    "~callbacks debug=overfit trainer.limit_train_batches=0.1 trainer.limit_val_batches=0.05 "
    "trainer.detect_anomaly=true",
]


@pytest.mark.parametrize(
    "typed",
    [
        pytest.param(REFUSED_AS_HYDRA_COMPOSES, marks=pytest.mark.slow),
        REFUSED_BY_THE_CHECK,
        UNKNOWN_TO_THE_CHECK,
    ],
)
def test_what_a_template_user_types_is_answered_with_what_to_type_here(
    typed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    said = answer(*typed)
    assert len(said) == len(typed), said
    for override, expected in typed.items():
        key = override.lstrip("+").partition("=")[0]
        assert [each for each in said if key in each.partition(": ")[0] and expected in each], (
            override,
            said,
        )


@pytest.mark.parametrize("command", WORKS)
def test_what_a_template_user_types_works(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert answer(*command.split()) == []


def test_a_key_of_hydra_s_that_nothing_reads_is_refused():
    typed = ["hydra.run.dir=/out", "hydra.sweep.dir=x", "hydra.job.chdir=true", "local=exampl"]
    local, run_dir, sweep_dir, chdir = answer(*typed, "hydra.job.chdir=false")
    assert "Did you mean 'example'?" in local
    assert run_dir.startswith("hydra.run.dir=/out: this has no effect here. Type run.root=")
    assert sweep_dir.startswith("hydra.sweep.dir=x: this has no effect here. Type run.root=")
    assert chdir.startswith("hydra.job.chdir=true: ")


def test_what_an_answer_says_to_type_is_a_key_here():
    from armature.validation import compose as module

    with module._hydra():
        groups = {folder.name: options(folder.name) for folder in CONFIGS.glob("*/")}
        made = [module.compose("train", typed) for typed in ([], ["strategy=ddp"])]
        known = {*groups, "data.path", *(key for cfg in made for key in module._keys(cfg))}
        for key, sentence in (foreign_keys.FOREIGN | foreign_keys.INEFFECTIVE).items():
            for typed, value in re.findall(
                r"(?<![\w./+])\+?([a-z_]+(?:\.[a-z_]+)*)=([\w.-]*)", sentence
            ):
                assert typed in known or typed.startswith("callbacks."), (key, typed)
                if typed in groups and value:
                    assert value in groups[typed], (key, typed, value)
