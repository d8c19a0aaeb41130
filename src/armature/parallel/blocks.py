"""Float8, activation checkpointing and compilation of a model's blocks, in place.

Parameter names stay the same.
"""

import functools
import os
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from armature.data import cache

# operators whose results cost more to recompute than to store: matrix products, attention, and sums
# over ranks. A gather over the tensor axis is repeated in backward: its result holds the positions
# of all ranks
EXPENSIVE_OPERATORS = (
    "aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu", "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_reduce", "_c10d_functional.all_to_all_single", "aten._grouped_mm",
    "flex_attention", "inductor_compiled_code",  # inside a compiled block, and compiled on its own
)  # fmt: skip
MATRIX_PRODUCTS = ("aten.mm.default", "aten.addmm.default")  # of weights with activations
# what FSDP calls around units inside a block, such as experts: not as often when the block is
# computed again
_PROFILER = (
    torch.ops.profiler._record_function_enter_new,
    torch.ops.profiler._record_function_exit,
)
LABELS = {getattr(packet, overload) for packet in _PROFILER for overload in packet.overloads()}


def convert_to_float8(modules: Iterable[nn.Module], *, float8: bool | str) -> None:
    """Let the Linears inside multiply in float8, forward and backward; weights and the optimizer
    keep their type.

    torchao scales each tensor by its largest value, anew in every step. The hardware needs sizes
    that are multiples of
    16: a Linear with other sizes is not converted. "emulate" rounds to float8 and multiplies in the
    tensors' own type.
    """
    if not float8:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, _: str) -> bool:
        return (
            isinstance(module, nn.Linear)
            and module.in_features % 16 == 0 == module.out_features % 16
        )

    config = Float8LinearConfig(emulate=float8 == "emulate")
    for module in modules:
        convert_to_float8_training(module, module_filter_fn=fits, config=config)


def checkpoint_activations(
    blocks: Iterable[nn.Module], *, mode: str | float, **contexts: Any
) -> None:
    """Store less of the forward pass, and compute it again in backward.

    That is for `every` block, or every n-th if the mode is a number. `selective` stores the results
    of matrix products, attention and sums over ranks in every block, and recomputes the rest;
    `half` recomputes every second product of weights, too. A share below 1 is of the bytes that
    compiled blocks would keep: torch recomputes what costs least per byte.

    Args:
        contexts: `context_fn` of torch's checkpoint, if the mode has none of its own.
    """
    shares = isinstance(mode, float)
    functorch_config.activation_memory_budget = mode if shares else 1.0
    if shares or mode == "none":
        return
    step = mode if isinstance(mode, int) else 1
    options: dict[str, Any] = {"use_reentrant": False, **contexts}
    if mode in ("selective", "half"):
        SAC_IGNORED_OPS.update(LABELS)
        options["context_fn"] = partial(_selective_contexts, half=mode == "half")
    for i, block in enumerate(blocks):
        if i % step == 0:
            block.forward = partial(checkpoint, block.forward, **options)


def _selective_contexts(*, half: bool) -> tuple[Any, Any]:
    products = {False: count(), True: count()}  # of the forward pass, and of its repetition

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        if half and name in MATRIX_PRODUCTS and next(products[ctx.is_recompute]) % 2:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if name in EXPENSIVE_OPERATORS or name.rpartition(".")[0] in EXPENSIVE_OPERATORS:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compile_forward(modules: Iterable[nn.Module], *, mode: str = "default") -> None:
    """Compile each module's forward, inside the hooks that sharding registers on the module."""
    set_compile_cache_dir()
    for module in modules:
        module.forward = CompiledForward(module.forward, mode)


def overlap_collectives() -> None:
    """Let Inductor cut gathers, and sums of parts, into pieces that travel while others are
    multiplied (https://discuss.pytorch.org/t/209487).
    """
    from torch._inductor import config

    config._micro_pipeline_tp = True  # pyright: ignore[reportAttributeAccessIssue]


class CompiledForward:
    """A compiled method. Its deep copies and pickles belong to their own module.

    `torch.compile` returns a function, which `copy.deepcopy` does not copy: a teacher would compute
    with the weights of the model that it was copied from.
    """

    def __init__(self, forward: Callable[..., Any], mode: str) -> None:
        self._compiled = torch.compile(forward, mode=mode)
        self._forward, self._mode = forward, mode
        # its signature: others look for names of arguments
        functools.update_wrapper(self, forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles bind the method to the new module
        return CompiledForward, (self._forward, self._mode)


def set_compile_cache_dir() -> None:
    """Let torch keep compiled code beside the prepared corpora, unless TORCHINDUCTOR_CACHE_DIR
    names another folder.

    torch's default is a temporary folder, which is deleted with the container and, on many
    clusters, with the job.
    """
    name, default = "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_"
    # torch sets it to its default when it is imported
    if os.environ.get(name, default).startswith(default):
        os.environ[name] = str(cache.root(None) / "inductor")
