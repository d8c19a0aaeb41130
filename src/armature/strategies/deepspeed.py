"""DeepSpeed's ZeRO stages through Lightning's strategy, on CPUs as well, with checkpoints that every strategy reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from armature.checkpoint import state as ckpt
from armature.checkpoint import storage
from armature.parallel import ties
from armature.strategies.base import StrategyMixin


class DeepSpeed(StrategyMixin, DeepSpeedStrategy):
    """The real engine, with initial weights, gradient norms and checkpoints as under every other strategy.

    Args:
        stage: 1 divides the optimizer's state over the ranks, 2 gradients too, 3 weights too.
        offload_optimizer, offload_parameters: keep them in the CPU's memory; parameters need stage 3.
        config: further entries of DeepSpeed's own configuration, which win.
        backend, activation_checkpointing, compile, compile_mode, float8: as for every strategy.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        backend: str = "auto",
        config: dict[str, Any] | None = None,
        activation_checkpointing: str | int = "none",
        compile: str = "none",
        compile_mode: str = "default",
        float8: bool | str = False,
    ) -> None:
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            process_group_backend=None if backend == "auto" else backend,
            logging_batch_size_per_gpu=1,  # "auto" would read the train loader early; only a log line depends on it
            overlap_comm=torch.cuda.is_available(),
        )
        assert isinstance(self.config, dict)
        # a client's own optimizer on offloaded state is slower than DeepSpeed's, and computes the same
        self.config |= {"zero_force_ds_cpu_optimizer": False} | (config or {})
        self._groups: list[list[str]] = []
        self._lent: tuple[float, float] | None = None  # the engine's loss scale, and what stands in for it in a step
        self.configure_mixin(
            seed=seed, activation_checkpointing=activation_checkpointing, compile=compile, compile_mode=compile_mode,
            float8=float8,
        )  # fmt: skip

    # ------------------------------------------------------------ on CPUs too
    @override
    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # Lightning's own refuses a CPU, where the engine works
        torch.manual_seed(self.seed)

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    @override
    def root_device(self) -> torch.device:
        device = super().root_device
        # the engine wants a number, on a CPU too
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Nothing: the model is built on the meta device, and divided once it has its weights."""
        with nullcontext():
            yield

    # ------------------------------------------------------------ the step
    @override
    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        optimizer, scheduler = super()._init_optimizers()
        names = ckpt.parameter_names(self.module)
        self._groups = [group for group in ckpt.group_names(optimizer, names) if group]  # flattened from here on
        return optimizer, scheduler

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Lightning has divided the loss by the number of micro-batches; the engine would do it once more
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    @override
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine clips in its step."""

    @property
    @override
    def can_weigh(self) -> bool:
        return super().can_weigh and hasattr(self._zero, "loss_scaler")

    @override
    def scale_gradients(self, optimizer: Optimizer) -> None:
        """The engine divides by its loss scale in its step, whatever that is by then."""
        if self.deepspeed_engine.is_gradient_accumulation_boundary():
            scale, self.gradients_are_scaled = self.gradient_scale(), True
            if scale is not None:  # only then is there sure to be a loss scale
                scaler = self._zero.loss_scaler
                self._lent = (scaler.cur_scale, scaler.cur_scale / float(scale))
                scaler.cur_scale = self._lent[1]

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        try:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            if self._lent is not None:
                (own, lent), self._lent = self._lent, None
                # fp16's may have moved
                self._zero.loss_scaler.cur_scale = own * (self._zero.loss_scaler.cur_scale / lent)
        norm = self.deepspeed_engine.get_global_grad_norm()
        if norm is not None:
            self.grad_norm = torch.as_tensor(norm, dtype=torch.float32)
        return result

    # ------------------------------------------------------------ checkpoints
    @property
    def _zero(self) -> Any:
        return self.deepspeed_engine.optimizer

    def _flat(self) -> list[Tensor]:
        """This rank's flat fp32 partitions, which the wrapped optimizer steps."""
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self._zero, name):
                return list(getattr(self._zero, name))
        raise TypeError(f"no fp32 partitions known in {type(self._zero).__name__}")

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Undivided fp32 weights; rank i % N holds parameter i, so that N ranks write together."""
        from deepspeed.utils import safe_get_full_fp32_param

        state = {}
        for i, (name, param) in enumerate(self._parameters()):
            full = cast(Tensor, safe_get_full_fp32_param(param)) if param.requires_grad else self._gathered(param)
            if i % self.world_size == self.global_rank:
                state[name] = full.detach().to("cpu", copy=True)
        for first, *others in self._ties:
            state |= {other: state[first] for other in others if first in state}
        if self.global_rank == 0:
            state |= {n: b for n, b in self.module.state_dict().items() if n in self._buffers()}
        return state

    def _buffers(self) -> set[str]:
        return {name for name, _ in self.module.named_buffers()}

    @property
    def _ties(self) -> list[list[str]]:
        return ties.find(self.module)

    def _gathered(self, param: nn.Parameter) -> Tensor:
        import deepspeed

        with deepspeed.zero.GatheredParameters([param], enabled=self.zero_stage_3):
            return param.detach().to("cpu", copy=True)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        inner = self._zero.optimizer
        sample = inner.state.get(self._flat()[0], {})
        shaped = [k for k, v in sample.items() if isinstance(v, Tensor) and v.ndim > 0]
        tensors: dict[str, Any] = {}
        for i, (name, param) in enumerate(p for p in self._parameters() if p[1].requires_grad):
            here = i % self.world_size == self.global_rank
            prefix = f"{ckpt.OPTIMIZER}.0.{name}."
            for key in shaped:
                full = cast(Tensor, safe_get_full_optimizer_state(param, key))
                if here:
                    tensors[prefix + key] = full.detach().to("cpu", copy=True)
            if here:
                tensors |= {prefix + key: value for key, value in sample.items() if key not in shaped}
        return {"tensors": tensors, "groups": ckpt.param_groups(inner, self._groups)}

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        directory = Path(checkpoint_path) if isinstance(checkpoint_path, str) else checkpoint_path
        saved = storage.read_metadata(directory).state_dict_metadata
        meta = storage.read_meta(directory)
        fitting = bool(self._groups)
        ckpt.check_names(directory, saved, list(self.module.state_dict()))
        shaped = self._create_state(directory, saved) if fitting else []
        for name, param in self._parameters():
            keys = [key for key in shaped if f"{ckpt.OPTIMIZER}.0.{name}.{key}" in saved]
            full = ckpt.load_tensors(directory, [name, *(f"{ckpt.OPTIMIZER}.0.{name}.{key}" for key in keys)], saved)
            self._assign(param, full[name])
            if fitting and param.requires_grad:
                safe_set_full_fp32_param(param, full[name].to(self.root_device))
                for key in keys:
                    value = full[f"{ckpt.OPTIMIZER}.0.{name}.{key}"].to(self.root_device)
                    safe_set_full_optimizer_state(param, value, key)
        for name, value in self.extra_tensors().items():
            if name in saved:
                value.copy_(ckpt.load_tensors(directory, [name], saved)[name])
        for name in self._buffers() & saved.keys():
            self.module.get_buffer(name).copy_(ckpt.load_tensors(directory, [name], saved)[name])
        if fitting:
            ckpt.restore_groups(self._zero.optimizer, self._groups, meta["param_groups"][0])
        return self.note_random(meta)

    def _create_state(self, directory: Path, saved: dict[str, Any]) -> list[str]:
        """Empty optimizer state on the flat partitions, to be filled; the keys that have a value for each weight."""
        trained = [name for name, param in self._parameters() if param.requires_grad]
        prefix = f"{ckpt.OPTIMIZER}.0."
        like = next((name for name in trained if any(key.startswith(f"{prefix}{name}.") for key in saved)), None)
        if like is None:
            return []
        keys = [key.removeprefix(f"{prefix}{like}.") for key in saved if key.startswith(f"{prefix}{like}.")]
        values = ckpt.load_tensors(directory, [f"{prefix}{like}.{key}" for key in keys], saved)
        shaped = [key for key in keys if getattr(values[f"{prefix}{like}.{key}"], "ndim", 0) > 0]
        for flat in self._flat():
            for key in keys:
                value = values[f"{prefix}{like}.{key}"]
                state = (
                    torch.zeros_like(flat) if key in shaped else value.clone() if isinstance(value, Tensor) else value
                )
                self._zero.optimizer.state[flat][key] = state
        self._link()
        return shaped

    def _link(self) -> None:
        """Let each weight find its optimizer state. The engine does so after stepping the first group only."""
        if hasattr(self._zero, "_lazy_init_hp_params_optimizer_state"):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _assign(self, param: nn.Parameter, full: Tensor) -> None:
        """The weights that the model computes with; with stage 3 each rank keeps its part of them."""
        import deepspeed

        with torch.no_grad(), deepspeed.zero.GatheredParameters([param], modifier_rank=0, enabled=self.zero_stage_3):
            if not self.zero_stage_3 or self.global_rank == 0:
                param.data.copy_(full)
