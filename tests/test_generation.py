import pytest
import torch

from armature.models.decoder.generation import complete, sample
from armature.models.decoder.model import Decoder

PROMPT = [[3, 1, 4], [1, 5, 9]]


def decoder(**options) -> Decoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "context": 64, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2}
    return Decoder(**sizes | options)


@pytest.fixture
def model() -> Decoder:
    return decoder(context=16, dropout=0.5)


@pytest.mark.guarantee
def test_greedy_text_equals_that_of_a_model_without_a_cache(model):
    ids = torch.tensor(PROMPT)
    model.eval()
    for _ in range(10):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    assert complete(model, PROMPT, max_new_tokens=10, temperature=0) == ids.tolist()


def assert_continues_as_alone(model, prompts, *, ends_as: tuple[int, int]) -> list[list[int]]:
    """Return the text of each prompt alone. All end at the token of one prompt's text, too."""
    alone = [complete(model, [each], max_new_tokens=30, temperature=0)[0] for each in prompts]
    assert complete(model, prompts, max_new_tokens=30, temperature=0) == alone
    eot = alone[ends_as[0]][ends_as[1]]
    ended = complete(model, prompts, max_new_tokens=30, temperature=0, eot=eot)
    for prompt, whole, got in zip(prompts, alone, ended, strict=True):
        new = whole[len(prompt) :]
        assert got == (whole if eot not in new else prompt + new[: new.index(eot) + 1])
    return alone


@pytest.mark.guarantee
def test_prompts_of_different_lengths_continue_as_each_alone(model, caplog):
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8]]
    alone = assert_continues_as_alone(model, prompts, ends_as=(1, 4))
    prompts += [[*range(20)]]
    assert [*map(len, complete(model, prompts, max_new_tokens=30))] == [38, 31, 33, 50]
    assert "A prompt has 20 tokens, and the model reads the last 16" in caplog.text
    second = alone[1][:2]
    assert complete(model, [[2]], max_new_tokens=30, temperature=0, eot=[30, second[1]]) == [second]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"windows": [None, 5]},
        {"document_token": 7},
        {"windows": 4, "document_token": 7},
        {"qk_norm": "weighted"},
    ],
    ids=str,
)
def test_prompts_continue_as_each_alone_with_windows_and_documents(options):
    model = decoder(**options)
    prompts = [[3, 1, 7, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9], [2], [7, 1, 8, 2], list(range(30))]
    assert_continues_as_alone(model, prompts, ends_as=(2, 9))


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_no_prompt_and_an_empty_one_among_others_are_refused(model, prompts):
    with pytest.raises(ValueError, match="each prompt must have at least one token"):
        complete(model, prompts, max_new_tokens=1)


def test_a_seed_gives_the_same_text_and_training_mode_is_restored(model):
    texts = [
        complete(
            model.train(), PROMPT, max_new_tokens=8, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert model.training


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2000, 1)
    generator = torch.Generator().manual_seed(0)

    def drawn(**options) -> set[int]:
        return set(sample(logits, generator=generator, **options)[:, 0].tolist())

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.75) == {0, 1}
    assert drawn(top_p=0.85) == {0, 1, 2}
    assert drawn(top_p=1e-6) == drawn(temperature=0.0) == {0}
