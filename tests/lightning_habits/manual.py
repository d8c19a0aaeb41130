"""Manual optimization and several optimizers, as on Lightning's pages about them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from tests.lightning_habits.regression import Manual, Regressor


class Frequencies(Manual):
    """The head is stepped with every batch, the body with every third, each with a schedule of its
    own.
    """

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        body_schedule, head_schedule = self.lr_schedulers()
        loss = self.shared_step(batch, "train")
        self.manual_backward(loss)
        head.step()
        head.zero_grad()
        head_schedule.step()
        if (batch_idx + 1) % 3 == 0:
            body.step()
            body.zero_grad()
        if self.trainer.is_last_batch:
            body_schedule.step(self.trainer.callback_metrics.get("val/loss", torch.tensor(1.0)))

    def configure_optimizers(self):
        body = torch.optim.SGD(self.net[0].parameters(), lr=0.05, momentum=0.9)
        head = torch.optim.Adam(self.net[2].parameters(), lr=0.01)
        plateau = lr_scheduler.ReduceLROnPlateau(body, patience=0, mode="max")
        return (
            {"optimizer": body, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}},
            {"optimizer": head, "lr_scheduler": lr_scheduler.ExponentialLR(head, 0.97)},
        )


class Frequency(Frequencies):
    """Lightning 1's `frequency` beside the optimizer, which Lightning 2 leaves to the module."""

    def configure_optimizers(self):
        one, two = super().configure_optimizers()
        return ({**one, "frequency": 3}, {**two, "frequency": 1})


class Toggles(Manual):
    """`toggle_model` of Lightning's optimizers."""

    def training_step(self, batch, batch_idx):
        for opt in self.optimizers():
            with opt.toggle_model():
                loss = self.shared_step(batch, "train")
                opt.zero_grad()
                self.manual_backward(loss)
                opt.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.net[0].parameters(), lr=0.05),
            torch.optim.SGD(self.net[2].parameters(), lr=0.05, momentum=0.9),
        ]


class TogglesByContext(Toggles):
    """`self.toggled_optimizer`, a context manager."""

    def training_step(self, batch, batch_idx):
        for opt in self.optimizers():
            with self.toggled_optimizer(opt):
                loss = self.shared_step(batch, "train")
                opt.zero_grad()
                self.manual_backward(loss)
                opt.step()


class SyncsLate(Manual):
    """Accumulates two batches, and reduces gradients with the second alone."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        steps = (batch_idx + 1) % 2 == 0
        with opt.toggle_model(sync_grad=steps):
            self.manual_backward(self.shared_step(batch, "train") / 2)
            if steps:
                opt.step()
                opt.zero_grad()


class BackwardTwice(Manual):
    """Two backward passes through one graph."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        x, y = batch
        out = self(x)
        self.manual_backward(F.mse_loss(out, y), retain_graph=True)
        self.manual_backward(0.1 * out.square().mean())
        opt.step()


class PlainOptimizers(Manual):
    """`optimizers(use_pl_optimizer=False)` and loss.backward(): steps that Lightning does not
    see.
    """

    def training_step(self, batch, batch_idx):
        opt = self.optimizers(use_pl_optimizer=False)
        opt.zero_grad(set_to_none=False)
        loss = self.shared_step(batch, "train")
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        opt.step()
        return loss


class NoOptimizer(Regressor):
    """configure_optimizers returns None: statistics are collected, nothing is trained."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("mean", torch.zeros(8))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        self.mean.lerp_(self.all_gather(x.mean(0)).reshape(-1, 8).mean(0), 0.1)
        self.log("mean", self.mean.mean())

    def configure_optimizers(self):
        return None


class NoneAutomatic(Regressor):
    """configure_optimizers returns None with automatic optimization: gradients, but no steps."""

    def configure_optimizers(self):
        return None


class ByProperty(Manual):
    """`automatic_optimization` as a property of the class, as older code has it."""

    def __init__(self):
        Regressor.__init__(self)

    @property
    def automatic_optimization(self) -> bool:
        return False


class ManualInSetup(Manual):
    """Decided in `setup`, after the run was built for automatic optimization."""

    def __init__(self):
        Regressor.__init__(self)

    def setup(self, stage):
        self.automatic_optimization = False


class AutomaticLate(Manual):
    """Decided in configure_optimizers, for automatic optimization."""

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def configure_optimizers(self):
        self.automatic_optimization = True
        return self.sgd()


class ManualInTraining(Regressor):
    """Changed between two epochs."""

    def on_train_epoch_end(self):
        self.automatic_optimization = False


class LossPerSample(Manual):
    """Returns what it computed: not one number."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            return F.mse_loss(self(batch[0]), batch[1], reduction="none").squeeze(1)


