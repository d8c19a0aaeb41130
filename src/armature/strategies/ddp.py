"""Data parallelism: every rank holds the whole model and a part of the batch, and gradients are
averaged.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from armature.parallel.distributed_matrices import DistributedMatrices
from armature.strategies.base import StrategyMixin


class OrderedDDP(DistributedDataParallel):
    """DDP whose buckets of gradients follow from the order of the parameters alone.

    torch's makes new ones after its first step, in the order in which gradients became ready. A sum
    over three or more ranks depends on where a gradient lies in its bucket, and a kernel's result
    may depend on how it is aligned: a resumed run would compute other bits. Here the first buckets
    stay, in the reverse order of the parameters. With `find_unused_parameters` torch's do, too.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        if not self.find_unused_parameters:
            self.keep_buckets()

    def keep_buckets(self) -> None:
        """Make the first buckets the last ones."""
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    @override
    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        params, sparse = super()._build_params_for_reducer()
        order = 1 if self.find_unused_parameters else -1
        return params[::order], sparse[::order]


class DDP(StrategyMixin, DDPStrategy):
    """Lightning's DDP.

    Args:
        backend: `auto` (gloo on CPU, NCCL on GPU), or a backend's name.
        sync_batchnorm: compute BatchNorm's statistics over the batch of all ranks, as one process
            with that batch does. Otherwise the statistics of smaller batches change the result.
        find_unused_parameters: allow steps that do not use all parameters; costs a walk over the
            graph per step. None: only with manual optimization, where each of several losses uses
            some of the parameters.
    """

    saves_files = True
    replicates_weights = True
    # Lightning names a strategy of its own
    remedies: ClassVar = {
        "Expected to have finished reduction":
            "Some parameters took no part in the loss of a step, so ddp waits for their gradients. "
            "Type strategy.find_unused_parameters=true, or freeze them. Indices below count from "
            "the last parameter; TORCH_DISTRIBUTED_DEBUG=INFO before the command adds names.",
        "doesn't have any parameter that requires a gradient":
            "Nothing is trained, so ddp has nothing to average. Type strategy=single.",
    }  # fmt: skip

    def __init__(
        self,
        *,
        seed: int = 0,
        backend: str = "auto",
        sync_batchnorm: bool = True,
        find_unused_parameters: bool | None = None,
        activation_checkpointing: str | float = "none",
        compile: str = "none",
        compile_mode: str = "default",
        float8: bool | str = False,
    ) -> None:
        # gradients are views of the buckets that are sent, which saves a copy of them
        super().__init__(
            process_group_backend=None if backend == "auto" else backend,
            gradient_as_bucket_view=True,
        )
        self.find_unused_parameters, self.sync_batchnorm = find_unused_parameters, sync_batchnorm
        self.configure_mixin(seed, activation_checkpointing, compile, compile_mode, float8)

    @override
    def setup_environment(self) -> None:
        self.join_group()
        super().setup_environment()

    @override
    def build(self, module: L.LightningModule) -> None:
        self._ddp_kwargs["find_unused_parameters"] = (
            not module.automatic_optimization
            if self.find_unused_parameters is None
            else self.find_unused_parameters
        )
        super().build(module)

    @override
    def matrices(self) -> DistributedMatrices:
        return DistributedMatrices(dist.group.WORLD)

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        if device_ids is None:
            return OrderedDDP(model, **self._ddp_kwargs)
        # on a stream of its own, as in Lightning: CUDA graphs of the whole step need it
        current, own = torch.cuda.current_stream(), torch.cuda.Stream()
        own.wait_stream(current)  # for gradients that are not reduced yet
        with torch.cuda.stream(own):
            wrapped = OrderedDDP(model, device_ids=device_ids, **self._ddp_kwargs)
        current.wait_stream(own)
        return wrapped

    @override
    def reduce_changed(self, changed: Sequence[Tensor]) -> None:
        if self._ddp_kwargs["find_unused_parameters"] and not any(
            param.requires_grad for param in changed
        ):
            return  # frozen weights are unused ones
        wrapped, self.model = self.model, self.module
        assert isinstance(wrapped, DistributedDataParallel)
        # an error of the step before would be lost with its reducer
        wrapped._check_reducer_finalized()
        trainer = self.module.trainer
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches:
            # what this step's earlier micro-batches have added is not reduced yet
            for param in changed:
                if param.grad is not None and not param.requires_grad:
                    dist.all_reduce(param.grad.div_(self.world_size))
        # with the last reference, its hooks on the weights are removed
        del wrapped.logger, wrapped.reducer
        self._ddp_kwargs["init_sync"] = False  # the ranks are alike
        self.configure_ddp()
        self._reduced = [(param, param.requires_grad) for param, _ in self._reduced]
