"""A rank draws the rows that it holds, whose values do not depend on the layout."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from armature.models.plan import by_rows
from armature.parallel import initialization

ROWS, SHAPE = 4, (22, 6)


class Model(nn.Module):
    drawn = 0

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    @by_rows
    def initialize_parameter(self, name, param, generator):
        self.drawn += len(param)
        param.normal_(generator=generator)


def initialized(weight):
    model = Model(weight)
    initialization.initialize_by_name(model, seed=3)
    return model.weight.detach(), model.drawn


@pytest.mark.parametrize(
    ("placements", "most_rows"),
    [
        ((Shard(0), Replicate()), 16),
        ((Shard(0), Shard(1)), 16),
        ((_StridedShard(0, split_factor=2), Shard(0)), 12),
        ((Replicate(), Replicate()), 22),
    ],
)
def test_a_rank_draws_the_blocks_of_rows_that_it_has_a_part_of(placements, most_rows, monkeypatch):
    monkeypatch.setattr(initialization, "BLOCK", ROWS * SHAPE[1])
    whole, drawn = initialized(torch.empty(SHAPE))
    assert drawn == len(whole) == len(whole.unique(dim=0))
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            # torch keeps what it found out of equal meshes, the rank's place included
            names = (f"data of {rank}", "tensor")
            mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=names)
            own = distribute_tensor(torch.zeros(SHAPE), mesh, placements, src_data_rank=None)
            part, drawn = initialized(own)
            expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert isinstance(part, DTensor)
            assert torch.equal(part.to_local(), expected.to_local())
            assert 0 < drawn <= most_rows
        finally:
            dist.destroy_process_group()