class OwnBackward(Regressor):
    """A loss per output, whose sum `backward` takes."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return torch.stack([loss, 0.1 * self.net[0].weight.square().mean()])

    def backward(self, loss):
        loss.sum().backward()


class LossByData(Manual):
    """Some batches of some ranks return no loss."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        loss = self.shared_step(batch, "train")
        self.manual_backward(loss)
        opt.step()
        return loss if float(batch[0].mean()) > 0 else None


class ManualBF16(Manual):
    """An additional autocast by hand."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt = self.optimizers()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = F.mse_loss(self(x), y)
        self.manual_backward(loss)
        opt.step()


class Multitask(Manual):
    """Gradients of two losses, combined by hand: conflicting ones are projected (PCGrad)."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = batch
        out = self(x)
        losses = [F.mse_loss(out, y), F.l1_loss(out, -y)]
        opt.zero_grad()
        self.manual_backward(losses[0], retain_graph=True)
        first = [p.grad.clone() for p in self.parameters()]
        opt.zero_grad()
        self.manual_backward(losses[1])
        for p, one in zip(self.parameters(), first, strict=True):
            p.grad.mul_(0.3).add_(one)
        opt.step()
        self.log_dict({"first": losses[0], "second": losses[1]}, sync_dist=True)


class StepsAtTheEnd(Manual):
    """Gradients of a whole epoch, one step in on_train_epoch_end."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.shared_step(batch, "train") / self.trainer.num_training_batches)

    def on_train_epoch_end(self):
        opt = self.optimizers()
        opt.step()
        opt.zero_grad()


class Actor(Manual):
    """Actor and critic: each is trained through the other, with frozen copies that follow
    slowly.
    """

    def __init__(self):
        super().__init__()
        self.net = None
        self.actor, self.critic = nn.Linear(8, 2), nn.Linear(10, 1)
        self.target = nn.Linear(10, 1).requires_grad_(False)
        self.target.load_state_dict(self.critic.state_dict())

    def training_step(self, batch, batch_idx):
        x, y = batch
        actor, critic = self.optimizers()
        action = torch.tanh(self.actor(x))
        with torch.no_grad():
            wanted = y + 0.9 * self.target(torch.cat([x, action], dim=1))
        critic_loss = F.mse_loss(self.critic(torch.cat([x, action.detach()], dim=1)), wanted)
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        if batch_idx % 2 == 0:
            self.critic.requires_grad_(False)
            loss = -self.critic(torch.cat([x, torch.tanh(self.actor(x))], dim=1)).mean()
            actor.zero_grad()
            self.manual_backward(loss)
            actor.step()
            self.critic.requires_grad_(True)
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                slow.data.mul_(0.9)
                slow.data.add_(0.1 * fast.data)
        self.log("critic", critic_loss, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        action = torch.tanh(self.actor(x))
        self.log("val/value", self.critic(torch.cat([x, action], dim=1)).mean(), sync_dist=True)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.actor.parameters(), lr=1e-2),
            torch.optim.Adam(self.critic.parameters(), lr=1e-2),
        )


class GradByHand(Regressor):
    """Gradients by torch.autograd.grad, which are put into place by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        params = [*self.net.parameters()]
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g
        self.optimizers().step()


class GradOfWeights(GradByHand):
    """The same, with the weights taken before the forward."""

    def training_step(self, batch, batch_idx):
        params = [*self.net.parameters()]
        loss = F.mse_loss(self(batch[0]), batch[1])
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g
        self.optimizers().step()
