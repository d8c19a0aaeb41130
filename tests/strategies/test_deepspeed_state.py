"""What DeepSpeed's engine keeps, without an engine: the parts that only a GPU would use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from armature.checkpoint import optimizers, state
from armature.checkpoint.writer import CheckpointWriter

pytestmark = pytest.mark.slow  # imports DeepSpeed


@pytest.fixture
def DeepSpeed() -> Any:
    from armature.strategies.deepspeed import DeepSpeed

    return DeepSpeed


def engine(**parts: Any) -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(**parts))


def test_the_state_of_fp16s_loss_scale_is_saved_and_restored(DeepSpeed: Any) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def made() -> Any:
        strategy: Any = DeepSpeed()
        scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, consecutive_hysteresis=False)
        strategy.model = engine(loss_scaler=scaler)
        return strategy

    first, second = made(), made()
    changed = {"cur_scale": 2.0**15, "cur_iter": 7, "last_overflow_iter": 5, "cur_hysteresis": 1}
    vars(first._zero.loss_scaler).update(changed)
    saved = first.scaler_state()
    assert saved == changed
    second.load_scaler_state(saved)
    assert vars(second._zero.loss_scaler) == vars(first._zero.loss_scaler)
    second.model = engine(loss_scaler=SimpleNamespace(dynamic=False, cur_scale=1.0))  # bf16
    assert second.scaler_state() == {}
    second.load_scaler_state(saved)
    assert second._zero.loss_scaler.cur_scale == 1.0


class Partly(torch.nn.Module):
    """Keeps a number and a tensor beside its weights, of which an optimizer has one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.counter = (
            torch.nn.Linear(2, 2),
            torch.nn.BatchNorm1d(2),
            Counter(),
        )


class Counter(torch.nn.Module):
    calls: Any = 0

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("calls", [3, torch.tensor(3)])
def test_extra_state_and_weights_without_optimizer_are_saved_and_resumed(
    DeepSpeed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: Any, hooks: bool
) -> None:
    import deepspeed.utils

    def made() -> tuple[Any, Partly]:
        strategy: Any = DeepSpeed(stage=2)
        strategy._lightning_module = module = Partly()
        strategy._extra_state, strategy._groups, strategy._stepped = (
            {},
            [["head.weight"]],
            {"head.weight"},
        )
        strategy.model = engine(optimizer=None)
        return strategy, module

    copied: list[torch.Tensor] = []
    monkeypatch.setattr(
        DeepSpeed, "module", property(lambda self: self._lightning_module), raising=False
    )
    monkeypatch.setattr(DeepSpeed, "world_size", 1)
    monkeypatch.setattr(DeepSpeed, "root_device", torch.device("cpu"))
    monkeypatch.setattr(DeepSpeed, "_create_state", lambda *args: [])
    monkeypatch.setattr(optimizers, "restore_groups", lambda *args: None)
    # the engine's copy differs from what the model computes with; it has none of the other weights
    monkeypatch.setattr(
        deepspeed.utils,
        "safe_get_full_fp32_param",
        lambda p: p + 1 if p is own.head.weight else None,
    )
    monkeypatch.setattr(
        deepspeed.utils, "safe_set_full_fp32_param", lambda p, value: copied.append(p)
    )
    strategy, own = made()
    own.counter.calls = calls
    own.get_buffer("head.running_mean").add_(5)
    saved = strategy.lightning_module_state_dict()
    assert saved.keys() == own.state_dict().keys()
    assert saved["head.weight"].equal(own.head.weight + 1)

    others = {name: value for name, value in saved.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in saved.items() if name not in others}
    meta = {state.OTHER: others} if others else {}
    CheckpointWriter().save(tmp_path / "step=000001", tensors, meta, entries={"step": 1})
    strategy, module = made()
    strategy._loading = tmp_path / "step=000001"
    changed = {"state_dict": strategy.read_weights(strategy._loading)} if hooks else {}
    strategy.load_model_state_dict({state.OPTIMIZER: [{"param_groups": []}], **changed})
    assert module.counter.calls == 3
    assert module.get_buffer("head.running_mean").tolist() == [5, 5]
    assert module.body.weight.equal(own.body.weight)
    assert module.head.weight.equal(own.head.weight + 1)
    assert [param is module.head.weight for param in copied] == [True]
