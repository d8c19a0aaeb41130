import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from armature.models.decoder import loss
from armature.models.decoder.cache import KeyValueCache
from armature.models.decoder.loss import chunked_loss
from armature.models.decoder.model import Decoder, rotate
from armature.models.loss import IGNORED, VocabularyShard, token_losses

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
SMALL = {"vocab_size": 97, "context": 32, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2}


def small(**changes) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**{**SMALL, **changes})


def tokens(rows: int = 2, length: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:].clone()


def published(name: str) -> Decoder:
    config = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    with torch.device("meta"):
        return Decoder(**{key: value for key, value in config.items() if not key.startswith("_")})


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama3_1b", 1_235_814_400), ("llama3_8b", 8_030_261_248), ("gpt2_124m", 123_587_328)],
)
def test_published_sizes_have_the_published_number_of_parameters(name, count):
    assert sum(param.numel() for param in published(name).parameters()) == count


def test_attention_equals_the_naive_formula():
    attention = small().blocks["0"].attention
    x = torch.randn(2, 9, 32)
    rotary = small().rotary(device="cpu")
    q, k, v = (
        p(x).view(2, 9, -1, 8).transpose(1, 2) for p in (attention.q, attention.k, attention.v)
    )
    q, k = rotate(q, rotary), rotate(k, rotary).repeat_interleave(2, dim=1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(
        ~torch.ones(9, 9, dtype=torch.bool).tril(), -math.inf
    )
    naive = attention.o(
        (scores.softmax(-1) @ v.repeat_interleave(2, dim=1)).transpose(1, 2).reshape(2, 9, 32)
    )
    torch.testing.assert_close(attention(x, rotary), naive)


def test_rope_scaling_keeps_fast_frequencies_and_divides_slow_ones():
    scaling = {"factor": 8.0, "low_frequency": 1.0, "high_frequency": 4.0, "original_context": 16}
    plain, stretched = (
        small(width=64, rope_scaling=s, rope_theta=1e4)
        .rotary(device="cpu")[1]
        .atan2(torch.ones(()))[1]
        for s in (None, scaling)
    )
    assert stretched[-1] < plain[-1]
    angle = [
        m.rotary(device="cpu")[1, 1].asin()
        for m in (
            small(context=64),
            small(context=64, rope_scaling={**scaling, "original_context": 100}),
        )
    ]
    assert angle[1][0] == angle[0][0]
    assert angle[1][-1] == pytest.approx(float(angle[0][-1]) / 8)


@pytest.mark.parametrize("tied", [False, True])
def test_chunked_loss_equals_the_plain_one(tied):
    model = small(tied=tied)
    inputs, targets = tokens(rows=5)
    targets[0] = -100
    targets[1, 3:9] = -100
    losses, gradients = [], []
    for plain in (False, True):
        model.zero_grad()
        loss = model.loss(model(inputs), targets) if plain else model(inputs, targets)
        (3.0 * loss).backward()
        losses.append(loss.item())
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-7, msg=name)


