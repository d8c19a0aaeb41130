import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armature.data.corpus import Corpus
from armature.data.text import TextData, Windows
from armature.errors import ConfigError
from armature.models.loss import IGNORED
from tests.data.feeding import served


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = [f"def name{i}(value):\n    return value * {i * i}\n\n" for i in range(900)]
    (folder / "code.txt").write_text("".join(lines))
    made = Corpus(str(folder / "code.txt"), vocab_size=320, cache_dir=str(folder / "cache"))
    made.prepare()
    return made


def text_data(corpus) -> TextData:
    return TextData(corpus, context=32)


@given(st.integers(2, 200), st.integers(1, 50), st.sampled_from(["<u2", "<u4"]))
def test_evaluation_windows_have_each_token_but_the_first_as_target_once(size, context, dtype):
    tokens = np.arange(1000, 1000 + size).astype(dtype)
    windows = Windows(tokens, context=context, whole=True)
    batch = windows.batch(list(range(len(windows))))
    assert batch["inputs"].shape == batch["targets"].shape == (len(windows), context)
    assert batch["inputs"].dtype == batch["targets"].dtype == torch.int64
    targets = batch["targets"].flatten()
    assert targets[targets != IGNORED].tolist() == tokens[1:].tolist()
    assert (batch["inputs"].flatten()[targets != IGNORED] + 1 == targets[targets != IGNORED]).all()
    assert (batch["inputs"] >= 0).all()


@pytest.mark.parametrize("split", ["val", "test"])
def test_bits_per_byte_are_exact(corpus, split):
    """A uniform model needs log2(V) bits for every target, in any windows and batches."""
    data = text_data(corpus)
    batches = served(data, split, global_batch_size=4, eval_batch_size=5)
    targets = sum(int((batch["targets"] != IGNORED).sum()) for batch in batches)
    figures = corpus.header["splits"][split]
    assert targets == figures["tokens"] - 1
    bits = targets * math.log2(data.vocab_size)
    per_token = math.log(data.vocab_size)  # the mean loss, in nats
    assert per_token / math.log(2) / data.bytes_per_token(split) == pytest.approx(
        bits / figures["bytes"]
    )


def test_other_text_is_refused_in_a_resume_and_measured_with_the_model_s_tokens(corpus, tmp_path):
    trained = text_data(corpus)
    trained.save_assets(tmp_path)
    path = tmp_path / "other.txt"
    path.write_text("something else\n" * 2000)
    same, other = (
        text_data(Corpus(each, vocab_size=320, cache_dir=corpus.cache_dir))
        for each in (corpus.path, str(path))
    )
    for data in (same, other):
        data.load_assets(tmp_path)
        assert data.tokenizer.get_vocab() == trained.tokenizer.get_vocab()
    assert same.source.folder == corpus.folder  # nothing is prepared twice
    same.load_state_dict(trained.state_dict())
    with pytest.raises(ConfigError, match=r"made with other tokens .* type another run.name"):
        other.load_state_dict(trained.state_dict())


@pytest.mark.slow
def test_the_standard_library_is_a_corpus(tmp_path):
    made = Corpus(context=256, cache_dir=str(tmp_path))
    made.prepare()
    header = made.header
    assert header["split_by"] == "file"
    assert header["tokenizer_vocab_size"] == 4096
    splits = header["splits"]
    assert splits["train"]["bytes"] > 5e6
    for split in ("val", "test"):
        assert 0.02 < splits[split]["bytes"] / splits["train"]["bytes"] < 0.2
        assert 3.0 < text_data(made).bytes_per_token(split) < 4.0
