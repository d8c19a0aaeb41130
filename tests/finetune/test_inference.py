"""Folders of models and of peft's adapters, loaded to generate text, and those that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from armature.errors import ConfigError
from armature.finetune import export, folder, inference, merge, others, peft
from armature.finetune.export import read_decoder
from armature.finetune.lora import DoraLinear, Lora, LoraLinear, row_norms
from armature.models.decoder.model import Decoder
from tests.data import chat_parts
from tests.finetune.folders import write_model, write_random_model

DEFAULTS = {  # what peft writes of LoRA besides: none of it changes the result
    "auto_mapping": None,
    "bias": "none",
    "eva_config": None,
    "init_lora_weights": "gaussian",
    "kasa_config": None,
    "layers_to_transform": [0, 1],
    "loftq_config": {},
    "megatron_core": "megatron.core",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "setting_of_tomorrow": False,
    "use_bdlora": None,
}
IDS = torch.arange(12)[None]


def write_base(path: Path, **changes) -> Decoder:
    """Write a folder with random weights and a tokenizer, and return its decoder."""
    write_random_model(path, vocab_size=64, **changes)
    chat_parts.folder(path)
    return read_decoder(path, context=32)  # pyright: ignore[reportReturnType]


def write_adapter(path: Path, model: Decoder, **changes) -> None:
    """Adapt queries and values of the model, and write the adapter."""
    path.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "base_model_name_or_path": str(path.parent / "base"),
    }
    config |= changes
    (path / peft.CONFIG).write_text(json.dumps(config))
    scale = 8 / (math.sqrt(4) if config.get("use_rslora") else 4)
    tensors = {}
    for i, block in model.blocks.items():
        for part in "qv":
            linear = getattr(block.attention, part)
            kind = DoraLinear if config.get("use_dora") else LoraLinear
            adapted = kind(linear, rank=4, scale=scale, dropout=0.0)
            torch.nn.init.normal_(adapted.lora_B)
            setattr(block.attention, part, adapted)
            prefix = f"base_model.model.model.layers.{i}.self_attn.{part}_proj"
            tensors |= {
                f"{prefix}.{name}.weight": getattr(adapted, name).detach()
                for name in ("lora_A", "lora_B")
            }
            if isinstance(adapted, DoraLinear):
                torch.nn.init.normal_(adapted.lora_magnitude)
                norms = row_norms(linear.weight) + adapted.lora_magnitude
                tensors[f"{prefix}.lora_magnitude_vector"] = norms.detach()
    save_file(tensors, path / peft.WEIGHTS)


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"use_dora": True}, DEFAULTS])
def test_an_adapter_is_added_to_its_base(tmp_path, changes):
    model = write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", model, **changes)
    loaded = inference.load(tmp_path / "adapter")
    assert loaded.folder == tmp_path / "base"
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(IDS), model(IDS), atol=1e-4, rtol=1e-4)
        plain = inference.load(tmp_path / "base").model(IDS)
        assert (loaded.model(IDS) - plain).abs().max() > 0.01


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"use_dora": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_into_a_folder(tmp_path, changes, dtype):
    model = write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", model, **changes)
    file = tmp_path / "base" / folder.WEIGHTS
    save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file)
    said = merge.merge(tmp_path / "adapter", tmp_path / "merged")
    assert said.endswith("with 4 adapters of rank 4 added; its logits are those of both")
    written = load_file(tmp_path / "merged" / folder.WEIGHTS)
    assert {value.dtype for value in written.values()} == {dtype}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter", "base", "merged"]
    loaded = inference.load(tmp_path / "merged")
    with torch.no_grad():
        expected = inference.load(tmp_path / "adapter").model(IDS)
        near = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(
            loaded.model(IDS), expected, atol=near * float(expected.abs().max()), rtol=0.0
        )


def test_a_merged_folder_whose_logits_differ_is_not_written(tmp_path, monkeypatch):
    write_adapter(tmp_path / "adapter", write_base(tmp_path / "base"))
    monkeypatch.setattr(merge.peft, "add_to", lambda model, path: None)
    with pytest.raises(
        ConfigError, match=r"its logits differ from those of .*, so it was not written"
    ):
        merge.merge(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_written_adapter_is_read_back_and_compared(tmp_path):
    write_adapter(tmp_path / "adapter", write_base(tmp_path / "base"))
    file, own = tmp_path / "adapter" / peft.WEIGHTS, Lora(rank=4, alpha=8.0)
    expected = load_file(file)
    assert peft.compare(tmp_path / "adapter", expected, own)
    for other in (
        Lora(rank=4, alpha=9.0),
        Lora(rank=4, alpha=8.0, rslora=True),
        Lora(rank=8, alpha=16.0),
    ):
        with pytest.raises(ConfigError, match="what was written is not what the run holds"):
            peft.compare(tmp_path / "adapter", expected, other)
    name = next(iter(expected))
    for odd in ({**expected, name: expected[name] + 1}, {**expected, "x": expected[name]}):
        with pytest.raises(ConfigError, match="what was written is not what the run holds"):
            peft.compare(tmp_path / "adapter", odd, own)
    empty = {name: value * (0 if "lora_B" in name else 1) for name, value in expected.items()}
    save_file(empty, file)
    assert not peft.compare(tmp_path / "adapter", empty, own)


def test_text_ends_where_the_folder_says(tmp_path):
    write_base(tmp_path / "base", eos_token_id=[3, 5])
    assert inference.load(tmp_path / "base").ends == [3, 5]
    for ends in ([3, 64], "x"):
        (tmp_path / "base" / "generation_config.json").write_text(
            json.dumps({"eos_token_id": ends})
        )
        with pytest.raises(ConfigError, match="must be the id of one of the model's 64 tokens"):
            inference.load(tmp_path / "base")


def test_an_adapters_text_ends_where_its_base_says_and_where_its_own_turns_end(tmp_path):
    write_adapter(tmp_path / "adapter", write_base(tmp_path / "base", eos_token_id=[3, 5]))
    (tmp_path / "adapter" / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert inference.load(tmp_path / "adapter").ends == [3, 5, 7]


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


@pytest.mark.parametrize(
    ("target", "word"), [(others.CLASSIFIER, None), (others.CAUSAL, "CAUSAL_LM")]
)
def test_peft_is_told_what_the_model_does(target, word):
    assert peft.task_type(OmegaConf.create({"model": {"_target_": target}})) == word


def test_a_long_context_takes_no_table_of_all_its_positions(tmp_path):
    write_base(tmp_path / "base", max_position_embeddings=1 << 20)
    assert inference.load(tmp_path / "base").model.context == inference.LONGEST


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"num_hidden_layers": 1}])
def test_an_adapter_of_another_model_is_refused(tmp_path, changes):
    write_adapter(tmp_path / "adapter", write_base(tmp_path / "base"))
    write_base(tmp_path / "other", **changes)
    with pytest.raises(ConfigError, match="adapter and base model do not belong together"):
        inference.load(tmp_path / "adapter", base=str(tmp_path / "other"))


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


def test_a_base_for_what_is_no_adapter_is_refused(tmp_path):
    write_base(tmp_path / "base")
    with pytest.raises(ConfigError, match="--base x: only for an adapter's folder"):
        inference.load(tmp_path / "base", base="x")


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
