"""What DeepSpeed's engine keeps, without an engine: the parts that only a GPU would use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from armature.checkpoint import state

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
    saved = first._scaler_state()
    assert saved == changed
    second._load_scaler_state(saved)
    assert vars(second._zero.loss_scaler) == vars(first._zero.loss_scaler)
    second.model = engine(loss_scaler=SimpleNamespace(dynamic=False, cur_scale=1.0))  # bf16
    assert second._scaler_state() == {}
    second._load_scaler_state(saved)
    assert second._zero.loss_scaler.cur_scale == 1.0


def test_the_number_of_steps_lies_where_fused_kernels_read_it(DeepSpeed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU both are the same place, so the flat weights are on the meta device here."""
    flat = torch.nn.Parameter(torch.empty(4, device="meta"))
    saved = {"optimizer_states.0.w.step": torch.tensor(3.0), "optimizer_states.0.w.exp_avg": torch.ones(4)}
    monkeypatch.setattr(state, "load_tensors", lambda path, names, saved: {name: saved[name] for name in names})
    for fused in (True, False):
        strategy: Any = DeepSpeed()
        inner = torch.optim.AdamW([flat], fused=None, foreach=False)
        inner.param_groups[0]["fused"] = fused
        strategy.model = engine(optimizer=inner, fp32_groups_flat_partition=[flat])
        strategy._lightning_module = SimpleNamespace(named_parameters=lambda: [("w", flat)])
        monkeypatch.setattr(DeepSpeed, "module", property(lambda self: self._lightning_module), raising=False)
        monkeypatch.setattr(DeepSpeed, "_link_optimizer_state", lambda self: None)
        assert strategy._create_state(Path(), saved) == ["exp_avg"]
        assert inner.state[flat]["step"].device.type == ("meta" if fused else "cpu")
        assert inner.state[flat]["exp_avg"].device.type == "meta"
