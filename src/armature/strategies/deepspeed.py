"""DeepSpeed's ZeRO stages through Lightning's strategy, also on CPUs, with checkpoints that every
strategy reads.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from armature.checkpoint import optimizers, plain, state, storage
from armature.parallel import sharded, units
from armature.parallel.whole_weights import set_full
from armature.strategies.base import StrategyMixin
from armature.strategies.gradients import StepPrecision

# entries of zero_optimization: elements that are reduced or gathered at once. The engine allocates
# them in full, and Lightning's values are of large models
BUCKETS, BUCKET_STEP = ("reduce_bucket_size", "allgather_bucket_size"), 2**20
IN_PARTS = (
    "Under ZeRO-3 weights are whole in the forward of their layer alone. Elsewhere in a hook take "
    "them within `with armature.whole_weights(self):`, or type strategy=fsdp."
)
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EnginePrecision(StepPrecision):
    """The state of the engine's loss scale: Lightning's plugin has none."""

    strategy: "DeepSpeed"  # pyright: ignore[reportIncompatibleVariableOverride]

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.strategy.scaler_state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.strategy.load_scaler_state(state_dict)


class DeepSpeed(StrategyMixin, DeepSpeedStrategy):
    """DeepSpeed's engine, with initial weights, gradient norms and checkpoints as under every other
    strategy.

    Args:
        stage: 1 shards the optimizer's state, 2 also gradients, 3 also weights.
        offload_optimizer, offload_parameters: keep them in the CPU's memory; parameters need stage
            3.
        config: further entries of DeepSpeed's own configuration, which override ours.
        backend, activation_checkpointing, compile, compile_mode, float8: as for every strategy.
    """

    restore_checkpoint_after_setup = True  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    lightning_restore_optimizer = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    precision_kind = EnginePrecision
    masks_updates = False  # the engine makes the step
    sync_batchnorm = True
    remedies: ClassVar = {
        "tensor b (0)": IN_PARTS,
        "got [0] but": IN_PARTS,
        "cannot be 0 to view": "A weight has no dimension: make it nn.Parameter(torch.ones(1)).",
        "single optimizer": "The engine takes one optimizer and one schedule. Type strategy=fsdp.",
    }

    def __init__(
        self,
        *,
        seed: int = 0,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        backend: str = "auto",
        config: dict[str, Any] | None = None,
        activation_checkpointing: str | float = "none",
        compile: str = "none",
        compile_mode: str = "default",
        float8: bool | str = False,
    ) -> None:
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            process_group_backend=None if backend == "auto" else backend,
            overlap_comm=torch.cuda.is_available(),
            # "auto" would iterate over the train loader; only a log line uses the number
            logging_batch_size_per_gpu=1,
        )
        # with offloaded state the configured optimizer is slower than DeepSpeed's own, but computes
        # the same
        merged = OmegaConf.merge(self.config, {"zero_force_ds_cpu_optimizer": False}, config or {})
        self.config = cast(dict[str, Any], OmegaConf.to_container(merged, resolve=True))
        typed = (config or {}).get("zero_optimization") or {}
        self._own_buckets = [key for key in BUCKETS if key not in typed]
        self.fetches_weights = self.zero_stage_3
        self._groups: list[list[str]] = []
        # the weights of which the engine has fp32 copies and the optimizer's state
        self._stepped: set[str] = set()
        # the engine's own loss scale and that of this step
        self._replaced_scale: tuple[float, float] | None = None
        self.configure_mixin(seed, activation_checkpointing, compile, compile_mode, float8)

    @override
    def _format_config(self) -> None:
        # Lightning leaves 16 bits off where any entry of theirs was typed
        assert isinstance(self.config, dict)
        typed = {key: self.config.pop(key) for key in ("fp16", "bf16") if key in self.config}
        super()._format_config()
        for key, entries in typed.items():
            self.config[key] = {**self.config.get(key, {}), **entries}

    @override
    def setup_environment(self) -> None:
        # DeepSpeed calls what torch 2.13 has renamed
        warnings.filterwarnings(
            "ignore", message=".*(all_gather_into|reduce_scatter)_tensor` is deprecated"
        )
        self.join_group()
        # DeepSpeedStrategy's refuses a CPU, on which the engine works
        DDPStrategy.setup_environment(self)
        torch.manual_seed(self.seed)

    def scaler_state(self) -> dict[str, Any]:
        """Return the state of fp16's dynamic loss scale, or nothing."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return (
            {key: getattr(scaler, key) for key in _SCALER_STATE}
            if getattr(scaler, "dynamic", False)
            else {}
        )

    def load_scaler_state(self, saved: Mapping[str, Any]) -> None:
        for key in self.scaler_state().keys() & saved:
            setattr(self._zero.loss_scaler, key, saved[key])

    @override
    def setup_distributed(self) -> None:
        import deepspeed.ops

        if self.root_device.type == "cpu":
            # DeepSpeed would compile an operator that only its inference calls, for a minute
            deepspeed.ops.__dict__["__compatible_ops__"] = {}
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @override
    def build_once(self) -> None:
        built = getattr(self.module, "_armature_built", False)
        super().build_once()
        if built:
            self.return_to_device()  # the weights that stage 3 keeps whole
        elif self.zero_stage_3:
            sharded.refuse_pickled_states(self.module, gathers=True)

    @property
    @override
    def root_device(self) -> torch.device:
        device = super().root_device
        # the engine needs an index, also on a CPU
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Nothing: the model is built on the meta device, and sharded once it has its weights."""
        yield

    # ------------------------------------------------------------ the step
    @override
    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        assert isinstance(self.config, dict)
        sizes, most = self.config["zero_optimization"], self.parameter_count + BUCKET_STEP
        for key in self._own_buckets:
            sizes[key] = min(sizes[key], most - most % BUCKET_STEP)
        optimizer, scheduler = super()._init_optimizers()
        names = state.parameter_names(self.module)
        # the engine flattens them now
        self._groups = [group for group in optimizers.group_names(optimizer, names) if group]
        self._stepped = {
            names[p] for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        }
        return optimizer, scheduler

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        # Lightning has divided the loss by the number of micro-batches; the engine would do so
        # again
        return super().backward(*args, scale_wrt_gas=False, **kwargs)

    @override
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine clips during its step."""

    @override
    def prepare_gradients(self, hooks_and_clipping: Any, optimizer: Optimizer) -> None:
        if self.completes_step:  # not for each micro-batch: hooks would count them
            super().prepare_gradients(hooks_and_clipping, optimizer)
            self._follow_weights()

    @torch.no_grad()
    def _follow_weights(self) -> None:
        """Let the engine's fp32 copies of stages 1 and 2 have what hooks have put into weights."""
        for param in self.module.parameters():
            if copies := getattr(param, "_hp_mapping", None):
                exact, own = copies.hp_fragment, copies.lp_fragment_address
                weight = param.flatten().narrow(0, own.start, own.numel).to(exact.device)
                exact.copy_(exact.where(exact.to(weight.dtype) == weight, weight))

    @property
    @override
    def scales_loss(self) -> bool:
        return str(self.precision_plugin.precision).startswith("16")

    @property
    @override
    def skipped_step(self) -> bool:
        return (
            self.scales_loss
            and not self._skips_step
            and not self.deepspeed_engine.was_step_applied()
        )

    @property
    @override
    def can_weigh_targets(self) -> bool:
        return super().can_weigh_targets and hasattr(self._zero, "loss_scaler")

    @property
    @override
    def can_read_weights(self) -> bool:
        return not self.zero_stage_3

    @override
    def scale_gradients(self, optimizer: Optimizer) -> None:
        """Change the engine's loss scale, which it divides gradients by during its step."""
        if (scale := self.gradient_scale()) is None:
            return
        scaler = self._zero.loss_scaler  # there is one, since targets are weighed
        self._replaced_scale = (scaler.cur_scale, scaler.cur_scale / float(scale))
        scaler.cur_scale = self._replaced_scale[1]

    @property
    @override
    def completes_step(self) -> bool:
        return bool(self.deepspeed_engine.is_gradient_accumulation_boundary())

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        try:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            if self._replaced_scale is not None:
                (own, replaced), self._replaced_scale = self._replaced_scale, None
                # fp16's may have changed during the step
                self._zero.loss_scaler.cur_scale = own * (
                    self._zero.loss_scaler.cur_scale / replaced
                )
        norm = self.deepspeed_engine.get_global_grad_norm()
        if norm is not None:
            norm = torch.as_tensor(norm, dtype=torch.float32)
            # the engine writes -1 for one that is not finite
            self.grad_norm = norm.where(norm >= 0, torch.nan)
        return result

    # ------------------------------------------------------------ checkpoints
    @property
    def _zero(self) -> Any:
        return self.deepspeed_engine.optimizer

    def _flat(self) -> list[Tensor]:
        """Return this rank's flat fp32 partitions, which the wrapped optimizer steps."""
        names = (  # of stage 3, stages 1 and 2, and no stage
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        )
        return next([*getattr(self._zero, name)] for name in names if hasattr(self._zero, name))

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return unsharded fp32 weights; rank i % N has parameter i, so that N ranks write in
        parallel.
        """
        from deepspeed.utils import safe_get_full_fp32_param

        self._follow_weights()
        tensors, left_out = {}, self.unchanged_base()
        for i, (name, param) in enumerate(self.module.named_parameters()):
            if name in left_out:
                continue
            full = (
                cast(Tensor, safe_get_full_fp32_param(param))
                if name in self._stepped
                else self._gathered(param)
            )
            if i % self.world_size == self.global_rank:
                tensors[name] = full.detach().to("cpu", copy=True)
        for first, *others in units.tied_names(self.module):
            tensors |= {other: tensors[first] for other in others if first in tensors}
        if self.global_rank == 0:
            weights = dict(self.module.named_parameters(remove_duplicate=False))
            tensors |= {
                name: value
                for name, value in self.module.state_dict().items()
                if name not in weights
            }
        return tensors

    def _gathered(self, param: nn.Parameter) -> Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([param], enabled=self.zero_stage_3):
            return param.detach().to("cpu", copy=True)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_optimizer_state()
        inner = self._zero.optimizer
        sample = inner.state.get(self._flat()[0], {})
        shaped = [k for k, v in sample.items() if isinstance(v, Tensor) and v.ndim > 0]
        tensors: dict[str, Any] = {}
        for i, (name, param) in enumerate(
            p for p in self.module.named_parameters() if p[0] in self._stepped
        ):
            here = i % self.world_size == self.global_rank
            prefix = f"{state.OPTIMIZER_TENSORS}.0.{name}."
            for key in shaped:
                full = cast(Tensor, safe_get_full_optimizer_state(param, key))
                if here:
                    tensors[prefix + key] = full.detach().to("cpu", copy=True)
            if here:
                tensors |= {
                    prefix + key: value for key, value in sample.items() if key not in shaped
                }
        groups = optimizers.param_groups(inner, self._groups, next(iter(self.built_groups), ()))
        return {optimizers.TENSORS: tensors, "param_groups": groups}

    @override
    def inner_optimizers(self) -> list[Any]:
        # the engine of an evaluation after training has none
        inner = getattr(self._zero, "optimizer", None)
        return [inner] if self._groups and inner is not None else []

    @override
    def read_weights(self, path: Path) -> dict[str, Any]:
        # whole: the engine has its own names for parts
        return state.read_whole(path)["state_dict"]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights and the optimizer's state: the engine, which holds both, is made in
        `setup`.
        """
        from deepspeed import zero

        assert self._loading is not None
        path, self._loading = self._loading, None
        saved = storage.read_metadata(path).state_dict_metadata
        changed = checkpoint.get("state_dict")  # by hooks
        others = storage.read_meta(path).get(state.OTHER, {}) if changed is None else {}
        others = plain.restored(others)  # what modules keep beside tensors
        held = saved | others if changed is None else changed
        if strict:
            state.check_names(path, held, list(self.module.state_dict()), may_lack=self.from_base)

        def whole(names: list[str]) -> dict[str, Any]:
            given = changed or {}
            read = state.load_tensors(path, [name for name in names if name not in given], saved)
            return read | {name: given[name] for name in names if name in given}

        fitting = bool(self._groups and checkpoint[state.OPTIMIZER])
        shaped = self._create_state(path, saved) if fitting else []
        for name, param in self.module.named_parameters():
            if name not in held:
                continue
            prefix = f"{state.OPTIMIZER_TENSORS}.0.{name}."
            keys = [key for key in shaped if prefix + key in saved]
            full = whole([name, *(prefix + key for key in keys)])
            if full[name].shape != getattr(param, "ds_shape", param.shape):
                raise ValueError(
                    f"{path}: {name} is {tuple(full[name].shape)} there and {tuple(param.shape)} "
                    "here."
                )
            # the weights that the model computes with; with stage 3, this rank's part of them
            gathered = zero.GatheredParameters([param], modifier_rank=0, enabled=self.zero_stage_3)
            with torch.no_grad(), gathered:
                if not self.zero_stage_3 or self.global_rank == 0:
                    param.data.copy_(full[name])
            if name in self._stepped:
                set_full(param, full[name])
                for key in keys:
                    set_full(param, full[prefix + key], key)
        for name, value in self.extra_tensors().items():
            if name in saved:
                value.copy_(state.load_tensors(path, [name], saved)[name])
        weights = dict(self.module.named_parameters(remove_duplicate=False))
        own = [name for name in self.module.state_dict() if name in held and name not in weights]
        kept = {name: others[name] if name in others else whole([name])[name] for name in own}
        # buffers, what get_extra_state gave, and metrics
        state.load_tensors_of(path, self.module, kept, strict=False)
        if fitting:
            optimizers.restore_groups(
                self._zero.optimizer,
                self._groups,
                checkpoint[state.OPTIMIZER][0]["param_groups"],
                next(iter(self.built_groups), ()),
            )

    def _create_state(self, checkpoint: Path, saved: dict[str, Any]) -> list[str]:
        """Create empty optimizer state on the flat partitions, and return the keys with one value
        per weight.
        """
        prefixes = [
            f"{state.OPTIMIZER_TENSORS}.0.{name}."
            for name, _ in self.module.named_parameters()
            if name in self._stepped
        ]
        like = next(
            (prefix for prefix in prefixes if any(key.startswith(prefix) for key in saved)), None
        )
        if like is None:
            return []
        keys = [key.removeprefix(like) for key in saved if key.startswith(like)]
        values = state.load_tensors(checkpoint, [like + key for key in keys], saved)
        shaped = [key for key in keys if getattr(values[like + key], "ndim", 0) > 0]
        inner, of_flat = self._zero.optimizer, getattr(self._zero, "sub_group_to_group_id", None)
        # stage 3 has several flat tensors of a group, and empties the groups
        for i, flat in enumerate(self._flat()):
            on_device = optimizers.counts_on_device(
                inner.param_groups[i if of_flat is None else of_flat[i]]
            )
            for key in keys:
                value = values[like + key]
                if key in shaped:
                    value = torch.zeros_like(flat)
                elif isinstance(value, Tensor):
                    value = value.to(flat.device if on_device else "cpu", copy=True)
                inner.state[flat][key] = value
        self._link_optimizer_state()
        return shaped

    def _link_optimizer_state(self) -> None:
        """Link each weight to its optimizer state.

        The engine does so only once, after stepping the first group.
        """
        if self.zero_stage_3:  # nothing to link
            return
        self._zero._hp_optimizer_states_linked = False
        self._zero._lazy_init_hp_params_optimizer_state()
