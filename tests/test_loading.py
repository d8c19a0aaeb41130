"""A trained module from Python: armature.load, load_from_checkpoint, scripts/convert.py."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import armature
from armature.errors import ConfigError
from armature.loading import weights_note
from armature.tasks.base import Task
from armature.tasks.image_classification import ImageClassification
from armature.tasks.language_modeling import LanguageModeling
from scripts import convert as script
from tests import running

pytestmark = pytest.mark.slow
MODEL_CHECKPOINT = (
    f"+callbacks.mine={{_target_:{ModelCheckpoint.__module__}.ModelCheckpoint,"
    "every_n_train_steps:2}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """A run of three steps, with a ModelCheckpoint of the user's own beside ours."""
    folder = tmp_path_factory.mktemp("loading")
    words = ("trainer.max_steps=3", "run.name=a", "callbacks=ema", MODEL_CHECKPOINT)
    running.train(*words, cwd=folder, corpus=corpus)
    return folder / "outputs" / "a"


def file_of(run: Path) -> Path:
    (file,) = run.rglob("*.ckpt")
    return file


@pytest.mark.guarantee
def test_a_run_is_loaded_in_a_line(run):
    module = armature.load(run)
    assert isinstance(module, LanguageModeling)
    assert not module.training
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    for path in (run / "checkpoints" / "step=000003", str(run)):
        same = Task.load_from_checkpoint(path)
        torch.testing.assert_close(same.state_dict(), module.state_dict(), rtol=0, atol=0)
    with pytest.raises(
        ConfigError,
        match=r"holds a armature.tasks.language_modeling.LanguageModeling, not a armature",
    ):
        ImageClassification.load_from_checkpoint(run)
    with pytest.raises(ConfigError, match="no such path"):
        armature.load(run.with_name("nothing"))


def test_a_users_checkpoints_lie_beside_ours(run):
    assert (run / "checkpoints" / "last").read_text() == "step=000003\n"
    early = armature.load(file_of(run))
    assert not torch.equal(early.model.embed.weight, armature.load(run).model.embed.weight)


@pytest.mark.guarantee
def test_a_run_becomes_a_file_of_lightnings(run, tmp_path, capsys):
    def convert_to(name: str, **options) -> Path:
        given = {"source": run, "target": tmp_path / name, "overrides": []}
        script.run(
            Namespace(**given | dict.fromkeys(("average", "best", "trust"), False) | options)
        )
        return tmp_path / name

    found = torch.load(convert_to("a.ckpt"), weights_only=True)
    assert (
        "also holds averaged weights (callbacks=ema): --average writes those"
        in capsys.readouterr().out
    )
    module = armature.load(run, overrides=["callbacks.ema.evaluate=false"])
    weights, (optimizer,) = found["state_dict"], found["optimizer_states"]
    torch.testing.assert_close(weights, dict(module.state_dict()), rtol=0, atol=0)
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    assert numbers == list(range(len(optimizer["state"])))
    assert {"lr_schedulers", "callbacks", "pytorch-lightning_version"} <= found.keys()
    # no state of a loader, which Lightning's own have no place for
    assert not found["loops"]["fit_loop"]["state_dict"]
    average = torch.load(convert_to("b.ckpt", average=True), weights_only=True)["state_dict"]
    assert average.keys() == weights.keys()
    assert not torch.equal(average["model.embed.weight"], weights["model.embed.weight"])
    assert not capsys.readouterr().out.startswith(str(run))
    measured = armature.load(run)  # as in validation
    torch.testing.assert_close(average, dict(measured.state_dict()), rtol=0, atol=0)
    assert (weights_note(measured), weights_note(module)) == (" (averaged weights)", "")
    with pytest.raises(ConfigError, match="one of the two must be a run"):
        script.run(Namespace(source=tmp_path / "a.ckpt", target=tmp_path / "c.ckpt"))
    with pytest.raises(ConfigError, match=r"data.seed=1 would change nothing"):
        convert_to("c.ckpt", overrides=["data.seed=1"])
    with pytest.raises(ConfigError, match=r"c.onnx: torch writes programs, .*armature.load"):
        convert_to("c.onnx")
    with pytest.raises(ConfigError, match=r"--average, --best would change nothing"):
        convert_to("c", source=tmp_path / "a.ckpt", average=True, best=True)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11 to itself
@pytest.mark.guarantee
def test_a_loaded_model_becomes_a_program(run, tmp_path):
    model, any_size = armature.load(run).model, {0: torch.export.Dim.AUTO}
    inputs, other = torch.zeros(2, 16, dtype=torch.int64), torch.arange(16).expand(5, -1)
    program = torch.export.export(model, (inputs,), dynamic_shapes=(any_size,))
    torch.export.save(program, tmp_path / "a.pt2")
    expected = model(other)
    torch.testing.assert_close(torch.export.load(tmp_path / "a.pt2").module()(other), expected)
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    onnx = torch.onnx.export(model, (inputs,), dynamic_shapes=(any_size,), dynamo=True)
    onnx.save(tmp_path / "a.onnx")
    evaluator = ReferenceEvaluator(str(tmp_path / "a.onnx"))
    (found,) = evaluator.run(None, {evaluator.input_names[0]: other.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.guarantee
def test_training_starts_with_the_weights_of_a_file(run, train, tmp_path):
    words = ("trainer.max_steps=1", "run.name=b", f"resume={file_of(run)}", "optimizer.lr=1e-12")
    done = train(*words)
    assert "step 1" in done.stdout + done.stderr
    there, here = armature.load(file_of(run)), armature.load(tmp_path / "outputs" / "b")
    torch.testing.assert_close(there.state_dict(), here.state_dict(), rtol=0, atol=1e-6)
    torch.save({"state_dict": {}, "hyper_parameters": len}, tmp_path / "code.ckpt")
    words = ("trainer.max_steps=1", "run.name=c", f"resume={tmp_path / 'code.ckpt'}")
    refused = train(*words, code=2)
    assert "holds more than tensors and plain values" in refused.stderr
    assert "Traceback" not in refused.stderr
