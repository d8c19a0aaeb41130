import pytest
from torch import nn

from armature.models.decoder.model import Decoder
from armature.models.vit.model import VisionTransformer
from armature.optim.adamw import adamw
from armature.optim.groups import parameter_groups
from armature.optim.muon import Muon


def names(model: nn.Module) -> list[set[str]]:
    by_id = {id(param): name for name, param in model.named_parameters()}
    return [{by_id[id(param)] for param in group["params"]} for group in parameter_groups(model)]


def test_norms_biases_and_positions_are_not_decayed():
    decoder = Decoder(vocab_size=9, context=8, width=8, layers=1, heads=2)
    vit = VisionTransformer(
        image_size=4, patch_size=2, channels=1, classes=3, width=8, layers=1, heads=2
    )
    for model in (decoder, vit):
        hidden, matrices, vectors = names(model)
        assert all(name.startswith("blocks.") and name.endswith("weight") for name in hidden)
        assert matrices <= {"embed.weight", "head.weight", "embed.patch.weight"}
        assert all("norm" in name or name.endswith(("bias", "position")) for name in vectors)
        assert parameter_groups(model)[2]["weight_decay"] == 0.0
        assert len(hidden) + len(matrices) + len(vectors) == len(list(model.parameters()))


@pytest.mark.parametrize(("make", "factor"), [(adamw, 1 / 4), (Muon, 1 / 2)])
def test_a_wider_models_hidden_matrices_get_a_lower_rate_and_the_same_decay(make, factor):
    model = Decoder(vocab_size=9, context=8, width=32, layers=1, heads=2)
    hidden, matrices, vectors = make(
        parameter_groups(model), lr=0.01, weight_decay=0.1, base_width=8
    ).param_groups
    assert (hidden["lr"], matrices["lr"], vectors["lr"]) == (
        pytest.approx(0.01 * factor),
        0.01,
        0.01,
    )
    assert hidden["lr"] * hidden["weight_decay"] == pytest.approx(0.01 * 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    same = make(parameter_groups(model), lr=0.01, base_width=32).param_groups
    assert {group["lr"] for group in same} == {
        group["lr"] for group in make(parameter_groups(model), lr=0.01).param_groups
    }