def test_chunked_loss_of_many_chunks_and_of_none():
    model = Decoder(
        vocab_size=2**20 + 3, context=8, width=4, layers=1, heads=2
    )  # two rows per chunk
    inputs = torch.arange(6).view(1, 6)
    targets = torch.tensor([[2**20, 4, -100, 7, 2**19, 1]])
    with torch.no_grad():
        torch.testing.assert_close(model(inputs, targets), model.loss(model(inputs), targets))
        assert model(inputs, torch.full_like(targets, -100)).item() == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 4},
        {"qk_norm": True, "tied": True},
        {"document_token": 5},
        {"qk_norm": "weighted", "attention_bias": True, "head_dim": 6, "windows": [3, None]},
        {"windows": 4, "document_token": 5},
    ],
)
def test_cached_logits_equal_uncached_ones(changes):
    model, (inputs, _) = small(**changes).eval(), tokens(length=20)
    inputs[0, [3, 9, 14]] = 5
    cache = KeyValueCache()
    pieces = [model(piece, cache=cache) for piece in inputs.split([7, 5, 1, 1, 1, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(inputs))


def test_a_window_hides_all_but_the_newest_positions():
    attention, rotary = small(windows=3).blocks["0"].attention, small().rotary(device="cpu")
    x = torch.randn(1, 9, 32)
    changed = x.clone()
    changed[:, 2] = 0
    same = (attention(x, rotary) == attention(changed, rotary)).all(dim=-1)[0]
    assert same.tolist() == [True, True, False, False, False, True, True, True, True]


def test_a_document_gives_the_same_logits_as_alone():
    model, (inputs, _) = small(document_token=0), tokens(length=21)
    inputs[inputs == 0] = 1
    inputs[:, [4, 11]] = 0
    together = model(inputs)
    for start, end in ((0, 4), (4, 11), (11, 20)):
        torch.testing.assert_close(together[:, start:end], model(inputs[:, start:end]))
    model.document_token = None
    assert not torch.allclose(together[:, 4:], model(inputs)[:, 4:], atol=1e-3)


def test_initial_weights_are_a_function_of_name_shape_and_generator():
    model = small()
    one, two, other = (torch.empty(32, 32) for _ in range(3))
    for param, seed in ((one, 1), (two, 1), (other, 2)):
        model.initialize_parameter(
            "blocks.1.attention.q.weight", param, torch.Generator().manual_seed(seed)
        )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    for name, param in model.named_parameters():
        with torch.no_grad():
            model.initialize_parameter(
                name, param.fill_(math.nan), torch.Generator().manual_seed(0)
            )
        assert param.isfinite().all(), name
    assert model.norm.weight.eq(1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"heads": 5, "kv_heads": 5},
            r"model.heads=5 does not divide model.width=32: model.heads=4 does",
        ),
        ({"kv_heads": 3}, r"model.kv_heads=3 does not divide model.heads=4: model.kv_heads=2 does"),
        ({"heads": 32, "kv_heads": 32}, r"odd width, 1"),
        (
            {"document_token": 97},
            r"model.document_token=97 is not one of the model.vocab_size=97 tokens",
        ),
        ({"rope_scaling": {"factor": 2.0}}, r"model.rope_scaling needs exactly the keys"),
        (
            {"rope_scaling": {"kind": "dynamic"}},
            r"model.rope_scaling needs a kind \(llama3, yarn, linear\)",
        ),
        (
            {"rope_scaling": {"kind": "linear", "factor": 0}},
            r"rope_scaling.factor must be a number above 0. Got 0",
        ),
        ({"windows": [4]}, r"model.windows has 1 entries, but model.layers=2"),
        ({"head_dim": 7}, r"model.head_dim=7 must be even"),
    ],
)
def test_impossible_sizes_are_refused_with_a_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_a_subclass_that_replaces_the_loss_trains_on_it():
    class Doubled(Decoder):
        @staticmethod
        def loss(outputs, targets):
            return 2 * Decoder.loss(outputs, targets)

    sizes = {"vocab_size": 32, "context": 8, "layers": 1, "width": 16, "heads": 2}
    torch.manual_seed(0)
    model = Decoder(**sizes)
    doubled = Doubled(**sizes)
    doubled.load_state_dict(model.state_dict())
    inputs = torch.randint(0, 32, (2, 8))
    torch.testing.assert_close(doubled(inputs, inputs), 2 * model(inputs, inputs))


# ------------------------------------------------------------ sums and shards of the loss
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
    mean, each = (chunked_loss(x, weight, targets, reduction=word) for word in ("mean", "none"))
    assert mean.dtype == each.dtype == torch.float32
    torch.testing.assert_close(mean, expected.mean(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(each, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_losses_of_each_target_and_their_gradients_are_those_of_all_logits(monkeypatch, frozen):
    monkeypatch.setitem(loss.CHUNK_LOGITS, "cpu", 97 * 5)  # chunks of 5 of the 12 rows
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4, 16, requires_grad=True), torch.randn(97, 16)
    parts = (x,) if frozen else (x, weight.requires_grad_())
    targets, counts = torch.randint(0, 97, (3, 4)), torch.randn(3, 4)
    targets[1, :3] = IGNORED
    both = (
        chunked_loss(x, weight, targets, reduction="none"),
        token_losses(F.linear(x, weight), targets),
    )
    torch.testing.assert_close(
        *(torch.autograd.grad((losses * counts).sum(), parts) for losses in both)
    )


@pytest.mark.parametrize("wrong", [-1, 97])
def test_a_target_that_is_no_word_is_not_learned_as_another(wrong):
    x, weight, targets = torch.randn(8, 16), torch.randn(97, 16), torch.arange(8)
    targets[2], targets[5] = IGNORED, 96
    part = VocabularyShard(start=0, size=97, all_max=lambda _: None, all_sum=lambda _: None)
    sharded, whole = (chunked_loss(x, weight, targets, each) for each in (part, None))
    torch.testing.assert_close(sharded, whole)
    targets[3] = wrong
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        chunked_loss(x, weight, targets)
    assert chunked_loss(x, weight, targets, part).isnan().sum() == 1
