"""A rank that fails shows its error and ends, whatever the others wait for."""

import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from armature import worker
from armature.errors import ConfigError, RunFailed
from armature.parallel import process_group
from tests import running


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("mine"), 1),
        (ConfigError("mine"), 2),
        (RunFailed("mine", 138), 138),
        (KeyboardInterrupt(), 1),
    ],
)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "gloo"])
def test_a_failed_rank_does_not_wait_for_others_to_leave_their_group(
    monkeypatch, error, code, backend
):
    def fail(*_):
        raise error

    done = []
    monkeypatch.setattr(worker, "_init_group", lambda *_, **__: None)
    monkeypatch.setattr(worker, "_run_joined", fail)
    monkeypatch.setattr(worker, "leave_at_exit", done.append)
    monkeypatch.setattr(process_group, "rank", lambda: 1)
    monkeypatch.setattr(process_group, "destroy", lambda: done.append("destroyed"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    with pytest.raises(type(error)):
        worker.join(OmegaConf.create(), [])
    assert done == ([code] if "nccl" in backend else ["destroyed"])


def test_the_error_is_shown_before_the_process_ends():
    code = (
        "from armature.launcher.rank import leave_at_exit; import atexit; "
        "atexit.register(print, 'others, too'); "
    )
    code += "leave_at_exit(7); raise ValueError('mine')"
    ended = running.python("-c", code, code=7, PYTHONPATH="src")
    assert "ValueError: mine" in ended.stderr
    assert ended.stdout == "others, too\n"


def test_ctrl_c_during_the_imports_of_a_command_prints_no_traceback(tmp_path):
    (tmp_path / "hydra.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = running.environment() | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, str(running.ROOT / "train.py")], env=env, capture_output=True, text=True,
        # a background job of a shell ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
