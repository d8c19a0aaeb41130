"""Adapters: what is trained, and what stays as it was. test_base.py has every layout."""

import copy

import pytest
import torch
from torch import nn

from armature.errors import ConfigError
from armature.finetune.lora import Lora, LoraLinear, merge
from armature.models.adapters import is_adapter
from armature.models.decoder.model import Decoder
from armature.optim.groups import parameter_groups
from tests.support.parity.harness import DECODER

ADAPTER = {"rank": 4, "alpha": 8.0}


def adapted(**options) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(**DECODER)
    Lora(**{**ADAPTER, **options}).add_to(model)
    return model


def trained(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad}


def test_only_adapters_of_the_blocks_are_trained_and_weights_keep_their_names():
    model = adapted()
    assert all(is_adapter(name) and name.startswith("blocks.") for name in trained(model))
    assert len(trained(model)) == 2 * 7 * DECODER["layers"]
    assert set(Decoder(**DECODER).state_dict()) == {
        name for name in model.state_dict() if not is_adapter(name)
    }


class Mixers(nn.Module):
    """A model of which some weights are read past their Linears, as Mamba's."""

    read_directly = ("out_proj",)

    def __init__(self):
        super().__init__()
        parts = {name: nn.Linear(64, 64) for name in ("in_proj", "out_proj")}
        self.blocks, self.head = nn.ModuleList([nn.ModuleDict(parts)]), nn.Linear(64, 8)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_what_is_read_past_its_linear_gets_no_adapter_and_stays_whole(quantize):
    model = Mixers()
    Lora(**ADAPTER, quantize=quantize).add_to(model)
    assert trained(model) == {"blocks.0.in_proj.lora_A", "blocks.0.in_proj.lora_B"}
    assert type(model.get_submodule("blocks.0.out_proj")) is nn.Linear
    with pytest.raises(
        ConfigError, match=r"the weights of blocks\.\*\.out_proj are read past their Linears"
    ):
        Lora(**ADAPTER, targets=["*_proj"]).add_to(Mixers())


def test_blocks_without_linears_are_named():
    def model(block: nn.Module) -> nn.Module:
        return nn.ModuleDict({"blocks": nn.ModuleList([block]), "head": nn.Linear(4, 8)})

    with pytest.raises(
        ConfigError, match=r"blocks, and these have none.*name some of those outside .*: head\."
    ):
        Lora(**ADAPTER).add_to(model(nn.Conv1d(4, 4, 1)))
    named = model(nn.Conv1d(4, 4, 1))
    Lora(**ADAPTER, targets=["head"]).add_to(named)
    assert trained(named) == {"head.lora_A", "head.lora_B"}


@pytest.mark.parametrize("autocast", [False, True])
def test_an_adapted_model_begins_as_the_model_itself(autocast):
    torch.manual_seed(0)
    plain, tokens = Decoder(**DECODER), torch.arange(12)[None]
    torch.nn.init.zeros_(plain.get_submodule("blocks.0.attention.q").weight[0])
    model = copy.deepcopy(plain)
    Lora(**ADAPTER).add_to(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(model(tokens), plain(tokens))


def fill_adapters(model: nn.Module) -> None:
    """Give adapters values that are not 0, so that they change the model."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("lora_B"):
                param.normal_()


@pytest.mark.parametrize("rslora", [False, True])
def test_merged_weights_compute_what_the_adapters_did(rslora):
    model, tokens = adapted(rslora=rslora), torch.arange(12)[None]
    fill_adapters(model)
    with torch.no_grad():
        before = model(tokens)
        merged = merge(copy.deepcopy(model))
        assert not any(isinstance(module, LoraLinear) for module in merged.modules())
        torch.testing.assert_close(merged(tokens), before, atol=1e-4, rtol=1e-4)
    assert model.get_submodule("blocks.0.attention.q").scale == (
        4.0 if rslora else 2.0
    )  # 8 / sqrt(4), 8 / 4


def test_targets_and_parts_to_train_are_chosen_by_pattern():
    model = adapted(targets=["q", "blocks.1.ffn.*"], train=["embed", "*_norm.weight"])
    names = trained(model)
    assert "embed.weight" in names
    assert "blocks.3.ffn_norm.weight" in names
    assert "blocks.2.attention.q.weight" in trained(
        adapted(targets=["up"], train=["attention"])
    )  # a module's weights
    assert {name.rpartition(".lora")[0] for name in names if is_adapter(name)} == {
        *(f"blocks.{i}.attention.q" for i in range(4)),
        *(f"blocks.1.ffn.{part}" for part in ("gate", "up", "down")),
    }


def test_a_weight_of_two_modules_takes_no_adapter():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    for owner in (model, Decoder(**DECODER)):
        with pytest.raises(ConfigError, match=r"head takes no adapter: it is no plain"):
            Lora(targets=["head"]).add_to(owner)


def test_adapters_are_no_hidden_matrices_for_muon():
    [group] = parameter_groups(adapted())
    assert group["hidden"] is False
