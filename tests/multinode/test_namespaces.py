"""Two machines: scripts/multinode/run.sh in network namespaces with addresses of their own, joined
by a cable; launch.rdzv_endpoint as two commands.
"""

import contextlib
import os
import shutil
import subprocess
import sys

import pytest

from tests import forked, needs, running
from tests.support.two_hosts import two_hosts

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts():
    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")
    if shutil.which("ip") is None:
        needs.absent("there is no program ip: apt-get install iproute2")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(two_hosts())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield made


def test_two_machines_train_stop_together_and_go_on(hosts, tmp_path):
    corpus = running.write_corpus(tmp_path / "corpus")
    head = f"{hosts[0].address}:29511"
    overrides = [
        *running.TINY,
        f"data.path={corpus}",
        f"run.root={tmp_path}",
        "run.name=run",
        "strategy=ddp",
    ]
    environment = {
        "NODES": "2",
        "DEVICES": "1",
        "HEAD": head,
        "ARMATURE_CACHE": str(tmp_path / "cache"),
    }
    endless = [
        *overrides,
        "trainer.max_steps=100000",
        "trainer.val_every_n_steps=50000",
        "scheduler=constant",
    ]
    machines = [host.start(*endless, **environment) for host in hosts]
    try:
        metrics = tmp_path / "run" / "metrics.csv"
        ended = lambda: any(machine.poll() is not None for machine in machines)  # noqa: E731
        running.wait_for(lambda: metrics.exists() or ended(), seconds=120, what="the first row")
        machines[1].terminate()  # one of them alone
        outputs = [machine.communicate(timeout=60)[0] for machine in machines]
        assert any("SIGTERM at step" in output for output in outputs), outputs
        steps = running.summary(tmp_path / "run")["global_step"]

        goal = [
            *overrides,
            f"trainer.max_steps={steps + 3}",
            "trainer.val_every_n_steps=50000",
            "scheduler=constant",
        ]
        machines = [host.start(*goal, **environment) for host in hosts]
        outputs = [machine.communicate(timeout=120)[0] for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], outputs
        assert any(
            "2 cpu ranks (gloo) on 2 machines" in output and "resuming from" in output
            for output in outputs
        )
    finally:
        for machine in machines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(machine.pid, 9)
            machine.communicate()
    summary = running.summary(tmp_path / "run")
    assert (summary["stop_reason"], summary["world_size"]) == ("finished", 2)
    assert [int(row["step"]) for row in running.rows(tmp_path / "run")] == list(range(1, steps + 4))
    assert all(host.received() > 1_000_000 for host in hosts)  # a step's gradients alone are 170 kB


def test_machines_meet_without_torchrun(tmp_path):
    for words in (["train.py", "run.name=a", "trainer.max_steps=4"], ["scripts/doctor.py"]):
        command = [
            *(sys.executable, running.ROOT / words[0], *words[1:], "experiment=example"),
            *("strategy=ddp", "trainer.accelerator=cpu", "trainer.num_nodes=2"),
            f"launch.rdzv_endpoint=127.0.0.1:{forked.free_port()}",
        ]
        machines = [
            subprocess.Popen(command, cwd=tmp_path, env=running.environment()) for _ in range(2)
        ]
        assert max(machine.wait(120) for machine in machines) < 2  # 1: the doctor warns
    assert len(running.losses(tmp_path / "outputs" / "a")) == 4
