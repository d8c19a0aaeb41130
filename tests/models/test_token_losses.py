"""The loss of each target, without all the logits: values and gradients equal those of plain
cross-entropy.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from armature.models.decoder import loss
from armature.models.decoder.model import Decoder
from armature.models.loss import IGNORED, VocabularyShard, token_losses


def small(**changes) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(
        **{"vocab_size": 97, "context": 16, "width": 32, "layers": 2, "heads": 4, **changes}
    )
    for param in model.parameters():
        nn.init.normal_(param, 0.0, 0.2)
    return model


def batch(vocab_size: int = 97) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[0, :9], targets[2] = IGNORED, IGNORED
    return ids[:, :-1], targets


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [None, 7])
def test_each_targets_loss_and_its_gradients_are_those_of_plain_cross_entropy(
    monkeypatch, tied, rows
):
    model, (inputs, targets) = small(tied=tied), batch()
    if rows is not None:  # several chunks, the last one incomplete
        monkeypatch.setitem(loss.CHUNK_LOGITS, "cpu", rows * 97)
    weights = torch.rand(3, 1, generator=torch.Generator().manual_seed(2)) - 0.5
    losses, gradients = [], []
    for plain in (False, True):
        model.zero_grad()
        found = (
            token_losses(model(inputs), targets)
            if plain
            else model(inputs, targets, per_token=True)
        )
        (found * weights).sum().backward()
        losses.append(found.detach())
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
    assert losses[0].shape == targets.shape
    assert losses[0].dtype == torch.float32
    assert (losses[0][targets == IGNORED] == 0).all()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6, msg=name)
    mean = losses[0].sum() / (targets != IGNORED).sum()
    torch.testing.assert_close(mean, model(inputs, targets).detach(), rtol=1e-6, atol=1e-6)


def test_a_head_of_ones_own_gives_the_same():
    model, (inputs, targets) = small(), batch()
    expected = token_losses(model(inputs), targets)
    plain = nn.Linear(32, 97, bias=False)
    plain.weight = model.head.weight
    model.head = plain
    torch.testing.assert_close(
        model(inputs, targets, per_token=True), expected, rtol=1e-5, atol=1e-6
    )
    model.head = nn.Linear(32, 97)
    logits = model(inputs).transpose(1, 2)
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(
        model(inputs, targets, per_token=True), expected, rtol=1e-5, atol=1e-6
    )


@pytest.fixture
def bf16_by_default():
    torch.set_default_dtype(torch.bfloat16)  # as trainer.precision=bf16-true does in each step
    yield
    torch.set_default_dtype(torch.float32)


def test_sums_are_in_fp32_where_new_tensors_have_16_bits(bf16_by_default):
    torch.manual_seed(0)
    x, weight = (torch.randn(64, 16) * 2).float(), torch.randn(97, 16).float()
    targets = torch.randint(0, 97, (64,))
    expected = F.cross_entropy(F.linear(x, weight), targets, reduction="none")
    each, mean = (
        loss.chunked_loss(x, weight, targets, per_token=per_token) for per_token in (True, False)
    )
    assert (each.dtype, mean.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mean, expected.mean(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("wrong", [-1, 97])
def test_a_target_that_is_no_word_is_not_learned_as_another(wrong, per_token):
    x, weight, targets = torch.randn(8, 16), torch.randn(97, 16), torch.arange(8)
    targets[2], targets[5] = IGNORED, 96
    part = VocabularyShard(start=0, size=97, all_max=lambda _: None, all_sum=lambda _: None)
    sharded, whole = (
        loss.chunked_loss(x, weight, targets, each, per_token=per_token) for each in (part, None)
    )
    torch.testing.assert_close(sharded, whole)
    targets[3] = wrong
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        loss.chunked_loss(x, weight, targets, per_token=per_token)
    assert loss.chunked_loss(x, weight, targets, part, per_token=per_token).isnan().sum() == 1
