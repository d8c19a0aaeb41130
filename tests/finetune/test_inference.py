"""Folders of models, loaded to generate text, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from armature.errors import ConfigError
from armature.finetune import export, folder, inference, others
from tests.data import chat_parts
from tests.finetune.folders import write_model, write_random_model


def write_base(path: Path, **changes) -> None:
    """Write a folder with random weights and a tokenizer."""
    write_random_model(path, vocab_size=64, **changes)
    chat_parts.folder(path)


def test_text_ends_where_the_folder_says(tmp_path):
    write_base(tmp_path / "base", eos_token_id=[3, 5])
    assert inference.load(tmp_path / "base").ends == [3, 5]
    for ends in ([3, 64], "x"):
        (tmp_path / "base" / "generation_config.json").write_text(
            json.dumps({"eos_token_id": ends})
        )
        with pytest.raises(ConfigError, match="must be the id of one of the model's 64 tokens"):
            inference.load(tmp_path / "base")


def test_an_exported_adapter_keeps_the_end_of_its_base(tmp_path):
    kept, run, adapter = (
        write_model(tmp_path / "kept", eos_token_id=2),
        tmp_path / "run",
        tmp_path / "adapter",
    )
    chat_parts.folder(run)
    adapter.mkdir()
    export.write_tokenizer(kept, run, adapter)
    end = chat_parts.small_tokenizer().token_to_id("<|im_end|>")
    assert json.loads((adapter / "generation_config.json").read_text()) == {
        "eos_token_id": [2, end]
    }
    assert not (adapter / folder.CONFIG).exists()


def test_a_long_context_takes_no_table_of_all_its_positions(tmp_path):
    write_base(tmp_path / "base", max_position_embeddings=1 << 20)
    assert inference.load(tmp_path / "base").model.context == inference.LONGEST


def test_a_classifier_is_no_model_that_continues_texts(tmp_path, monkeypatch):
    write_base(tmp_path / "base")
    config = json.loads((tmp_path / "base" / folder.CONFIG).read_text())
    config |= {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "base" / folder.CONFIG).write_text(json.dumps(config))
    monkeypatch.setattr(others, "require_transformers", lambda what: None)
    with pytest.raises(
        ConfigError, match="architectures=BertForSequenceClassification: no model that"
    ):
        inference.load(tmp_path / "base")


@pytest.mark.parametrize(
    ("says", "table", "longest"),
    [({}, None, inference.LONGEST), ({"max_position_embeddings": 64}, None, 64), ({}, 48, 48)],
)
def test_a_model_of_transformers_generates_as_far_as_it_says(
    tmp_path, monkeypatch, says, table, longest
):
    model = SimpleNamespace(
        inner=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: None))
    )
    monkeypatch.setattr(inference.others, "arguments", lambda *_, **__: {})
    monkeypatch.setattr(inference.built, "build", lambda node: model)
    monkeypatch.setattr(inference.built, "weight_problems", lambda _: [])
    monkeypatch.setattr(inference.built, "positions", lambda _: table)
    assert inference._built_by_transformers(tmp_path, says, ConfigError([])).context == longest
