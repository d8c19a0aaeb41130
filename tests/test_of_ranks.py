"""What users' hooks save differently on each rank."""

from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Timer

from armature.checkpoint import of_ranks
from armature.parallel import process_group


class Counter(L.Callback):
    pass


CALLBACKS = [Counter(), Timer()]


def meta_of(rank: int, **own: Any) -> dict[str, Any]:
    """Return a rank's checkpoint. Only what users save counts: no clock of Lightning's."""
    states = {"Counter": {"seen": rank}, CALLBACKS[1].state_key: {"time": rank}}
    return {
        "epoch": 1,
        "hyper_parameters": {"rank": rank},
        "names": {"a", "b"},
        "callbacks": states,
        **own,
    }


def saved(metas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what rank 0 saves for all: its own, and what the others have saved otherwise."""
    owns = [of_ranks.entries(meta, CALLBACKS) for meta in metas]
    others = [of_ranks.differing(own, of_ranks.digests(owns[0])) for own in owns]
    return metas[0] | {of_ranks.KEY: {"layout": "DDP", "ranks": others}}


def restored(
    monkeypatch: pytest.MonkeyPatch,
    meta: dict[str, Any],
    *,
    rank: int,
    ranks: int = 2,
    layout: str = "DDP",
) -> dict[str, Any]:
    monkeypatch.setattr(process_group, "rank", lambda: rank)
    monkeypatch.setattr(process_group, "ranks", lambda: ranks)
    meta = meta | {"callbacks": dict(meta["callbacks"])}
    of_ranks.restore(meta, layout=layout, fits=True)
    return meta


def test_each_rank_continues_with_what_it_saved(monkeypatch):
    metas = [
        meta_of(0, losses=[torch.ones(2)], first=1),
        meta_of(1, losses=[torch.zeros(2)], second=2),
    ]
    here = partial(restored, monkeypatch, saved(metas))
    assert (here(rank=0)["losses"][0].tolist(), here(rank=1)["losses"][0].tolist()) == (
        [1, 1],
        [0, 0],
    )
    assert [here(rank=rank)["callbacks"]["Counter"] for rank in (0, 1)] == [
        {"seen": 0},
        {"seen": 1},
    ]
    assert here(rank=1)["hyper_parameters"] == {"rank": 0}  # not what hooks add
    assert here(rank=1)["callbacks"][CALLBACKS[1].state_key] == {"time": 0}
    assert here(rank=1)["second"] == 2
    assert (here(rank=0)["first"], here(rank=1)["first"]) == (
        1,
        1,
    )  # as in Lightning: saved on rank 0 alone


def test_another_layout_continues_with_rank_0s_and_says_so(monkeypatch, caplog):
    file = saved([meta_of(0), meta_of(1)])
    for layout, ranks in (("MeshStrategy shard=2", 2), ("DDP", 4)):
        caplog.clear()
        meta = restored(monkeypatch, file, rank=0, ranks=ranks, layout=layout)
        assert meta["callbacks"]["Counter"] == {"seen": 0}
        assert "Each rank had saved its own Counter" in caplog.text
