import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from armature.errors import ConfigError
from armature.finetune import architecture, built, check, folder
from armature.models.decoder.check import problems
from tests.finetune.folders import CONFIG, write_model, write_shard, write_tokenizer

SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def config(path: Path, data: dict | None = None, **sizes):
    node = {
        "_target_": check.DECODER,
        "_partial_": True,
        "pretrained": str(path),
        "context": 64,
        "width": None,
        "tied": None,
        **sizes,
    }
    run = {"root": str(path.parent / "outputs"), "name": None}
    return OmegaConf.create({"model": node, "data": data or {}, "run": run, "resume": "auto"})


def refused(path: Path, data: dict | None = None, **sizes) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check.fill(config(path, data, **sizes))
    return error.value.problems


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "longest"), [(LLAMA3, 2048), ({"type": "yarn", "factor": 4.0}, 6000)]
)
def test_a_stretched_context_is_longer_but_llama3s_is_already_so(rope, longest):
    original = {"original_max_position_embeddings": 1500}
    for changes in ({"rope_scaling": rope | original}, {"rope_scaling": rope, **original}):
        assert architecture.longest_context(CONFIG | changes) == longest


def test_the_folder_sets_all_sizes(model):
    cfg = config(model)
    cfg.run.name = "n" * 300  # a later check names it
    filled = check.fill(cfg).model
    assert (filled.vocab_size, filled.width, filled.layers, filled.ffn_hidden) == (4096, 16, 2, 32)
    assert (filled.tied, filled.qk_norm, filled.windows, filled.context) == (False, False, None, 64)
    assert problems(OmegaConf.to_container(filled)) == []


def test_another_models_configuration_is_left_alone(model):
    cfg = config(model, _target_="users.Model")
    assert check.fill(cfg) is cfg


def test_typed_sizes_must_be_the_folders(model):
    first, second = refused(model, width=32, qk_norm=True, heads=2, head_dim=8)
    assert "model.width=32, but model.pretrained=" in first
    assert "has 16. Leave model.width out" in first
    assert "model.qk_norm=True" in second


def test_a_tied_head_may_be_trained_apart_and_no_other_way_round(model, tmp_path):
    tied = write_model(tmp_path / "tied", tie_word_embeddings=True)
    assert check.fill(config(tied)).model.tied is True
    assert check.fill(config(tied, tied=False)).model.tied is False
    assert "model.tied=True" in refused(model, tied=True)[0]


def test_a_context_beyond_the_folders_is_refused(model):
    assert (
        "made for at most 2048 positions: type data.context=2048" in refused(model, context=2049)[0]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma2"},
            "model_type=gemma2 is no architecture of the decoder, which has llama, mistral",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is no causal language model"),
        (
            {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
            "code of its own, which is never run",
        ),
        ({"quantization_config": {"bits": 4}}, "its weights are quantized"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not in the decoder"),
        ({"attention_bias": True}, "attention_bias=True is not in the decoder"),
        ({"rms_norm_eps": None, "hidden_size": None}, "it lacks hidden_size, rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type=longrope is not in the decoder"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "rope_type=yarn with mscale",
        ),
        ({"architectures": "LlamaModel"}, "architectures=LlamaModel is no causal language model"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(tmp_path, changes, message):
    assert message in " ".join(refused(write_model(tmp_path / "model", **changes)))


def test_everything_wrong_with_a_folder_is_one_message(model):
    file = model / SHARD
    file.write_bytes(file.read_bytes()[:-3])
    write_tokenizer(model, 4097)
    found = refused(model, width=32)
    assert len(found) == 3
    token = (
        "largest token is 4096, but the model has 4096 rows for tokens. Tokenizer and model do not "
        "belong together: download the folder again, or, for tokens of your own, save it after "
    )
    for problem, words in zip(found, ["model.width=32", token, "truncated"], strict=True):
        assert words in problem


def test_a_damaged_tokenizer_is_named(model):
    (model / folder.TOKENIZER).write_text('{"model": "x"}')
    assert f"{model / folder.TOKENIZER} is damaged, or no tokenizer" in refused(model)[0]


def test_names_and_shapes_of_the_weights_are_those_of_config_json(model):
    index = json.loads((model / folder.INDEX).read_text())["weight_map"]
    write_shard(
        model / SHARD,
        {"model.layers.0.mlp.experts.weight": (4, 4), "model.embed_tokens.weight": (9, 16)},
    )
    lost = {name for name, file in index.items() if file == SHARD} - {"model.embed_tokens.weight"}
    index = {name: file for name, file in index.items() if name not in lost}
    index |= {"model.layers.0.mlp.experts.weight": SHARD}
    (model / folder.INDEX).write_text(json.dumps({"weight_map": index}))
    missing, surplus, shapes = built.problems(check.fill(config(model)))
    assert "which the decoder has. Download it again" in missing
    assert "model.layers.0.mlp.experts.weight: the decoder has no such tensors" in surplus
    assert "model.embed_tokens.weight is (9, 16), not (4096, 16)" in shapes


def test_another_tokenizer_than_the_folders_is_refused(model, tmp_path):
    write_tokenizer(model, 40)
    other = tmp_path / "other"
    other.mkdir()
    write_tokenizer(other, 41)
    source = {"path": "x", "tokenizer": None}
    assert (
        f"Type data.source.tokenizer={model}/tokenizer.json"
        in refused(model, {"source": source})[0]
    )
    source["tokenizer"] = f"{other}/tokenizer.json"
    assert "gives other ids" in refused(model, {"source": source})[0]
    chat = {"tokenizer": None, "template": None}
    assert f"Type data.source.tokenizer={model}." in refused(model, {"source": chat})[0]
    chat["tokenizer"] = str(model)
    check.fill(config(model, {"source": chat}))


def test_a_tokenizer_that_lacks_tokens_of_its_other_files_is_refused(model):
    write_tokenizer(model, 40)
    (model / folder.ADDED_TOKENS).write_text(json.dumps({"<|im_end|>": 41}))
    [problem] = refused(model)
    assert f"tokenizer.json lacks tokens that {folder.ADDED_TOKENS} adds: <|im_end|>." in problem
    assert f"from_pretrained('{model}').save_pretrained('{model}')" in problem
