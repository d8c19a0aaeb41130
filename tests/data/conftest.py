"""Data modules of Hugging Face's data sets, and sources of conversations, for a test."""

from pathlib import Path

import pytest

from tests.data import chat_parts, feeding


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    return chat_parts.folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def hf(tmp_path, monkeypatch):
    """Builds data=hf, of which one class or number is learned from one column."""
    pytest.importorskip("datasets", reason="make setup EXTRAS=data")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    usual = {"targets": "y", "splits": {"train": "train"}, "global_batch_size": 2}
    return lambda **changes: feeding.build("hf", **usual | changes)


@pytest.fixture
def source_of(tmp_path, tokenizer_folder):
    """Write records to a file of this name, and make a source of this class of them."""

    def make(kind: type, file: str, records: list, **settings):
        path = chat_parts.write(tmp_path / file, records)
        options = {
            "context": 64,
            "val_fraction": 0.0,
            "cache_dir": str(tmp_path / "cache"),
            **settings,
        }
        return kind(str(path), tokenizer=str(tokenizer_folder), **options)

    return make
