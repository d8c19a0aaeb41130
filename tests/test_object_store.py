"""Checkpoints in an object store: a real S3 protocol, served on this machine."""

import shutil

import pytest

from armature.checkpoint import directory, resume, state
from tests.running import losses, summary

pytest.importorskip("s3fs", reason="s3fs is not installed (pip install s3fs)")
server = pytest.importorskip(
    "moto.server", reason="moto[server] is not installed (pip install 'moto[server]')"
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store():
    """The environment that reaches the bucket `runs`."""
    import s3fs

    service = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    service.start()
    host, port = service.get_host_and_port()
    address = f"http://{host}:{port}"
    environment = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_ENDPOINT_URL": address,
    }
    s3fs.S3FileSystem(key="x", secret="x", endpoint_url=address).mkdir("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment
    service.stop()


def test_a_run_goes_on_from_a_bucket_when_its_machine_is_gone(store, train, tmp_path):
    args = [
        "checkpoint.root=s3://runs/lab",
        "checkpoint.every_n_steps=2",
        "run.name=a",
        "scheduler=constant",
    ]
    args += ["checkpoint.keep_best=0"]
    train(*args, "trainer.max_steps=4", **store)
    there = resume.to_path("s3://runs/lab/a")
    assert sorted(path.name for path in there.iterdir()) == ["last", "step=000002", "step=000004"]
    assert directory.checksum_problem(there / "step=000004") is None
    assert not (tmp_path / "outputs" / "a" / "checkpoints").exists()

    shutil.rmtree(tmp_path / "outputs" / "a")  # another machine
    (there / "step=000004" / "meta.pt").write_bytes(b"cut short")
    done = train(*args, "resume=required", **store)
    assert "step=000004 is skipped: meta.pt has 9 bytes" in done.stderr
    assert "step=000002, step 2" in done.stderr
    assert summary(tmp_path / "outputs" / "a")["global_step"] == 6
    assert len(losses(tmp_path / "outputs" / "a")) == 5  # the checkpoint carries its own row
    weights = state.load_full_state_dict("s3://runs/lab/a/step=000006")
    assert state.read_whole(there / "step=000006")["state_dict"].keys() == weights.keys()


def test_two_ranks_write_to_a_bucket_and_one_goes_on(store, train):
    args = ["checkpoint.root=s3://runs/two", "run.name=a", "checkpoint.every_n_steps=3"]
    train(*args, "strategy=fsdp", "checkpoint.background=true", ranks=2, **store)
    assert directory.problem(resume.to_path("s3://runs/two/a/step=000006")) is None
    done = train(*args, "trainer.max_steps=8", **store)
    assert "resuming from s3://runs/two/a/step=000006" in done.stderr
