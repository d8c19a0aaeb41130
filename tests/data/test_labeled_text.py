"""Texts and their classes from files: tokens, padding, classes, and what is refused."""

import json

import pytest

from armature.data.labeled_text import LabeledTextData
from armature.errors import ConfigError

ROWS = [
    ("a\nhello world", "b"),
    ("how are you", "a"),
    ("I am fine", "b"),
    ("thank you " * 30, "c"),
] * 5


@pytest.fixture
def make(tmp_path, tokenizer_folder):
    def build(rows=ROWS, *, name="texts.jsonl", text="text", target="label", **options):
        path = tmp_path / name
        if name.endswith(".csv"):
            quoted = [f'"{words}",{label}' for words, label in rows]
            path.write_text("\n".join([f"{text},{target}", *quoted]))
        else:
            records = [
                row if isinstance(row, dict) else {text: row[0], target: row[1]} for row in rows
            ]
            lines = (json.dumps(record, ensure_ascii=False) for record in records)
            path.write_text("\n".join(lines), "latin-1")
        sizes = {"context": 16, "val_fraction": 0.2, "test_fraction": 0.2}
        return LabeledTextData(
            path=str(path), tokenizer=str(tokenizer_folder), **{**sizes, **options}
        )

    return build


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.csv"])
def test_texts_are_tokenized_padded_and_numbered_by_sorted_class(make, name):
    data = make(name=name)
    assert data.names() == {"classes": ["a", "b", "c"]}
    assert data.found_sizes == {"classes": 3}
    every = data.dataset("predict")
    assert [int(every[i]["targets"]) for i in range(4)] == [1, 0, 1, 2]
    batch = every.batch([1, 2])
    assert batch["inputs"].shape == (2, 8)
    for row, i in enumerate((1, 2)):
        own = every.ids[i]
        assert batch["inputs"][row, : len(own)].tolist() == own.tolist()
        assert (batch["inputs"][row, len(own) :] == -100).all()
    assert every.batch([0, 3])["inputs"].shape == (2, 16)  # cut to the context
    assert every.describe(2) == {"text": "I am fine"}
    sizes = [len(data.dataset(split)) for split in ("train", "val", "test")]
    assert sizes == [12, 4, 4]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"text": "x"}] * 4, r"has no column label. Its columns: text. Type data.target=…"),
        ([{"body": "x", "label": 1}], r"has no column text. .* Type data.text=…"),
        ([("x", "a"), ("", "b")], "data row 2: there is no text in column 'text'"),
        ([("x", "a"), (3, "b")], "cannot be read as lines of JSON .* row 1"),
        ([("x", "a"), ("y", " ")], "column label is empty in data row 2"),
        ([("x", "a"), ("café", "b")], "JSON in UTF-8 .* at string index 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(make, rows, says):
    with pytest.raises(ConfigError, match=says):
        make(rows).dataset("train")
