"""Which blocks are gathered together under sharding, and for how long."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from armature.models.plan import Plan
from armature.parallel import apply, initialization
from benchmarks.parity.harness import DECODER, on_ranks
from tests.parallel.building import decoder_on_meta, parallelize


class Stack(nn.Module):
    """Blocks of 100 parameters each, and an end of 10."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.end = nn.Linear(10, 1, bias=False)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(10, 10, bias=False) for i in range(blocks)})


@pytest.mark.parametrize(
    ("blocks", "at_least", "sizes"),
    [
        (4, 0, [1, 1, 1, 1]),
        (4, 100, [1, 1, 1, 1]),
        (4, 101, [2, 2]),
        (5, 200, [2, 3]),
        (3, 200, [3]),
        (2, 150, [2]),
        (11, 200, [2, 2, 2, 2, 3]),
        (11, 300, [3, 3, 5]),
        (7, 709, [7]),
        (7, 710, []),
        (1, 100, [1]),
    ],
)
def test_consecutive_blocks_share_a_unit(blocks: int, at_least: int, sizes: list[int]) -> None:
    model = Stack(blocks)
    units = apply.sharding_units(model, Plan(), min_num_params=at_least)
    assert [len(unit) for unit in units] == sizes
    if sizes:
        assert [block for unit in units for block in unit] == list(model.blocks.children())


def evaluated_twice(min_num_params: int, tied: bool) -> tuple[bool, bool, list[float]]:
    """Return whether all weights are resharded after training and after evaluation, and the losses
    of two evaluations.

    The weights are halved after each evaluation.
    """
    from torch.distributed.tensor import DTensor

    model = decoder_on_meta(**DECODER, tied=tied)
    parallelize(
        model, axes={"shard": torch.distributed.get_world_size()}, min_num_params=min_num_params
    )
    tokens = torch.arange(16)[None] % DECODER["vocab_size"]

    def all_shards() -> bool:
        return all(isinstance(param, DTensor) for param in model.parameters())

    model(tokens, tokens).backward()
    after_training = all_shards()
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(float(model(tokens, tokens)))
            for param in model.parameters():
                if isinstance(param, DTensor):
                    param.to_local().mul_(0.5)
    return after_training, all_shards(), losses


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("min_num_params", [10_000, 8_000_000])
def test_weights_that_change_after_an_evaluation_are_gathered_again(
    min_num_params: int, tied: bool
) -> None:
    first, second = (on_ranks(evaluated_twice, size, tied, ranks=2) for size in (0, min_num_params))
    for after_training, after_evaluation, losses in second:
        assert after_training
        assert after_evaluation
        assert losses[0] != losses[1]
        assert losses == pytest.approx(first[0][2], rel=1e-6)


@pytest.mark.parametrize("built_on", ["cpu", "meta"])
def test_buffers_of_offloaded_weights_are_on_the_device_that_computes(built_on: str) -> None:
    with torch.device(built_on):
        module = nn.Sequential(nn.Linear(2, 2), nn.Module())
    module[1].register_buffer("count", torch.zeros(2, device="cpu"))
    # "meta" in place of a GPU
    initialization.materialize(
        module, device=torch.device("cpu"), buffers_device=torch.device("meta")
    )
    assert {param.device.type for param in module.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in module.buffers()} == {"meta"}
