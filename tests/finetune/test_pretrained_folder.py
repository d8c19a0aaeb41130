import json
import socket

import pytest

from armature.errors import ConfigError
from armature.finetune import folder
from tests.finetune.folders import write_shard

SHARDS = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b"]}


@pytest.fixture
def model(tmp_path):
    for file, names in SHARDS.items():
        write_shard(tmp_path / file, dict.fromkeys(names, (2, 3)))
    index = {"weight_map": {name: file for file, names in SHARDS.items() for name in names}}
    (tmp_path / folder.INDEX).write_text(json.dumps(index))
    (tmp_path / folder.CONFIG).write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return tmp_path


def test_headers_name_every_tensor(model):
    found = folder.weights(model)
    assert not found.problems
    assert found.tensors["b"] == folder.SavedTensor(
        "model-00002-of-00002.safetensors", "BF16", (2, 3)
    )
    assert found.files == sorted(SHARDS)


def test_mistrals_second_copy_of_its_weights_is_not_read(model):
    write_shard(model / "consolidated.safetensors", {"other": (2, 3)})
    assert folder.weights(model).files == sorted(SHARDS)


def test_all_damage_is_named_at_once(model):
    first, second = (model / name for name in SHARDS)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    missing, truncated = folder.weights(model).problems
    assert f"{first.name}: missing, truncated, or no safetensors file" in missing
    assert f"{second.name}: missing, truncated, or" in truncated


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    [problem] = folder.weights(tmp_path).problems
    assert "pickled (pytorch_model.bin)" in problem
    assert "save_for_hf(…, safe_serialization=True)" in problem


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no folder that holds a config\.json"):
        folder.find(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no folder that holds a config\.json"):
        folder.find(str(tmp_path / "none"))


def test_a_hub_name_without_a_network_is_one_message(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "create_connection", offline)
    monkeypatch.setattr(socket, "getaddrinfo", offline)
    with pytest.raises(ConfigError, match=r"hf download some/model --local-dir FOLDER") as error:
        folder.find("some/model")
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("listed", [False, True])
def test_an_older_map_of_special_tokens_counts_unless_all_added_tokens_are_listed(tmp_path, listed):
    settings = {
        "eos_token": "</s>",
        "bos_token": "<s>",
        **({"added_tokens_decoder": {}} if listed else {}),
    }
    (tmp_path / folder.TOKENIZER_CONFIG).write_text(json.dumps(settings))
    (tmp_path / folder.SPECIAL_TOKENS).write_text(json.dumps({"eos_token": {"content": "<|eot|>"}}))
    assert folder.special_tokens(tmp_path) == {
        "bos_token": "<s>",
        "eos_token": "</s>" if listed else "<|eot|>",
    }


def test_ends_of_generation_come_from_its_own_file_first(model):
    assert folder.end_tokens(model) == [2]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert folder.end_tokens(model) == [5, 6]


def test_a_run_keeps_the_small_files_and_knows_its_base(model, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    (model / folder.TOOL_TEMPLATE).parent.mkdir()
    (model / folder.TOOL_TEMPLATE).write_text("tools")
    folder.keep(model, run)
    kept = folder.kept_in(run)
    assert kept is not None
    assert folder.config(kept) == folder.config(model)
    assert not [*kept.glob("*.safetensors")]
    assert (kept / folder.TOOL_TEMPLATE).read_text() == "tools"
    assert folder.fingerprint(kept) == folder.fingerprint(model)
    write_shard(model / next(iter(SHARDS)), {"z": (2, 3)})
    assert folder.fingerprint(kept) != folder.fingerprint(model)
