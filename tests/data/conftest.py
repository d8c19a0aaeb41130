"""Sources of conversations that are written for a test."""

from pathlib import Path

import pytest

from tests.data import chat_parts


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    return chat_parts.folder(tmp_path_factory.mktemp("tokenizer"))


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
