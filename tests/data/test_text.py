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


@pytest.mark.parametrize("grown", [False, True])
def test_a_trained_model_reads_text_with_its_own_tokens(corpus, tmp_path, grown):
    text_data(corpus).save_assets(tmp_path)
    (file := tmp_path / "code.txt").write_text("import math\n" * 900)
    paths = [corpus.path, str(file)] if grown else corpus.path
    now = text_data(Corpus(paths, vocab_size=320, cache_dir=corpus.cache_dir))
    now.load_assets(tmp_path)
    assert now.tokenizer.get_vocab() == corpus.loaded_tokenizer.get_vocab()
    assert grown or now.source.folder == corpus.folder  # nothing is prepared twice


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


def test_resume_on_other_tokens_is_refused(corpus, tmp_path):
    state = text_data(corpus).state_dict()
    text_data(corpus).load_state_dict(state)
    path = tmp_path / "other.txt"
    path.write_text("something else\n" * 2000)
    other = Corpus(str(path), vocab_size=320, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"made with other tokens .* type another run.name"):
        text_data(other).load_state_dict(state)


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
