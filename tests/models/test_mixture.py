"""The mixture equals every expert on every token, weighted by the choice, and its bias levels the
load.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from armature.checkpoint import optimizers
from armature.models.mixture.check import problems
from armature.models.mixture.experts import Mixture
from armature.models.mixture.model import MixtureDecoder
from armature.optim.groups import parameter_groups
from armature.parallel import blocks
from armature.parallel.initialization import initialize_by_name
from tests.parallel.test_activations import MODEL

SIZES = {
    **MODEL,
    "experts": 8,
    "active": 2,
    "expert_hidden": 24,
    "shared_hidden": 16,
    "dense_layers": 1,
}
OPTIONS = {"experts": 8, "active": 2, "expert_hidden": 24, "normalized": True, "balance_rate": 1e-3}


def mixture(**changes: object) -> Mixture:
    torch.manual_seed(0)
    made = Mixture(32, **{**OPTIONS, "shared_hidden": 16, "score": "sigmoid", **changes})  # pyright: ignore[reportArgumentType]
    for param in made.parameters():
        torch.nn.init.normal_(param, std=0.2)
    made.bias.normal_(std=0.1)
    return made


def decoder(**changes: object) -> MixtureDecoder:
    model = MixtureDecoder(**{**SIZES, **changes})  # pyright: ignore[reportArgumentType]
    initialize_by_name(model, seed=0)
    return model


def naive(m: Mixture, x: Tensor) -> Tensor:
    logits = m.router(x)
    score = logits.sigmoid() if m.score == "sigmoid" else logits.softmax(-1)
    chosen = (score + m.bias).topk(m.active, -1).indices
    weight = torch.zeros_like(score).scatter(-1, chosen, score.gather(-1, chosen))
    weight = weight / weight.sum(-1, keepdim=True) if m.normalized else weight
    e = m.experts
    h = F.silu(torch.einsum("btd,efd->btef", x, e.gate)) * torch.einsum("btd,efd->btef", x, e.up)
    y = torch.einsum("btef,edf,bte->btd", h, e.down, weight)
    return y if m.shared is None else y + m.shared(x)


@pytest.mark.parametrize(
    "changes",
    [{}, {"score": "softmax"}, {"normalized": False}, {"shared_hidden": None}, {"active": 8}],
    ids=str,
)
def test_mixture_equals_all_experts_on_all_tokens(changes):
    m, x = mixture(**changes), torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for forward in (m, lambda x: naive(m, x)):
        m.zero_grad()
        inputs = x.clone().requires_grad_()
        output = forward(inputs)
        (output * torch.linspace(-1, 1, 32)).sum().backward()
        found.append(
            [
                output.detach(),
                inputs.grad,
                *(p.grad.clone() for p in m.parameters() if p.grad is not None),
            ]
        )
    assert len(found[0]) == len(found[1]) == 2 + len([*m.parameters()])
    for own, expected in zip(*found, strict=True):
        assert float((own - expected).abs().max() / expected.abs().max()) <= 1e-6


def test_bias_moves_towards_the_mean_load_and_keeps_its_mean():
    m = mixture(balance_rate=0.25)
    m.bias.zero_()
    m.rebalance(torch.tensor([9, 1, 5, 5, 5, 5, 5, 5]))
    assert m.bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0, 0, 0]
    m.rebalance(torch.tensor([8, 0, 0, 0, 0, 0, 0, 0]))
    assert float(m.bias.sum()) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("mode", ["none", "every", "selective", "half"])
def test_tokens_are_counted_once_however_often_a_block_is_computed_again(mode):
    model, ids = decoder(), torch.arange(32).view(2, 16)
    blocks.checkpoint_activations(model.blocks.values(), mode=mode)
    params = [
        param for name, param in model.named_parameters() if name.endswith("attention.q.weight")
    ]
    loss = model(ids, ids)
    for param in (
        params if mode in ("none", "every") else ()
    ):  # as zero bubble's backward of weights; the other cannot
        torch.autograd.grad(loss, param, retain_graph=True)
    loss.backward()
    assert model.take_load(device=torch.device("cpu")).sum(1).tolist() == [0, 64, 64]
    with torch.no_grad():
        model.eval()(ids)
    assert model.take_load(device=torch.device("cpu")).sum() == 0, (
        "a validation counts what was computed again"
    )


def test_decoder_has_dense_blocks_first_and_trains():
    model = decoder()
    assert [*model.mixtures()] == [1, 2]
    assert hasattr(model.blocks["0"], "ffn")
    ids = torch.arange(32).view(2, 16)
    model(ids, ids).backward()
    assert all(param.grad is not None for param in model.parameters())
    model.rebalance(model.take_load(device=torch.device("cpu")))
    assert model.load_LE is not None
    assert model.load_LE.mean(1).tolist() == pytest.approx([0, 1, 1])


def test_experts_matrices_are_hidden_and_in_a_group_of_their_own():
    model = decoder()
    groups = [
        {id(p) for p in group["params"]} for group in parameter_groups(model) if group["hidden"]
    ]
    stacks = {id(p) for name, p in model.named_parameters() if ".experts." in name}
    assert stacks in groups
    assert len(groups) == 2
    every = [{**group, "params": None} for group in parameter_groups(model)]
    merged = optimizers.merge_groups(
        [[{**group, optimizers.NAMES: [str(i)]} for i, group in enumerate(every)]]
    )
    assert len(merged) == 4  # a file for Lightning has as many as the optimizer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"active": 9}, "model.active=9 is more than model.experts=8"),
        (
            {"active": 1},
            "model.active=1 with model.normalized=true.*[Tt]ype model.normalized=false",
        ),
        (
            {"expert_hidden": 20},
            "model.expert_hidden=20 must be a multiple of 8.*type model.expert_hidden=",
        ),
        (
            {"dense_layers": 3},
            "model.dense_layers=3 leaves none of the model.layers=3 blocks a mixture",
        ),
        ({"pretrained": "x"}, "model.pretrained: mixtures of experts begin at random"),
        ({"heads": 5}, "model.heads=5 does not divide model.width=32"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    assert problems(SIZES) == []
    with pytest.raises(ValueError, match=message):
        MixtureDecoder(**{**SIZES, **changes})
