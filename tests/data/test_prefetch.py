"""The loader stays one batch ahead. On a CPU the device's streams do nothing, so only the order is tested."""

import torch

from armature.data.prefetch import PrefetchLoader


def test_batches_come_in_order_each_once():
    batches = [{"inputs": torch.tensor([i]), "targets": torch.tensor([-i])} for i in range(4)]
    served = PrefetchLoader(batches, torch.device("cpu"))
    assert len(served) == 4
    assert [(int(b["inputs"]), int(b["targets"])) for b in served] == [(i, -i) for i in range(4)]
    assert list(PrefetchLoader([], torch.device("cpu"))) == []


def test_the_next_batch_is_asked_for_before_this_one_is_used():
    asked = []

    def loader():
        for i in range(3):
            asked.append(i)
            yield torch.tensor(i)

    served = iter(PrefetchLoader(loader(), torch.device("cpu")))
    assert int(next(served)) == 0
    assert asked == [0, 1]
