"""What DeepSpeed's engine keeps, without an engine: the parts that only a GPU would use."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # imports DeepSpeed


def test_the_state_of_fp16s_loss_scale_is_saved_and_restored():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from armature.strategies.deepspeed import DeepSpeed

    def made():
        strategy: Any = DeepSpeed()
        scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 2, consecutive_hysteresis=False)
        strategy.model = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
        return strategy

    first, second = made(), made()
    changed = {"cur_scale": 2.0**15, "cur_iter": 7, "last_overflow_iter": 5, "cur_hysteresis": 1}
    vars(first._zero.loss_scaler).update(changed)
    assert first.scaler_state() == changed
    second.load_scaler_state(changed)
    assert vars(second._zero.loss_scaler) == vars(first._zero.loss_scaler)
    second.model.optimizer.loss_scaler = SimpleNamespace(dynamic=False, cur_scale=1.0)  # bf16
    assert second.scaler_state() == {}
    second.load_scaler_state(changed)
    assert second._zero.loss_scaler.cur_scale == 1.0
