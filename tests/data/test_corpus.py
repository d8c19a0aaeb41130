import functools
import gzip
import json
import logging
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from armature.data import sources
from armature.data.corpus import SPLITS, Corpus
from armature.errors import ConfigError

WORDS = [
    "def",
    "class",
    "return",
    "import",
    "self",
    "value",
    "while",
    "yield",
    "naïve",
    "Größe",
    "漢字",
    "🙂",
]


@functools.cache
def some_text(seed: int, lines: int = 40) -> str:
    draw = np.random.RandomState(seed)
    return "".join(" ".join(draw.choice(WORDS, 8)) + "\n" for _ in range(lines))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two hundred small files in folders: enough to hold out whole files."""
    folder = tmp_path / "corpus"
    for i in range(200):
        path = folder / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(some_text(i, lines=5), newline="")
    return folder


@pytest.fixture
def corpus(tmp_path: Path):
    def make(path, **settings) -> Corpus:
        return Corpus(path, **{"vocab_size": 300, "cache_dir": str(tmp_path / "cache"), **settings})

    return make


def decoded(corpus: Corpus, split: str) -> list[str]:
    """Return the documents of a split."""
    tokens = np.array(corpus.tokens(split))
    end = corpus.loaded_tokenizer.token_to_id("<|endoftext|>")
    assert tokens[0] == end
    documents = np.split(tokens, np.flatnonzero(tokens == end))[1:]
    return [corpus.loaded_tokenizer.decode(document[1:].tolist()) for document in documents]


def test_every_file_is_in_one_split_and_decodes_to_itself(files, corpus):
    made = corpus(f"{files}/**/*.txt")
    made.prepare()
    assert made.header["split_by"] == "file"
    documents = {split: decoded(made, split) for split in SPLITS}
    assert sorted(chain(*documents.values())) == sorted(p.read_text() for p in files.rglob("*.txt"))
    for split in SPLITS:
        figures = made.header["splits"][split]
        assert figures["documents"] == len(documents[split]) > 0
        assert figures["bytes"] == sum(len(text.encode()) for text in documents[split])
        assert figures["tokens"] == len(made.tokens(split))


def test_a_single_file_is_split_by_runs_of_lines(corpus, tmp_path):
    text = some_text(0, lines=600)
    path = tmp_path / "book.txt"
    path.write_text(text)
    made = corpus(str(path))
    made.prepare()
    assert made.header["split_by"] == "piece"
    documents = {split: decoded(made, split) for split in SPLITS}
    assert sorted("".join(chain(*documents.values())).split("\n")) == sorted(text.split("\n"))
    total = len(text.encode())
    for split in ("val", "test"):
        assert 0.025 * total < made.header["splits"][split]["bytes"] < 0.1 * total
        assert all(document in text for document in documents[split])


def test_records_of_jsonl_are_documents(corpus, tmp_path):
    records = [some_text(i, lines=2) for i in range(300)]
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8-sig") as file:
        for text in records:
            file.write(json.dumps({"body": text, "id": 1}) + "\n\n")
    made = corpus(str(path), field="body")
    made.prepare()
    assert sorted(chain(*(decoded(made, split) for split in SPLITS))) == sorted(records)


def test_text_survives_the_pieces_it_is_read_in(tmp_path):
    """Cuts fall at line ends, or between characters of an endless line. No byte changes."""
    path = tmp_path / "mixed.txt"
    text = "a\r\nb\n\n" + "漢🙂é" * 500 + "\n" + some_text(3) + "no end"
    path.write_text(text, newline="")
    for piece_bytes in (1, 2, 3, 7, 64, 1 << 20):
        pieces = list(sources.pieces(sources.find(str(path))[0], field="", piece_bytes=piece_bytes))
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.number for piece in pieces] == list(range(len(pieces)))
        assert sum(piece.size for piece in pieces) == len(text.encode())
        assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)


# ------------------------------------------------------------------------------------------------
# the cache


@pytest.fixture
def counted(monkeypatch):
    """Count how often a corpus is built."""
    built = []
    build = Corpus._build
    monkeypatch.setattr(Corpus, "_build", lambda self, *args: built.append(1) or build(self, *args))
    return built


def test_a_changed_file_is_noticed(files, corpus, counted):
    corpus(str(files)).prepare()
    (files / "part0" / "0.txt").write_text(some_text(1000))
    corpus(str(files)).prepare()
    assert len(counted) == 2


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("harm", "name"),
    [("cut", "train.bin"), ("remove", "tokenizer.json"), ("cut", "header.json")],
)
def test_damage_is_found_and_repaired(files, corpus, counted, caplog, name, harm):
    sound = corpus(str(files))
    path = sound.folder / name
    data = path.read_bytes()
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2])
    with caplog.at_level(logging.WARNING):
        again = corpus(str(files))
        assert again.fingerprint == sound.fingerprint
    assert len(counted) == 2
    assert "damaged" in caplog.text
    assert path.exists()


def test_processes_that_start_at_once_share_one_preparation(files, tmp_path):
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from armature.data.corpus import Corpus\n"
        f"corpus = Corpus({str(files)!r}, vocab_size=300, cache_dir={str(tmp_path / 'cache')!r})\n"
        "print('fingerprint', corpus.fingerprint, len(corpus.tokens('train')))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert sum("Prepared in" in output for output in outputs) == 1


# ------------------------------------------------------------------------------------------------
# bad input


def test_a_path_that_does_not_exist_names_the_nearest(files, corpus):
    (files.parent / ".corpse").touch()
    with pytest.raises(
        ConfigError,
        match=r"data\.path=.*/corpse: .* has no corpse\. Did you mean .*/corpus\?",
    ):
        corpus(f"{files.parent}/corpse").prepare()
    with pytest.raises(ConfigError, match=r"has no prat0/\*\.txt\. Did you mean .*/corpus/part0\?"):
        corpus(f"{files}/prat0/*.txt").prepare()


def test_an_empty_corpus_is_refused(corpus, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").touch()
    with pytest.raises(ConfigError, match=r"data\.path=.*: 2 files, all of them empty"):
        corpus(f"{tmp_path}/*.txt").prepare()


def test_a_corpus_too_small_to_split_is_refused(corpus, tmp_path):
    (tmp_path / "a.txt").write_text("one line\n")
    with pytest.raises(ConfigError, match="9 bytes of text are too little"):
        corpus(f"{tmp_path}/a.txt").prepare()


def test_bad_bytes_deep_in_a_file_are_found(files, corpus):
    path = files / "part0" / "long.txt"
    path.write_bytes(b"text\n" * 10_000 + b"\xff\n")
    says = r"long\.txt is not UTF-8 text \(byte 50,000 is 0xff\).*read_parquet"
    with pytest.raises(ConfigError, match=says):
        corpus(str(files)).prepare()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"body": "x"}', r"line 2: {\"body\": \"x\"} has no text in the field 'text'\. "),
        ('{"text": 3}', r"line 2: {\"text\": 3} has no text in the field 'text'"),
        ('["text"]', r"line 2: \[\"text\"\] has no text in the field 'text'"),
        ('{"text": ', "line 2: not a line of JSON"),
        ('{"text": "\\ud800"}', "line 2: .* has no text in the field 'text'"),
    ],
)
def test_a_bad_record_is_named_with_its_line(corpus, tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, " + problem):
        corpus(f"{tmp_path}/a.jsonl").prepare()


def test_an_external_tokenizer_is_used_unchanged(files, corpus, tmp_path):
    first = corpus(f"{files}/**/*.txt")
    first.prepare()
    other = tmp_path / "other.txt"
    other.write_text(some_text(7, lines=400))
    given = str(first.folder / "tokenizer.json")
    made = corpus(
        str(other), tokenizer=given, vocab_size=400
    )  # the model may have a larger vocabulary
    made.prepare()
    assert made.loaded_tokenizer.get_vocab() == first.loaded_tokenizer.get_vocab()
    assert "".join(chain(*(decoded(made, split) for split in SPLITS)))
    own = corpus(str(other), vocab_size=400)
    own.prepare()
    assert own.folder != made.folder


def test_documents_begin_with_the_end_that_a_tokenizer_has(files, corpus, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    theirs = Tokenizer(models.WordLevel({"<unk>": 0, "self": 1, "</s>": 2}, unk_token="<unk>"))
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs.save(str(tmp_path / "theirs.json"))
    made = corpus(f"{files}/**/*.txt", tokenizer=str(tmp_path / "theirs.json"))
    made.prepare()
    tokens = np.array(made.tokens("train"))
    assert (tokens == 2).sum() == made.header["splits"]["train"]["documents"]
    assert set(tokens.tolist()) == {0, 1, 2}


def test_a_tokenizer_that_cannot_be_is_refused(files, corpus, tmp_path):
    (tmp_path / "no.json").write_text("{}")
    for path, words in (
        ("nowhere.json", "there is no tokenizer.json. Name a folder"),
        (str(tmp_path / "no.json"), "is damaged, or no tokenizer"),
    ):
        with pytest.raises(ConfigError, match=words):
            corpus(f"{files}/**/*.txt", tokenizer=path).check()
    made = corpus(f"{files}/**/*.txt", vocab_size=320)
    made.prepare()
    with pytest.raises(
        ConfigError, match=r"vocab_size=300 is smaller than the 3\d\d tokens .*vocab_size=3\d\d"
    ):
        corpus(f"{files}/**/*.txt", tokenizer=str(made.folder / "tokenizer.json")).check()
