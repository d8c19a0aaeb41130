"""Training on a GPU gives what training on a CPU gives: `make test-gpu`.

`ARMATURE_GPU_TESTS_ON=cpu python -m pytest tests/gpu` runs the same tests where there is no GPU.
"""

import os
import re

import pytest

from tests import running
from tests.gpu.on_gpu import ACCELERATOR, COMMON, needs

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs(1)]
TRAIN = ("run.name=other", *COMMON, f"trainer.accelerator={ACCELERATOR}")


@needs(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_two_devices_train_as_one_cpu_does(reference, tmp_path, strategy):
    losses, source = reference
    words = (f"strategy={strategy}", "trainer.devices=2", "trainer.precision=bf16-mixed")
    running.train(*TRAIN, *words, cwd=tmp_path, corpus=source)
    assert running.losses(tmp_path / "outputs" / "other") == pytest.approx(losses, rel=2e-2)


WITHIN = (
    "model.document_token=0",
    "+model.qk_norm=true",
    "data.context=300",
    "data.source.vocab_size=300",
)  # three blocks a window


@pytest.fixture(scope="module")
def within_documents(tmp_path_factory):
    """Losses on a CPU, through a dense mask, where attention keeps within documents; and where they
    were made.
    """
    folder = tmp_path_factory.mktemp("within")
    source = running.write_corpus(folder / "corpus", files=40)
    running.train("run.name=cpu", *COMMON, *WITHIN, cwd=folder, corpus=source)
    return running.losses(folder / "outputs" / "cpu"), source


@pytest.mark.parametrize("compiled", ["none", "block"])
@pytest.mark.parametrize("recomputation", ["none", "selective"])
def test_attention_that_skips_blocks_trains_as_the_dense_mask(
    within_documents, tmp_path, compiled, recomputation
):
    losses, source = within_documents
    options = (f"strategy.compile={compiled}", f"strategy.activation_checkpointing={recomputation}")
    words = (*WITHIN, "trainer.precision=bf16-mixed", *options)
    running.train(*TRAIN, *words, cwd=tmp_path, corpus=source)
    assert running.losses(tmp_path / "outputs" / "other") == pytest.approx(losses, rel=2e-2)


def test_a_checkpoint_goes_on_on_a_cpu(reference, tmp_path):
    losses, source = reference
    running.train(*TRAIN, "trainer.max_steps=3", cwd=tmp_path, corpus=source)
    running.train("run.name=other", *COMMON, cwd=tmp_path, corpus=source)
    assert running.losses(tmp_path / "outputs" / "other") == pytest.approx(losses, rel=1e-3)


def test_the_benchmark_runs_compiled_in_bf16(reference, tmp_path):
    """`make bench`, on a GPU."""
    _, source = reference
    path = os.pathsep.join(filter(None, [str(running.ROOT), os.environ.get("PYTHONPATH")]))
    done = running.python(
        "-m",
        "benchmarks",
        *running.TINY,
        f"data.path={source}",
        f"trainer.accelerator={ACCELERATOR}",
        "trainer.precision=bf16-mixed",
        "strategy.compile=block",
        "--only",
        "bare",
        "--rounds",
        "1",
        "--seconds",
        "0.05",
        cwd=tmp_path,
        PYTHONPATH=path,
    )
    row = re.search(
        r"^\| a bare PyTorch loop .* (\d+) MiB \| (\d+) MiB \|$", done.stdout, re.MULTILINE
    )
    assert row, done.stdout
    assert min(map(int, row.groups())) > 1
    assert "precision (bf16-mixed)" in done.stdout
