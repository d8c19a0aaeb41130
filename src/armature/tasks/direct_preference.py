"""Direct preference optimization: of two answers to a prompt, the chosen one becomes likelier than
the rejected one.
"""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from armature.errors import ConfigError
from armature.finetune.lora import LoraLinear, without_adapters
from armature.models.decoder.loss import computes_loss
from armature.models.decoder.model import Decoder
from armature.models.loss import IGNORED, token_losses
from armature.tasks.base import Batch, WeightedMean, inputs_and_targets
from armature.tasks.language_modeling import LanguageModeling
from armature.training.step_log import StepLog
from armature.training.timings import Window


class DirectPreference(LanguageModeling):
    """Trains on pairs of answers with the loss of DPO (arXiv:2305.18290, equation 7).

    The loss is -log sigmoid(m), where m is the reward of the chosen answer less that of the
    rejected one, and an answer's reward is beta × (its log-probability - its log-probability under
    the reference). The reference is the model without its adapters; if all weights are trained, a
    frozen copy of the folder's model. It takes one more forward pass of each step. The loss is a
    mean over pairs, so it begins at ln 2 = 0.6931 in any layout.

    Logs, per pair: loss, `reward_accuracy` (share of pairs with m > 0), `reward_margin` (m), both
    rewards, and the log-probabilities of both answers, in nats per answer.

    Args:
        model, preview_tokens, task: as of `LanguageModeling`.
        beta: how strongly the model is held to the reference.
        loss: "sigmoid", or "ipo", which is (m / beta - 1 / (2 beta))² (arXiv:2310.12036, equation
            17).
        label_smoothing: the share of pairs whose order is taken to be wrong (conservative DPO);
            with sigmoid only.
        length_normalized: rewards are divided by the number of tokens of the answer.
    """

    reads = "pairs"  # read from the source before launch
    mean_over_targets = False  # but over pairs, of which all micro-batches have as many
    unsupported_strategies: ClassVar[dict[str, str]] = {
        "pipeline": "a pipeline returns the mean loss of its rows, and not each answer's. Type "
        "strategy=fsdp",
        "deepspeed": "its losses have not been compared with one process's there. Type "
        "strategy=fsdp",
    }
    COLUMNS = (
        "reward_accuracy",
        "reward_margin",
        "chosen_reward",
        "rejected_reward",
        "chosen_logp",
        "rejected_logp",
    )
    metric_names = ("loss", *COLUMNS)
    mean_columns = frozenset(f"train/{name}" for name in COLUMNS)

    def __init__(
        self,
        model: Callable[[], nn.Module],
        *,
        beta: float = 0.1,
        loss: str = "sigmoid",
        label_smoothing: float = 0.0,
        length_normalized: bool = False,
        preview_tokens: int = 0,
        **task: Any,
    ) -> None:
        super().__init__(model, preview_tokens=preview_tokens, **task)
        self.beta, self.loss, self.label_smoothing = beta, loss, label_smoothing
        self.length_normalized = length_normalized
        self.reference: nn.Module | None = None  # None: the model without its adapters
        self._sums: list[Tensor] = []  # of this step's micro-batches: the columns' means

    @property
    def start_note(self) -> str:
        """What the line at the start of a run says of the reference."""
        kind = "the model without its adapters" if self.adapter else "a frozen copy of the model"
        return f"reference: {kind}, in each step"

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if self.adapter is None and self.reference is None:
            self.reference = self.new_model().requires_grad_(False)
        self.train()
        warnings.filterwarnings("ignore", "Found .* in eval mode")  # as `train` sets it

    @override
    def train(self, mode: bool = True) -> Self:
        """Let the model compute in training what it does in evaluation, as its reference does: only
        its adapters have dropout.
        """
        super().train(mode)
        for model in filter(None, (self.model, self.reference)):
            for module in model.modules():
                module.training = mode and isinstance(module, LoraLinear)
        return self

    # ------------------------------------------------------------ the loss
    def log_probabilities(self, batch: Batch, model: nn.Module | None = None) -> Tensor:
        """Return the log-probability of each target of both answers (B, 2, T), in nats; 0 where
        there is none.
        """
        model = model or self.model
        assert model is not None
        inputs, targets = inputs_and_targets(batch)
        inputs, targets = inputs.flatten(0, 1), targets.flatten(0, 1)
        if isinstance(model, Decoder) and computes_loss(model.head):
            losses = model(inputs, targets, reduction="none")  # without holding the logits
        else:
            losses = token_losses(model(inputs), targets)
        return -losses.view(-1, 2, losses.shape[-1])

    def compare(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return each pair's loss (B,), and by name the values (B,) that are logged beside it."""
        # first, before the activations that backward needs take memory
        reference = self.reference_of(batch)
        policy = self.log_probabilities(batch)
        # differences first: an answer's log-probability is a large number, and so its rounding
        ratio = (policy - reference).sum(dim=-1)
        if self.length_normalized:
            ratio = ratio / (batch["targets"] != IGNORED).sum(dim=-1).clamp(min=1)
        margin = ratio[:, 0] - ratio[:, 1]
        if self.loss == "ipo":
            losses = (margin - 1 / (2 * self.beta)).square()
        else:
            right, wrong = F.logsigmoid(self.beta * margin), F.logsigmoid(-self.beta * margin)
            losses = -(1 - self.label_smoothing) * right - self.label_smoothing * wrong
        rewards, logp = self.beta * ratio.detach(), policy.detach().sum(dim=-1)
        values = [
            (margin > 0).float(),
            rewards[:, 0] - rewards[:, 1],
            *rewards.unbind(1),
            *logp.unbind(1),
        ]
        return losses, dict(zip(self.COLUMNS, values, strict=True))

    def reference_of(self, batch: Batch) -> Tensor:
        """Return `log_probabilities` under the reference."""
        assert self.model is not None
        with torch.no_grad(), without_adapters(self.model):
            return self.log_probabilities(batch, self.reference)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses, columns = self.compare(batch)
        self._sums.append(torch.stack([column.mean() for column in columns.values()]))
        return losses.mean()

    @override
    def loss_of(self, batch: Batch) -> Tensor:
        return self.compare(batch)[0].mean()

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the answers' log-probabilities: columns of scripts/predict.py."""
        chosen, rejected = self.log_probabilities(batch).sum(dim=-1).unbind(1)
        return {"chosen_logp": chosen, "rejected_logp": rejected}

    # ------------------------------------------------------------ what is logged
    @override
    def metrics(self) -> dict[str, Metric]:
        return {name: WeightedMean() for name in ("loss", *self.COLUMNS)}

    @override
    def update(self, metrics: dict[str, Metric], batch: Batch) -> None:
        losses, columns = self.compare(batch)
        # padding has no targets
        counted = (batch["targets"] != IGNORED).flatten(1).any(1)
        for name, values in {"loss": losses, **columns}.items():
            metrics[name].update(values.where(counted, 0.0), weight=counted)

    @override
    def final_metrics(self, values: dict[str, float], split: str) -> dict[str, float]:
        return values

    def batch_ended(self, trainer: Any, *, stepped: bool) -> dict[str, Tensor]:
        """Return the step's columns of metrics.csv, of this rank: the step log takes their mean
        over the ranks.
        """
        if not stepped or not self._sums:
            return {}
        means, self._sums = torch.stack(self._sums).mean(dim=0), []
        return {f"train/{name}": mean for name, mean in zip(self.COLUMNS, means, strict=True)}

    def measured(self, trainer: Any, window: Window) -> dict[str, float]:
        """Return no timings: `batch_ended` has all columns."""
        return {}

    @override
    def on_train_epoch_start(self) -> None:
        self._sums = []  # an epoch may have been left within a step

    @override
    def on_train_start(self) -> None:
        callbacks = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        step_log = next((each for each in callbacks if isinstance(each, StepLog)), None)
        if step_log is not None and self not in step_log.monitors:
            step_log.monitors.append(self)
        if getattr(self.trainer.strategy, "initial_weights", None) is not None:
            raise ConfigError(
                "The run begins with the weights of a checkpoint, and the reference with those of "
                "model.pretrained. Export that run with scripts/convert.py, and name the folder in "
                "model.pretrained."
            )
