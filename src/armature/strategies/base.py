"""The common part of all strategies, mixed in before one of Lightning's.

`class DDP(StrategyMixin, DDPStrategy)`.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from armature.checkpoint import huggingface, optimizers, state
from armature.errors import ConfigError
from armature.finetune import nf4
from armature.finetune.lora import Lora
from armature.models.adapters import is_adapter
from armature.optim.muon import Muon
from armature.parallel import (
    apply,
    batchnorm,
    blocks,
    gradients,
    initialization,
    process_group,
    randomness,
)
from armature.parallel.distributed_matrices import DistributedMatrices
from armature.parallel.targets import TargetWeights
from armature.parallel.whole_weights import whole
from armature.strategies import metric_objects
from armature.strategies.checkpoints import CheckpointMixin
from armature.strategies.gradients import GradientMixin
from armature.training.progress import feed_of


class StrategyMixin(GradientMixin, CheckpointMixin):
    """Build the model with initial weights by name, and give the trainer and callbacks typed
    access.

    Attributes:
        seed: decides the initial weights and the random streams.
        held: whether the checkpoint that is loaded afterwards holds the weight of a name. Models
            that name a Hugging Face folder get the others from it.
        draws_all: whether weights that it holds get initial values, too.
        imported: the parameters that come from such folders, by the name of their model.
        initial_weights: a checkpoint, or a .ckpt of Lightning's, whose weights training starts
            with, instead of the seed's.
        parameter_count: of the unsharded model, whatever part of it is on this rank; a weight of 4
            bits counts as one.
        trained_count: those of them that are trained.
        frozen_bytes: of the others, as far as checkpoints hold them.
        sync_batchnorm: whether BatchNorm reads the batches of all ranks.
        remedies: what to type after an error of torch's, by words of its message.
        replicates_weights: whether `replicated_weights` are the same on all ranks, and ordinary
            tensors.
        fetches_weights: whether weights may lie elsewhere than on the device that computes, until
            they are used.
        bubble_share: share of a step in which the pipeline's schedule leaves a rank idle; 0 without
            a pipeline.
    """

    sync_batchnorm: bool = False
    bubble_share: float = 0.0
    replicates_weights: bool = False
    fetches_weights: bool = False
    held: Callable[[str], bool] = staticmethod(lambda name: False)
    draws_all: bool = True
    remedies: ClassVar[dict[str, str]] = {}

    def configure_mixin(
        self,
        seed: int,
        activation_checkpointing: str | float,
        compile: str,
        compile_mode: str,
        float8: bool | str,
    ) -> None:
        """Called by constructors, after Lightning's own.

        Args:
            activation_checkpointing: none; every block; n, for every n-th; selective, which
                recomputes all but matrix products and attention; half, which recomputes every
                second matrix product, too; or the share of its memory that compiled code keeps.
            compile: none, block (each block on its own) or model (the whole).
            compile_mode: torch.compile's.
            float8: whether the blocks' matrix products run in float8; "emulate" computes the same
                results without it.
        """
        self.seed, self.sizes = seed, {}
        self.parameter_count = self.trained_count = self.frozen_bytes = 0
        self.activation_checkpointing, self.float8 = activation_checkpointing, float8
        self.compile, self.compile_mode = compile, compile_mode
        self.initial_weights: Path | None = None
        self.imported: dict[str, set[str]] = {}
        self.cluster_environment = process_group.RankEnvironment()
        self.grad_norm, self.target_weights, self.steps_made = None, TargetWeights(), Counter()
        self.random_state, self._extra_state = randomness.RankRandomState(), {}

    @classmethod
    def of(cls, trainer: L.Trainer) -> Self:
        """Return the trainer's strategy, or raise TypeError if it is not one of ours."""
        if not isinstance(trainer.strategy, cls):
            raise TypeError(
                f"strategy={type(trainer.strategy).__name__}: this needs a strategy of "
                "armature.strategies, such as strategy=ddp or strategy=fsdp."
            )
        return trainer.strategy

    def return_to_device(self) -> None:
        """Move the model to the device again, from which Lightning's teardown moves it to the
        CPU.
        """
        self.module.to(self.root_device)

    def join_group(self) -> None:
        """Join the process group if the worker has not: one rank.

        Lightning's own has none beside it for objects on a GPU, which votes and checkpoints need.
        """
        process_group.init(
            getattr(self, "process_group_backend", None) or "auto",
            self.root_device.type,
            alone=True,
            offloads=self.fetches_weights,
        )

    @override
    def barrier(self, name: str | None = None) -> None:
        process_group.barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        return process_group.broadcast_object(obj, source=src)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        feed = feed_of(self.lightning_module.trainer)  # pyright: ignore[reportOptionalMemberAccess]
        return dataloader if feed is None else feed.replace(dataloader)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # a model that is not initialized by name is built alike on every rank
        torch.manual_seed(self.seed)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        self.build_once()
        if self.world_size > 1:
            metric_objects.combine_from(self.sample_ranks, self.module)
        super().setup(trainer)
        fits, names = trainer.state.fn == TrainerFn.FITTING, state.parameter_names(self.module)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.matrix_work = self.matrices()
            if fits and isinstance(optimizer, Optimizer):  # DeepSpeed's are no Optimizer of torch's
                optimizers.check(optimizer, names, held=self.module.state_dict())
        for optimizer in () if self.saves_files else self.inner_optimizers():
            # Adafactor computes means over rows and columns of whole weights
            if optimizers.is_saved_whole(optimizer) or isinstance(optimizer, torch.optim.Adafactor):
                optimizers.refuse_parts(optimizer)
        self.built_groups = [*map(optimizers.settings, self.inner_optimizers())]
        if fits:
            self.random_state.begin(seed=self.seed, stream=self.rng_stream)
            # weights that `on_fit_start` or `on_train_start` draws are alike on every rank
            randomness.begin(seed=self.seed, stream=randomness.OF_ALL_RANKS)

    @override
    def build_once(self) -> None:
        if getattr(self.module, "_armature_built", False):
            return
        models = models_of(self.module)
        self.imported = {name: self._names_to_import(name, model) for name, model in models}
        self._name_imported(models)
        self._count()
        for part in self.module.modules():
            is_sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
            if is_sparse and part.weight.requires_grad:
                # torch lets sparse gradients share memory, and averages each in place
                part.weight.register_hook(Tensor.clone)  # pyright: ignore[reportCallIssue]
        self.build(self.module)
        # else Lightning converts the module after a checkpoint is loaded, whose weights of 64-true
        # fp32 would round
        self.precision_plugin.convert_module(self.module)
        for name, model in models:
            if self.imported[name]:
                huggingface.read(model, self.imported[name])
        if self.initial_weights is not None:
            self.load_initial_weights(self.initial_weights)
        self.module.__dict__["_armature_built"] = True

    def _name_imported(self, models: Sequence[tuple[str, nn.Module]]) -> None:
        self.from_base = huggingface.with_tied(
            self.module, {f"{name}.{own}" for name, names in self.imported.items() for own in names}
        )
        adapted = tuple(
            f"{name}."
            for name, model in models
            if any(is_adapter(n) for n, _ in model.named_parameters())
        )
        self.frozen_base = {
            name for name, param in self.module.named_parameters(remove_duplicate=False)
            if name in self.from_base and not param.requires_grad and name.startswith(adapted)
        }  # fmt: skip

    def _count(self) -> None:
        for name, param in self.module.named_parameters():
            self.parameter_count += nf4.elements(name, param)
            if param.requires_grad:
                self.trained_count += param.numel()
            elif self.base is None or name not in self.frozen_base:
                self.frozen_bytes += param.numel() * param.element_size()

    def _names_to_import(self, name: str, model: nn.Module) -> set[str]:
        """Return the names of what comes from the model's folder, which is not needed if a
        checkpoint holds all.
        """
        own = [
            each
            for each, _ in model.named_parameters(remove_duplicate=False)
            if not is_adapter(each)
        ]
        if all(self.held(f"{name}.{each}") for each in own):
            return set()
        return {
            each for each in huggingface.imported_names(model) if not self.held(f"{name}.{each}")
        }

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create what `configure_model` makes on the CPU, whose random numbers are the same under
        every strategy.

        Lightning's single device and ddp would draw them on the GPU, and sharded strategies on the
        CPU.
        """
        with self.precision_plugin.tensor_init_context():
            yield

    def build(self, module: L.LightningModule) -> None:
        """Give the module its weights.

        Called once, after configure_model and before the optimizers are created.
        """
        if self.sync_batchnorm:
            batchnorm.synchronize(module, group=dist.group.WORLD)
        for _, model in models_of(module):
            repeated = apply.repeated_blocks(model, apply.plan_of(model))
            blocks.convert_to_float8(repeated, float8=self.float8)
            blocks.checkpoint_activations(repeated, mode=self.activation_checkpointing)
            if self.compile != "none":
                blocks.compile_forward(
                    repeated if self.compile == "block" else [model], mode=self.compile_mode
                )
        meta_names = initialization.materialize(module, device=self.root_device)
        names = {name for name in meta_names - self.from_base if self.is_drawn(name)}
        initialization.initialize_by_name(module, seed=self.seed, names=names)

    def is_drawn(self, name: str) -> bool:
        """Return whether a weight of this name gets an initial value: at 70B they take minutes."""
        return self.draws_all or not self.held(name)

    def matrices(self) -> DistributedMatrices:
        """Return how the optimizer's work on whole matrices is distributed over ranks."""
        return DistributedMatrices()

    @property
    def can_read_weights(self) -> bool:
        """Whether parameters hold this rank's part of the weights between steps."""
        return True

    def weights(self) -> dict[str, nn.Parameter]:
        """Return this rank's part of the weights by name, as the optimizer steps them.

        None is gathered afterwards.

        Frozen weights of 4 bits are left out: their bytes are no values.
        """
        named = state.parameter_names(self.module).items()
        return {name: param for param, name in named if param.is_floating_point()}  # pyright: ignore[reportReturnType]

    def trained_weights(self) -> dict[str, nn.Parameter]:
        """Return those of `weights` that may change: with adapters, all others are frozen for
        good.
        """
        adapted = isinstance(getattr(self.module, "adapter", None), Lora)
        return {n: p for n, p in self.weights().items() if p.requires_grad or not adapted}

    def replicated_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by name of which every rank has the whole."""
        return dict(self.module.named_parameters())

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.explain(exception)
        args = exception.args
        super().on_exception(exception)
        exception.args = args  # Lightning's own remedies name its own strategies

    def explain(self, exception: BaseException) -> None:
        """Say in an error of torch's what to type, if that is known and not in it."""
        message = str(exception)
        found = next((remedy for words, remedy in self.remedies.items() if words in message), None)
        if found and not message.startswith(found) and not isinstance(exception, ConfigError):
            exception.args = (f"{found} torch reports: {message}",)

    local = staticmethod(gradients.local_part)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # as a penalty on sharded weights
        tensor = whole(tensor)
        op = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        # the mean of whole numbers would be truncated, and `self.log(…, sync_dist=True)` counts its
        # samples that way
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and op in ("mean", "avg"):
            tensor = tensor.float()
        own = group or (process_group.group_for(tensor) if isinstance(tensor, Tensor) else None)
        reduced = super().reduce(tensor, own, reduce_op)
        copies = self.world_size // self.data_size
        sums = group in (None, dist.group.WORLD) and op in (None, "sum", dist.ReduceOp.SUM)
        if (
            copies == 1
            or not sums
            or not isinstance(reduced, Tensor)
            or reduced.dtype == torch.bool
        ):
            return reduced
        # else each sample counts several times
        exact = reduced.is_floating_point() or reduced.is_complex()
        once = reduced / copies if exact else reduced // copies
        return once if reduced.requires_grad else reduced.copy_(once)  # in place, as Lightning's

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # of processes: `reduce` counts parts of the data
        yes = int(process_group.all_sum(torch.tensor(int(decision))))
        return yes == self.world_size if all else yes > 0

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        tensor = whole(tensor)
        gathered = super().all_gather(tensor, group=group, sync_grads=sync_grads)
        if gathered is not tensor and gathered.requires_grad:
            # torch receives the parts of a transposed gradient as if their rows were contiguous
            gathered.register_hook(Tensor.contiguous)
        copies = self.data_size < self.world_size and group in (None, dist.group.WORLD)
        return gathered[self.sample_ranks] if copies else gathered


