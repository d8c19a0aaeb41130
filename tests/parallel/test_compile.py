"""Blocks are compiled once for training and once for evaluation, and the next run reuses the
compiled code.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from armature.models.decoder.generation import complete
from armature.models.decoder.model import Decoder
from armature.parallel import blocks
from tests import running
from tests.support.parity.harness import Job, _fit, mesh, on_ranks

# torch's own tracing reads .grad of tensors that are not leaves, and causes this warning
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
SMALL = {"vocab_size": 97, "context": 16, "width": 32, "layers": 6, "heads": 4}


def graphs() -> int:
    """Return how many graphs have been compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def without_inductor() -> Callable[..., Any]:
    """Return a torch.compile that traces as usual, but runs the graphs without compiling them."""

    def compiled(function: Callable[..., Any], *, mode: str) -> Callable[..., Any]:
        return make(function, backend="eager")

    make = torch.compile
    return compiled


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], int]]:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", without_inductor())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = graphs()
    yield lambda: graphs() - before
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_share_of_the_memory_recomputes_more_and_changes_nothing(monkeypatch):
    partitioned = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", lambda forward, mode: partitioned(forward))
    ids, kept, losses = torch.arange(2 * 17).view(2, 17), [], []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1] += tensor.nbytes
        return tensor

    for mode in ("none", 0.5, 0.1):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Decoder(**SMALL)
        blocks.checkpoint_activations(model.blocks.values(), mode=mode)
        blocks.compile_forward(model.blocks.values())
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
        losses.append((loss.item(), norm.item()))
    torch._dynamo.reset()
    blocks.checkpoint_activations([], mode="none")
    assert kept == sorted({*kept}, reverse=True), kept
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-6)] * 2


def train(model: Decoder, batch: int) -> None:
    ids = torch.randint(0, 97, (batch, 17))
    model.train()(ids[:, :-1], ids[:, 1:]).backward()


def evaluate(model: Decoder, batch: int) -> None:
    ids = torch.randint(0, 97, (batch, 17))
    with torch.no_grad():
        model.eval()(ids[:, :-1], ids[:, 1:])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "every"])
def test_all_blocks_share_a_graph_for_training_and_one_for_evaluation(count, mode):
    model = Decoder(**SMALL, dropout=0.1)
    blocks.checkpoint_activations(model.blocks.values(), mode=mode)
    blocks.compile_forward(model.blocks.values())
    train(model, 8)
    assert count() == 1
    evaluate(model, 32)
    for _ in range(3):
        for _ in range(2):  # micro-batches
            train(model, 8)
        for batch in (32, 32, 5):  # the last batch of an evaluation may be smaller
            evaluate(model, batch)
    assert count() == 2


@pytest.mark.slow
def test_generation_compiles_nothing(count):
    model = Decoder(**SMALL)
    blocks.compile_forward(model.blocks.values())
    complete(model, [[0, 0, 0]], max_new_tokens=20)
    assert count() == 0
    train(model, 8)
    assert count() == 1


def compiled_in_a_fit(job: Job) -> int:
    torch.compile = without_inductor()
    _fit(job)
    return graphs()


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [Job("SingleDevice"), Job("DDP", ranks=2), mesh(2, shard=2), mesh(2, pipe=2)],
    ids=["single", "ddp", "fsdp", "pipeline"],
)
def test_a_fit_compiles_twice_however_long_it_is(job):
    job = replace(job, options={**job.options, "compile": "block"}, validate=True)
    graphs = 2 + (job.ranks == 1)  # Lightning's test is in inference mode, but not with gloo
    assert on_ranks(compiled_in_a_fit, job, ranks=job.ranks) == [graphs] * job.ranks


def test_compiled_code_is_kept_beside_corpora_unless_the_user_names_a_folder(tmp_path, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path))
    for before, after in ((default_cache_dir(), str(tmp_path / "inductor")), ("/mine", "/mine")):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        blocks.set_compile_cache_dir()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == after


@pytest.mark.slow
def test_the_next_run_compiles_nothing_again(tmp_path):
    def train(name: str) -> None:  # the example has few kernels
        script = [
            sys.executable,
            str(running.ROOT / "train.py"),
            "experiment=example",
            "trainer.max_epochs=1",
        ]
        env = running.environment(ARMATURE_CACHE=str(tmp_path / "cache"))
        words = [*script, "strategy.compile=block", f"run.name={name}"]
        result = running.run(words, cwd=tmp_path, env=env, fork=False)
        assert result.returncode == 0, result.stderr[-6000:]

    train("cold")
    kept = sorted((tmp_path / "cache" / "inductor").rglob("*"))
    assert any(path.suffix == ".so" for path in kept)
    train("warm")
    assert sorted((tmp_path / "cache" / "inductor").rglob("*")) == kept
    assert running.losses(tmp_path / "outputs" / "warm") == running.losses(
        tmp_path / "outputs" / "cold"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_forward_keeps_its_signature():
    module = nn.Linear(2, 2)
    blocks.compile_forward([module])
    assert list(inspect.signature(module.forward).parameters) == ["input"]
