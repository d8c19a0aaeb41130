"""What hooks decide on some ranks only."""

from types import SimpleNamespace

import pytest
from lightning.pytorch import LightningModule

from armature.training import agreement


class SkipsLocally:
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device="cpu"))

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch > 0 else None


class SkipsNever:
    def on_train_batch_start(self, batch, batch_idx):
        return None


def on_two_ranks(monkeypatch, others: bool) -> None:
    monkeypatch.setattr(agreement.process_group, "ranks", lambda: 2)
    monkeypatch.setattr(agreement.process_group, "all_gather_object", lambda own: [own, others])
    monkeypatch.setattr(agreement.process_group, "all_sum", lambda own: own + others)


def test_a_rank_that_leaves_the_epoch_alone_is_named(monkeypatch):
    on_two_ranks(monkeypatch, False)
    assert not agreement.skipped(SkipsLocally(), False, batch_idx=3)
    with pytest.raises(
        ValueError, match=r"SkipsLocally.on_train_batch_start returns -1 on rank 0 .* 1 \(batch 3\)"
    ):
        agreement.skipped(SkipsLocally(), True, batch_idx=3)


def test_ranks_that_agree_send_one_number(monkeypatch):
    on_two_ranks(monkeypatch, True)
    monkeypatch.setattr(agreement.process_group, "all_gather_object", None)
    assert agreement.skipped(SkipsLocally(), True, batch_idx=0)


@pytest.mark.parametrize(("own", "others"), [(False, False), (False, True), (True, False)])
def test_a_stop_of_one_rank_is_one_of_all(monkeypatch, own, others):
    on_two_ranks(monkeypatch, others)
    trainer = SimpleNamespace(should_stop=own, strategy=SimpleNamespace(root_device="cpu"))
    agreement.stop_together(trainer)
    assert trainer.should_stop is (own or others)


def test_ranks_do_not_ask_each_other_where_no_code_can_skip(monkeypatch):
    on_two_ranks(monkeypatch, True)
    assert not agreement.skipped(SkipsNever(), False, batch_idx=0)


SKIP = -1


class SkipsByName:
    def on_train_batch_start(self, batch, batch_idx):
        if batch > 0:
            return SKIP
        return None


class SkipsAsItsBase(SkipsByName):
    def on_train_batch_start(self, batch, batch_idx):
        return super().on_train_batch_start(batch, batch_idx)


class ReturnsEarly:
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx > -1:
            return
        super().on_train_batch_start(batch, batch_idx)


def test_a_hook_may_leave_the_epoch_by_any_value_that_it_returns(monkeypatch):
    on_two_ranks(monkeypatch, True)
    for kind in (SkipsByName, SkipsAsItsBase):
        module = kind()
        module.trainer = SkipsLocally.trainer
        with pytest.raises(
            ValueError, match=f"{kind.__name__}.on_train_batch_start returns -1 on rank 1"
        ):
            agreement.skipped(module, False, batch_idx=0)
    assert not agreement.skipped(ReturnsEarly(), False, batch_idx=0)
    assert not agreement.skipped(LightningModule(), False, batch_idx=0)


class Stops:
    def on_train_epoch_end(self, trainer):
        def stop():
            trainer.should_stop = True

        stop()


def test_code_that_may_stop_a_run_is_found(monkeypatch):
    monkeypatch.setattr(agreement.process_group, "ranks", lambda: 2)
    for module, callbacks, expected in (
        (Stops(), [], True),
        (SkipsNever(), [Stops()], True),
        (SkipsNever(), [SkipsLocally()], False),
    ):
        trainer = SimpleNamespace(lightning_module=module, callbacks=callbacks)
        assert agreement.may_stop(trainer) is expected