def models_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that have weights and a forward, outermost ones only, with their names.

    A module without a forward, such as a ModuleList, is a container: its children are the models.
    One that is a part of another, such as an encoder that an autoencoder is made of, is none. A
    metric is none, even if it holds a network, as FID does: every rank has the whole.
    """
    paths = [*module.named_modules(remove_duplicate=False)][1:]
    of_metrics = tuple(
        f"{name}." for name, part in paths if isinstance(part, Metric | MetricCollection)
    )
    found: dict[nn.Module, str] = {}
    for name, part in paths:
        if has_forward(part) and not f"{name}.".startswith(of_metrics):
            found.setdefault(part, name)
    inside = {each for part in found for each in part.modules() if each is not part}
    return [
        (name, part) for part, name in found.items() if part not in inside and [*part.parameters()]
    ]


def has_forward(module: nn.Module) -> bool:
    # looked up without a call: TorchScript's modules define it by a descriptor that classes cannot
    # be asked for
    return inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def move_others(module: nn.Module, models: set[nn.Module], device: torch.device) -> None:
    """Move to the device what `module` holds besides the modules in `models`: its own tensors,
    metrics and the like.
    """
    for param in module._parameters.values():
        if param is not None:
            param.data = param.data.to(device)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else buffer.to(device)
    for child in module.children():
        if not has_forward(child):
            move_others(child, models, device)
        elif child not in models:
            child.to(device)
