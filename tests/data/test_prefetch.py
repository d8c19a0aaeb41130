"""One batch ahead, and nothing else: the code is the device's own streams, which a CPU has only in name."""

import torch

from armature.data.prefetch import Prefetched


def test_batches_come_in_order_each_once():
    batches = [{"inputs": torch.tensor([i]), "targets": torch.tensor([-i])} for i in range(4)]
    served = Prefetched(batches, torch.device("cpu"))
    assert len(served) == 4
    assert [(int(b["inputs"]), int(b["targets"])) for b in served] == [(i, -i) for i in range(4)]
    assert list(Prefetched([], torch.device("cpu"))) == []


def test_the_next_batch_is_asked_for_before_this_one_is_used():
    asked = []

    def loader():
        for i in range(3):
            asked.append(i)
            yield torch.tensor(i)

    served = iter(Prefetched(loader(), torch.device("cpu")))
    assert int(next(served)) == 0
    assert asked == [0, 1]
