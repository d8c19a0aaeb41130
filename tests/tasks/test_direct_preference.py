"""DPO: the loss and its gradients against the formula, and the reference."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from armature.errors import ConfigError
from armature.finetune.lora import Lora
from armature.models.adapters import is_adapter
from armature.models.loss import IGNORED
from armature.models.wrapped import WrappedModel
from armature.parallel.initialization import initialize_by_name, materialize
from armature.tasks.direct_preference import DirectPreference
from tests.data.chat_parts import folder
from tests.tasks.preference_runs import data_of, task_of, write_pairs

ADAPTER = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("preferences")
    folder(path / "tokenizer")
    write_pairs(path / "pairs.jsonl")
    return str(path)


def ready(**settings):
    """Return a task whose model is initialized, as a strategy does."""
    task = task_of(**settings)
    task.configure_model()
    materialize(task.model, device=torch.device("cpu"))
    initialize_by_name(task.model, seed=0)
    return task


def moved(task):
    """Change all weights that are trained."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in task.model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return task


def batch_of(pairs: str) -> dict[str, torch.Tensor]:
    return data_of(pairs)._dataset("train").batch([0, 3, 5])


def naive(model, batch) -> torch.Tensor:
    """Each answer's log-probability, from all the logits, one answer at a time."""
    found = []
    for pair_inputs, pair_targets in zip(batch["inputs"], batch["targets"], strict=True):
        for inputs, targets in zip(pair_inputs, pair_targets, strict=True):
            log_p = model(inputs[None])[0].double().log_softmax(dim=-1)
            found.append(
                sum(
                    log_p[t, target]
                    for t, target in enumerate(targets.tolist())
                    if target != IGNORED
                )
            )
    return torch.stack(found).view(-1, 2)


def naive_loss(
    ratios: torch.Tensor,
    counts: torch.Tensor,
    *,
    beta,
    loss="sigmoid",
    label_smoothing=0.0,
    normalized=False,
):
    if normalized:
        ratios = ratios / counts
    margin = ratios[:, 0] - ratios[:, 1]
    if loss == "ipo":
        return ((margin - 0.5 / beta) ** 2).mean()
    right, wrong = (1 / (1 + torch.exp(-sign * beta * margin)) for sign in (1, -1))
    return (-(1 - label_smoothing) * right.log() - label_smoothing * wrong.log()).mean()


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1}, {"beta": 0.5, "label_smoothing": 0.2}, {"beta": 0.3, "loss": "ipo"},
        {"beta": 2.0, "length_normalized": True},
    ],
    ids=str,
)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_formula(pairs, settings):
    task, batch = ready(adapter=ADAPTER, **settings), batch_of(pairs)
    reference = naive(task.model, batch).detach()
    moved(task)
    losses, columns = task.compare(batch)
    losses.mean().backward()
    trained = [param for param in task.model.parameters() if param.requires_grad]
    gradients = [param.grad.clone() for param in trained]
    task.model.zero_grad()
    policy = naive(task.model, batch)
    counts = (batch["targets"] != IGNORED).sum(-1)
    options = {key: value for key, value in settings.items() if key != "length_normalized"}
    expected = naive_loss(
        policy - reference,
        counts,
        **options,
        normalized=settings.get("length_normalized", False),
    )
    expected.backward()
    assert losses.mean().item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-5)
    ours, formula = (
        torch.cat([each.flatten() for each in found])
        for found in (gradients, [param.grad for param in trained])
    )
    assert (ours - formula).norm() < 1e-5 * formula.norm()
    torch.testing.assert_close(
        columns["chosen_logp"], policy[:, 0].detach().float(), rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(
        columns["reward_margin"],
        columns["chosen_reward"] - columns["rejected_reward"],
        rtol=1e-5,
        atol=1e-6,
    )


def test_without_its_adapters_the_model_is_the_reference_and_nothing_remembers_it(pairs):
    task, batch = ready(adapter={**ADAPTER, "dropout": 0.5}), batch_of(pairs)
    before = copy.deepcopy(task.model)
    reference = naive(before.eval(), batch).float()
    moved(task)
    for _ in range(2):
        torch.testing.assert_close(
            task.reference_of(batch).sum(-1), reference.detach(), rtol=1e-5, atol=1e-4
        )
    task.training_step(batch, 0).backward()
    assert {name for name, param in task.model.named_parameters() if param.grad is not None} == {
        name for name, _ in task.model.named_parameters() if is_adapter(name)
    }


def test_padding_in_evaluation_does_not_count(pairs):
    task, batch = ready(adapter=ADAPTER), batch_of(pairs)
    moved(task)
    whole, padded = task.metrics(), task.metrics()
    task.update(whole, {name: value[:2] for name, value in batch.items()})
    batch["targets"][2] = IGNORED
    task.update(padded, batch)
    for name, metric in whole.items():
        assert float(metric.compute()) == pytest.approx(float(padded[name].compute()), rel=1e-5)


def test_a_task_without_its_reference_is_refused():
    task = ready(adapter=ADAPTER)
    task.trainer = SimpleNamespace(
        callbacks=[], strategy=SimpleNamespace(initial_weights="step=000003")
    )
    with pytest.raises(ConfigError, match="Export that run"):
        task.on_train_start()


class Dropping(WrappedModel):
    """A model of another library, whose dropout is of its config.json: in a module, and as a
    rate.
    """

    def __init__(self):
        super().__init__(
            "folder",
            nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)]), "drop": nn.Dropout(0.5)}),
        )
        self.inner.attention_dropout = 0.5

    def forward(self, x):
        x = self.inner.drop(self.inner.blocks[0](x))
        return nn.functional.dropout(x, self.inner.attention_dropout, self.training)


def test_dropout_of_a_folders_config_is_off_as_in_the_reference():
    task = DirectPreference(Dropping, optimizer=torch.optim.SGD, adapter=Lora(rank=2, dropout=0.25))
    task.configure_model()
    model, x = task.eval().train().model.float(), torch.ones(64, 4)
    materialize(model, device=torch.device("cpu"))
    initialize_by_name(model, seed=0)
    assert torch.equal(model(x), model(x))
    with torch.no_grad():
        model.inner.blocks[0].lora_B.fill_(1.0)
    assert not torch.equal(model(x), model(x))
    task.eval()
    assert torch.equal(model(x), model(x))
