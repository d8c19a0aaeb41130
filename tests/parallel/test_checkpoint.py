import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from armature.checkpoint import convert, directory, storage
from armature.checkpoint import optimizers as optimizer_states
from armature.checkpoint import state as checkpoint
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import ConfigError
from armature.models.decoder.model import Decoder
from armature.parallel.initialization import initialize_by_name, materialize
from tests.support.parity.harness import on_ranks

MODEL = {"vocab_size": 32, "context": 8, "width": 16, "layers": 2, "heads": 2}


class Holder(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = Decoder(**{**MODEL, **changes})
        initialize_by_name(self, seed=0, names=materialize(self, device=torch.device("cpu")))


def stepped(
    module: nn.Module, *, steps: int = 1, make: Any = torch.optim.AdamW
) -> torch.optim.Optimizer:
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    optimizer = make(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
    )
    for _ in range(steps):
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


def save(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    names = checkpoint.parameter_names(module)
    tensors = checkpoint.module_state(module) | optimizer_states.by_weight(
        optimizer, names, index=0
    )
    groups = optimizer_states.param_groups(
        optimizer, optimizer_states.group_names(optimizer, names)
    )
    entry = {"param_groups": groups, optimizer_states.CLASS: optimizer_states.class_of(optimizer)}
    meta = {"global_step": 1, "optimizer_states": [entry]}
    CheckpointWriter().save(path, tensors, meta, **options)


def load(path: Path, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    meta = storage.read_meta(path)
    weights = checkpoint.read_weights(path, module)
    checkpoint.place_weights(path, module, weights)
    optimizer_states.load_optimizers(path, module, optimizers, saved=meta["optimizer_states"])
    return meta


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    module = Holder()
    save(tmp_path / "step=1", module, stepped(module))
    return tmp_path / "step=1"


def test_weights_state_and_groups_come_back_whatever_the_order_of_groups(saved):
    reference = Holder()
    before = stepped(reference)
    module = Holder()
    groups = [
        {
            "params": [p for p in reversed(list(module.parameters())) if p.ndim == 1],
            "weight_decay": 0.5,
        },
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5.0)
    meta = load(saved, module, [optimizer])
    assert meta["global_step"] == 1
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert all(group["lr"] == 1e-2 for group in optimizer.param_groups)
    for (name, param), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(optimizer.state[param], before.state[other], rtol=0, atol=0)


def test_another_models_checkpoint_is_refused_by_name(saved):
    with pytest.raises(ValueError, match=r"Not in the checkpoint: model\.blocks\.2\.attention"):
        load(saved, Holder(layers=3), [])
    with pytest.raises(ValueError, match=r"Not in the model: model\.blocks\.1\.attention"):
        load(saved, Holder(layers=1), [])
    with pytest.raises(ValueError, match=r"size mismatch for model\.embed\.weight"):
        load(saved, Holder(vocab_size=48), [])


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoint_becomes_one_file_and_a_checkpoint_again(saved, tmp_path):
    names = convert.to_safetensors(saved, tmp_path / "weights.safetensors")
    assert "blocks.0.attention.q.weight" in names
    convert.from_file(tmp_path / "weights.safetensors", tmp_path / "again")
    first, second = (checkpoint.load_full_state_dict(d) for d in (saved, tmp_path / "again"))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(ConfigError, match="no averaged weights"):
        convert.to_safetensors(saved, tmp_path / "average.safetensors", average=True)
    with pytest.raises(ConfigError, match="no checkpoint"):
        convert.to_safetensors(tmp_path / "nothing", tmp_path / "nothing.safetensors")


def _saves_other_forms(folder: str) -> list[Any]:
    """Save three times by a writer that keeps its plan, and return what each checkpoint holds."""
    from armature.parallel import process_group

    rank, writer = process_group.rank(), CheckpointWriter(keeps_plan=True, background=True)
    for step, size in ((1, 2), (2, 2), (3, 2 + rank)):  # rank 1's tensor changes its size
        tensors = {f"of_{rank}": torch.full((size,), float(step)), "shared": torch.ones(step)}
        writer.save(Path(folder) / f"step={step}", tensors | {"step": step}, {})
        for tensor in tensors.values():
            tensor.fill_(-1.0)  # training continues at once
    writer.finish()
    loaded = [checkpoint.load_full_state_dict(Path(folder) / f"step={n}") for n in (1, 2, 3)]
    return [{n: v.tolist() if n != "step" else v for n, v in each.items()} for each in loaded]


@pytest.mark.slow
def test_a_kept_plan_is_changed_where_tensors_are(tmp_path):
    for found in on_ranks(_saves_other_forms, str(tmp_path), ranks=2):
        assert found == [
            {"of_0": [n] * 2, "of_1": [n] * (3 if n == 3 else 2), "shared": [1] * n, "step": n}
            for n in (1, 2, 3)
        ]


def _fails_on_one_rank(folder: str) -> str:
    from armature.parallel import process_group

    directory.write_manifest = full_disk
    try:
        CheckpointWriter().save(Path(folder) / "step=1", {"x": torch.ones(3)}, {})
    except OSError as error:
        return f"{process_group.rank()}: {error}"
    return "saved"


@pytest.mark.slow
def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    messages = on_ranks(_fails_on_one_rank, str(tmp_path), ranks=2)
    said = "rank 0 failed: OSError: [Errno 28] No space left on device"
    assert messages == [f"0: {said}", f"1: {said}"]


def test_a_meta_model_that_cannot_initialize_itself_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'weight' was built on the meta device"):
        initialize_by_name(model, seed=0, names=materialize(model, device=torch.device("cpu")))


def test_tied_parameters_stay_one_when_they_get_memory():
    tied = Holder(tied=True).model
    assert tied.head.weight is tied.embed.weight
