"""NF4, frozen weights of 4 bits (QLoRA, arXiv:2305.14314), in tensors that can be sharded as their
matrix is.

A matrix (out, in) becomes three: `codes` uint8 (out, in / 2), two elements to a byte; `scales`
uint8 (out, in / 64), one for each block of 64 elements; `row` (out, 1), the row's largest value. A
block's largest value is scales · row /
255. That is 4.125 bits for each element, and 32 for each row. Codes are those of bitsandbytes.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from armature.errors import error_line
from armature.models.autocast import to_compute_dtype
from armature.parallel.gradients import local_part

log = logging.getLogger(__name__)
PARTS = ("codes", "scales", "row")
BLOCK = 64  # elements of a row that share a scale
# quantiles of a normal distribution, scaled to -1 … 1 (arXiv:2305.14314, appendix E)
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def quantize(weight: Tensor, *, largest: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and row of a matrix (out, in); `in` is a multiple of 64.

    `row` holds the bits of fp32 values as int32: what changes a model's type (precision plugins,
    FSDP's mixed precision) would round it otherwise.

    Args:
        largest: the rows' largest absolute values (out, 1) in fp32, if `weight` is a part of the
            columns.
    """
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    block_max = blocks.abs().amax(-1)
    row = block_max.amax(1, keepdim=True) if largest is None else largest
    scaled = blocks * (1.0 / block_max.clamp(min=1e-38))[..., None]  # as bitsandbytes computes it
    # the default may be bf16
    levels = torch.tensor(LEVELS, device=weight.device, dtype=torch.float32)
    codes = (
        torch.bucketize(scaled, (levels[:-1] + levels[1:]) / 2, out_int32=True)
        .to(torch.uint8)
        .flatten(1)
    )
    scales = (block_max / row.clamp(min=1e-38) * 255).round().to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales, row.view(torch.int32)


def dequantize(codes: Tensor, scales: Tensor, row: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the matrix (out, in); a DTensor's sharded as its codes are."""
    if hasattr(codes, "to_local"):
        sharded: Any = codes
        local = dequantize(*(part.to_local() for part in (sharded, scales, row)), dtype=dtype)  # pyright: ignore[reportAttributeAccessIssue]
        return _sharded_as(sharded, local)
    block_max = scales.float() * (row.view(torch.float32) / 255)
    kernel = None if dtype == torch.float64 else _kernel(codes.device)
    return (kernel or plain_kernel)(codes, block_max, dtype)


def plain_kernel(codes: Tensor, block_max: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix (out, in) of codes (out, in / 2) and blocks' largest values (out, in / 64)
    in fp32.
    """
    values = F.embedding(codes.int(), _pairs(codes.device))
    return values.view(*block_max.shape, BLOCK).mul_(block_max[..., None]).flatten(1).to(dtype)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two elements of each byte (256, 2)."""
    # cached: the default may be bf16 now
    levels = torch.tensor(LEVELS, device=device, dtype=torch.float32)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)


def bitsandbytes_kernel() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """Return bitsandbytes' function in place of `plain_kernel`.

    Raises ImportError if it is not installed.
    """
    # it reports kernels for other devices that it does not find
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]

    def kernel(codes: Tensor, block_max: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (codes.shape[0], codes.shape[1] * 2)
        flat = codes.reshape(-1, 1), block_max.reshape(-1)
        return torch.ops.bitsandbytes.dequantize_4bit.default(*flat, BLOCK, "nf4", shape, dtype)

    return kernel


@functools.cache
def _kernel(device: torch.device) -> Callable[[Tensor, Tensor, torch.dtype], Tensor] | None:
    """Return bitsandbytes' kernel for a GPU if it is installed, else None."""
    if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
        return None
    try:
        return bitsandbytes_kernel()
    except (ImportError, RuntimeError) as error:  # of an installation for other devices
        log.warning("bitsandbytes' kernel for 4-bit weights is not used: %s.", error_line(error))
        return None


class Nf4Linear(nn.Linear):
    """A Linear whose frozen weight is held in 4 bits.

    Forward and backward each compute the matrix anew.

    It has `codes`, `scales` and `row` in place of `weight`; the bias is that of the Linear it
    replaces. It computes the product in the input's type, or in autocast's.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    row: nn.Parameter

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        for name, value in zip(PARTS, quantize(base.weight.detach()), strict=True):
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.register_parameter("bias", base.bias)

    @override
    def forward(self, input: Tensor) -> Tensor:
        x = to_compute_dtype(input)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, bias, self.codes, self.scales, self.row)  # pyright: ignore[reportReturnType]

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix (out, in)."""
        return dequantize(self.codes, self.scales, self.row, dtype=dtype)

    def empty_weight(self) -> Tensor:
        """Return an uninitialized matrix (out, in) in fp32, sharded as the codes are, to read
        values into.
        """
        codes: Any = self.codes.detach()
        local = local_part(codes)
        weight = torch.empty(local.shape[0], local.shape[1] * 2, device=local.device)
        return weight if local is codes else _sharded_as(codes, weight)

    @torch.no_grad()
    def fill(self, weight: Tensor) -> None:
        """Take the values of a matrix that is sharded as `empty_weight`'s.

        Called by all ranks that hold a part.
        """
        largest: Any = weight.float().abs().amax(1, keepdim=True)
        values: Any = weight
        if hasattr(values, "to_local"):
            row: Any = self.row
            largest = largest.redistribute(row.device_mesh, row.placements).to_local()
            values = values.to_local()
        for name, value in zip(PARTS, quantize(values, largest=largest), strict=True):
            local_part(getattr(self, name)).copy_(value)


class _Product(torch.autograd.Function):
    """input (…, in) times the transposed matrix, plus bias.

    Autograd keeps the 4 bits, and nothing of the matrix.
    """

    @staticmethod
    @override
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, input: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor, row: Tensor
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, row)
        return F.linear(input, dequantize(codes, scales, row, dtype=input.dtype), bias)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_input, of_bias = None, None
        if ctx.needs_input_grad[0]:
            of_input = grad @ dequantize(*ctx.saved_tensors, dtype=grad.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = grad.flatten(0, -2).sum(0)
        return of_input, of_bias, None, None, None


def _sharded_as(tensor: Any, local: Tensor) -> Tensor:
    """Return a DTensor of this rank's part of a matrix (out, in), sharded as the codes `tensor`."""
    columns = tensor.shape[1] * 2
    return type(tensor).from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=(tensor.shape[0], columns),
        stride=(columns, 1),
    )


def in_4_bits(model: nn.Module) -> dict[str, Nf4Linear]:
    """Return a model's Linears of 4 bits by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}


def weight_of(name: str) -> str:
    """Return the name of the weight that a parameter is a part of, or the parameter's own."""
    owner, _, last = name.rpartition(".")
    return f"{owner}.weight" if last in PARTS else name


def elements(name: str, param: Tensor) -> int:
    """Return how many elements of a model a parameter holds: of the parts of a matrix, the codes
    hold all.
    """
    last = name.rpartition(".")[2] if param.dtype in (torch.uint8, torch.int32) else ""
    return 2 * param.numel() if last == "codes" else 0 if last in PARTS else param.numel()


def rounded(weight: Tensor) -> Tensor:
    """Return a whole matrix as it is after quantization, in fp32."""
    return dequantize(*quantize(weight), dtype=torch.float32)


def fits(linear: nn.Linear) -> bool:
    return linear.in_features % BLOCK == 0
