"""Programs that scripts/convert.py writes: they compute what the model computes, for any number of
samples.
"""

import importlib.util
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from armature.checkpoint import convert
from armature.errors import ConfigError
from armature.models.decoder.model import Decoder
from armature.models.vit.model import VisionTransformer
from tests import in_process
from tests.sampled import sampled


class Module(L.LightningModule):
    """Of a model that has the outputs; a module without a forward of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()


def images() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 5)]
    return nn.Sequential(*layers), torch.randn(2, 3, 8, 8)


def patches() -> tuple[nn.Module, torch.Tensor]:
    model = VisionTransformer(
        image_size=8, patch_size=4, channels=1, width=16, layers=1, heads=2, classes=10
    )
    return model, torch.randn(2, 1, 8, 8)


def tokens() -> tuple[nn.Module, torch.Tensor]:
    model = Decoder(vocab_size=97, context=16, width=32, layers=2, heads=4)
    return model, torch.arange(32).view(2, 16)


@pytest.mark.parametrize("make", sampled([tokens, images, patches], 1, guarantee=True))
def test_an_onnx_file_computes_the_models_outputs(make, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    torch.manual_seed(0)
    model, example = make()
    convert.to_program(Module(model), tmp_path / "a.onnx", example)
    onnx.checker.check_model(str(tmp_path / "a.onnx"), full_check=True)
    program = ReferenceEvaluator(str(tmp_path / "a.onnx"))
    for inputs in (example, torch.cat([example, example, example[:1]]).flip(0)):
        (outputs,) = program.run(None, {program.input_names[0]: inputs.numpy()})
        torch.testing.assert_close(
            torch.from_numpy(outputs), model(inputs).detach(), rtol=1e-4, atol=1e-5
        )


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"a.onnx: writing ONNX needs onnx and onnxscript: type make setup EXTRAS=ex",
    ):
        convert.to_program(Module(nn.Linear(1, 1)), tmp_path / "a.onnx", torch.ones(2, 1))


def test_a_recurrent_model_exports_without_a_warning(tmp_path):
    model = nn.GRU(4, 8, batch_first=True)
    convert.to_program(Module(model), tmp_path / "a.pt2", example := torch.randn(2, 3, 4))
    outputs, _ = torch.export.load(tmp_path / "a.pt2").module()(example)
    torch.testing.assert_close(outputs, model(example)[0])


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("3x5", r"--input 3x5: the model does not compute such a batch \(RuntimeError: mat1"),
        (
            "99999999999999999999x2",
            r"--input 99999999999999999999x2: 2e\+20 numbers. Type sizes of at most",
        ),
    ],
)
def test_an_input_that_the_model_does_not_take_is_refused_before_the_export(typed, answer):
    script, module = in_process.load("convert"), Module(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=answer):
        script.example_input(SimpleNamespace(input=typed), None, module)
