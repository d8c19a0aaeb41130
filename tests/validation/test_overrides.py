"""Changes to the configuration of a run that exists: what refers to a changed key follows it."""

import pytest
from omegaconf import OmegaConf

from armature import config, project
from armature.errors import ConfigError
from armature.validation import overrides, values

TEXT = """
seed: 1
data:
  _target_: armature.data.text.TextData
  path: {path}
  eval_batch_size: 4
  train_limit: null
  seed: {seed}
  source: {{path: "{source}", context: "{context}", tokenizer: null, field: "${{oc.env:FIELD}}"}}
  context: 8
strategy: {{_target_: armature.strategies.auto.auto, seed: "{seed}"}}
"""
REFERRING = TEXT.format(
    path="a.txt", source="${data.path}", context="${data.context}", seed="${seed}"
)


def changed(text, *typed):
    cfg = OmegaConf.create(text)
    OmegaConf.set_struct(cfg, True)
    overrides.apply(cfg, list(typed))
    return cfg


@pytest.fixture(autouse=True)
def _field(monkeypatch):
    monkeypatch.setenv("FIELD", "text")


def test_what_refers_to_a_key_follows_it():
    cfg = changed(REFERRING, "data.path=b.txt", "data.context=16", "seed=7")
    assert (cfg.data.source.path, cfg.data.source.context) == ("b.txt", 16)
    assert (cfg.data.seed, cfg.strategy.seed) == (7, 7)
    assert cfg.data.eval_batch_size == 4


def test_an_option_of_a_group_can_be_chosen():
    cfg = changed(REFERRING, "data.eval_batch_size=5", "data=digits")
    assert (cfg.data._target_, cfg.data.eval_batch_size, cfg.data.seed) == (
        "armature.data.digits.DigitsData",
        5,
        1,
    )


def test_an_option_that_asks_for_a_value_takes_it():
    text = f"model: {{vocab_size: 300}}\n{REFERRING}"
    cfg = changed(text, "data.path=chats.jsonl", "data=chat")
    assert cfg.data.source.path == "chats.jsonl"
    with pytest.raises(ConfigError, match=r"data.path: without a value. Type data.path=…, too"):
        changed(text, "data=chat")


@pytest.mark.parametrize("typed", ["data.pth=b", "data.eval_batch_size", "nothing=1", "data=chats"])
def test_an_unknown_key_is_refused(typed):
    with pytest.raises(ConfigError, match=typed.split("=")[0]):
        changed(REFERRING, typed)


def test_a_null_a_key_of_the_adapter_and_one_of_the_class_can_be_set():
    typed = "data.train_limit=5", "data.global_batch_size=5", "+data.new=5"
    data = changed(REFERRING, *typed).data
    assert data.train_limit == data.global_batch_size == data.new == 5


def test_config_yaml_keeps_references_and_no_value_of_the_environment(monkeypatch):
    monkeypatch.setenv("FIELD", "s3cret")
    raw = OmegaConf.create(
        {"a": 1, "b": "${a}", "c": ["x-${a}", "${oc.env:FIELD}", "${oc.decode:'3'}"], "d": 2}
    )
    kept = overrides.keep_references(OmegaConf.to_container(raw), config.without_secrets(raw))
    assert kept == {"a": 1, "b": "${a}", "c": ["x-${a}", "${oc.env:FIELD}", 3], "d": 2}
    assert project.CONFIGS.is_dir()


def test_a_typed_value_out_of_its_range_is_refused_and_a_saved_one_is_not():
    cfg = changed(REFERRING, "data.eval_batch_size=-1", "data.seed=-1")
    plain = OmegaConf.to_container(cfg)
    (problem,) = values.wrong_of(["data.eval_batch_size", "data.path"], plain).values()
    assert problem.startswith("data.eval_batch_size=-1: must be a whole number from 1")
    assert values.wrong_of(["data.path"], plain) == {}
