"""Secrets reach neither loggers nor checkpoints by way of hyperparameters."""

import logging
import os
from argparse import Namespace

import pytest
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf

from armature import errors
from armature.checkpoint import plain
from armature.loggers import guarded
from armature.validation import values

pytestmark = pytest.mark.guarantee

GIVEN = {
    "lr": 0.1,
    "api_token": "hunter22",
    "service": {"password": "hunter22", "url": "host/s3cr3tvalue"},
    "pin": "",
}
MASKED = {
    "lr": 0.1,
    "api_token": "***",
    "service": {"password": "***", "url": "host/***"},
    "pin": "",
}
PLAIN = {"cls_token": "<cls>", "token": "${oc.env:TOKEN}", "token_count": "7"}


@pytest.fixture(autouse=True)
def _secret_variable(monkeypatch):
    """A variable that is secret by the key that refers to it."""
    monkeypatch.setattr(errors, "_hidden", set())
    monkeypatch.setitem(os.environ, "PLAIN_NAME", "s3cr3tvalue")
    values.hide_secrets(
        OmegaConf.create({"logger": {"password": "${oc.env:PLAIN_NAME}"}, "name": "${oc.env:HOME}"})
    )
    plain._warn_once.cache_clear()


def test_hyperparameters_in_checkpoints_are_masked_and_a_user_s_own_state_is_not(caplog):
    with caplog.at_level(logging.WARNING):
        saved = plain.plain_checkpoint(
            {"hyper_parameters": GIVEN | PLAIN, "mine": {"hf_token": "hunter22"}}
        )
    assert saved == {"hyper_parameters": MASKED | PLAIN, "mine": {"hf_token": "hunter22"}}
    assert "'api_token' holds a secret by its name: checkpoints hold *** in its" in caplog.text
    assert "cls_token" not in caplog.text


@pytest.mark.parametrize("form", [dict, lambda given: Namespace(**given), OmegaConf.create])
def test_hyperparameters_for_loggers_are_masked(form, tmp_path):
    logger = guarded(CSVLogger)(tmp_path, name="", version="")
    logger.log_hyperparams(form(GIVEN))
    logger.save()
    written = "".join(path.read_text() for path in tmp_path.rglob("*.yaml"))
    assert "api_token: '***'" in written
    assert "hunter22" not in written
    assert "s3cr3tvalue" not in written
