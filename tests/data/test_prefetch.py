"""The loader stays one batch ahead.

On a CPU the device's streams do nothing, so only the order is tested.
"""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from armature.data.adapter import PlainData
from armature.data.base import DataModule
from armature.data.prefetch import PrefetchLoader, reads_ahead


def test_batches_come_in_order_each_once():
    batches = [{"inputs": torch.tensor([i]), "targets": torch.tensor([-i])} for i in range(4)]
    served = PrefetchLoader(batches, torch.device("cpu"))
    assert len(served) == 4
    assert [(int(b["inputs"]), int(b["targets"])) for b in served] == [(i, -i) for i in range(4)]
    assert list(PrefetchLoader([], torch.device("cpu"))) == []


def test_what_torch_cannot_record_for_a_stream_is_passed_on(monkeypatch):
    packed = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])  # its sizes stay on the CPU
    batch = {"packed": packed, "sparse": torch.eye(3).to_sparse()}
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace(current_stream=lambda: None)
    )
    copied = SimpleNamespace(wait=lambda stream: None)
    assert PrefetchLoader([], torch.device("cuda"))._synchronized(batch, copied) is batch


def test_hooks_find_the_loaders_attributes():
    loader = DataLoader([*range(6)], batch_size=2)  # pyright: ignore[reportArgumentType]
    served = copy.copy(PrefetchLoader(loader, torch.device("cpu")))
    assert (served.dataset, served.batch_size) == (loader.dataset, 2)
    assert not hasattr(served, "another")
    assert not hasattr(served, "_iterator")  # by which Lightning resets a loader's workers


class Ours(DataModule):
    pass


class MovesData(Ours):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


class PlainMoves(L.LightningDataModule):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


class ModuleBefore(L.LightningModule):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


class ModuleAfter(L.LightningModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class TakesIterator(L.LightningModule):
    def validation_step(self, dataloader_iter): ...


@pytest.mark.parametrize(
    ("data", "module", "expected"),
    [
        (
            Ours(global_batch_size=1),
            TakesIterator(),
            False,
        ),  # it moves its batches, as under Lightning
        (Ours(global_batch_size=1), L.LightningModule(), True),
        (Ours(global_batch_size=1), ModuleAfter(), True),  # it sees batches on the device anyway
        (Ours(global_batch_size=1), ModuleBefore(), False),
        (MovesData(global_batch_size=1), L.LightningModule(), False),
        (PlainData(PlainMoves()), L.LightningModule(), False),
        (PlainData(L.LightningDataModule()), L.LightningModule(), True),
        (Ours(global_batch_size=1), None, True),
    ],
)
def test_batches_are_not_moved_before_hooks_that_see_them_off_the_device(data, module, expected):
    data.trainer = SimpleNamespace(lightning_module=module)
    assert data._prefetches() is expected


class Samples(Ours):
    def dataset(self, split):
        return [1, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_users_that_may_change_with_a_step_are_not_read_ahead(workers):
    data = Samples(global_batch_size=1, num_workers=workers)
    on_gpu = SimpleNamespace(root_device=torch.device("cuda"))
    data.trainer = SimpleNamespace(
        strategy=on_gpu, accumulate_grad_batches=1, lightning_module=L.LightningModule()
    )
    assert isinstance(data.train_dataloader(), PrefetchLoader) is bool(workers)
    assert not reads_ahead(PlainData(PlainMoves()), workers=False)
    assert reads_ahead(DataModule(global_batch_size=1), workers=False)


def test_the_next_batch_is_asked_for_before_this_one_is_used():
    asked = []

    def loader():
        for i in range(3):
            asked.append(i)
            yield torch.tensor(i)

    served = iter(PrefetchLoader(loader(), torch.device("cpu")))
    assert int(next(served)) == 0
    assert asked == [0, 1]


def test_a_copy_waits_for_the_steps_so_far_whose_batches_lay_in_its_memory(monkeypatch):
    order: list[str] = []

    class Stream:
        def wait_stream(self, other):
            assert other == "the steps' stream"
            order.append("wait")

    class Event:
        def record(self, stream):
            order.append("copy")

        def wait(self, stream): ...

    streams = SimpleNamespace(
        Stream=Stream,
        Event=Event,
        stream=lambda _: nullcontext(),
        current_stream=lambda: "the steps' stream",
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    for batch in PrefetchLoader(iter(range(3)), torch.device("cpu")):
        order.append(f"step {batch}")
    assert order == ["wait", "copy", "wait", "copy", "step 0", "wait", "copy", "step 1", "step 2"]
