"""A decoder-only language model in today's standard form: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Shapes: B batch, T positions, D width, V vocabulary, H query heads, G key-value heads, K head width, C context,
N = B * T tokens, R rows of a chunk of them.
Llama (arXiv:2302.13971, arXiv:2407.21783) is this model with the published sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask
from typing_extensions import TypeIs

from armature.models.decoder import documents
from armature.models.decoder.check import problems


class KeyValueCache:
    """Keys and values of the positions seen so far, so that generation computes each of them once."""

    def __init__(self) -> None:
        self.length = 0
        self.layers: dict[str, tuple[Tensor, Tensor]] = {}
        self.documents_BS: Tensor | None = None  # the number of each position's document, where that counts

    def extend(self, name: str, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new keys and values, and give back all of them."""
        if name in self.layers:
            k_old, v_old = self.layers[name]
            k_BGTK, v_BGTK = torch.cat([k_old, k_BGTK], dim=2), torch.cat([v_old, v_BGTK], dim=2)
        self.layers[name] = (k_BGTK, v_BGTK)
        return k_BGTK, v_BGTK


def rotate(x_BHTK: Tensor, rotary_C2K: Tensor) -> Tensor:
    """Turn each pair (i, i + K/2) by its position's angle (RoFormer, arXiv:2104.09864), in fp32 whatever x's type."""
    cos_TK, sin_TK = rotary_C2K[: x_BHTK.shape[2]].unbind(1)
    x, y = x_BHTK.float().chunk(2, dim=-1)
    return torch.cat([x * cos_TK - y * sin_TK, y * cos_TK + x * sin_TK], dim=-1).to(x_BHTK.dtype)


class Attention(nn.Module):
    """Causal self-attention whose key-value heads may be fewer than its query heads (GQA, arXiv:2305.13245)."""

    def __init__(self, width: int, *, heads: int, kv_heads: int, qk_norm: bool, norm_eps: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.qk_norm, self.norm_eps = qk_norm, norm_eps
        self.q = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(
        self,
        x_BTD: Tensor,
        rotary_C2K: Tensor,
        mask: Tensor | BlockMask | None = None,
        cache: KeyValueCache | None = None,
        name: str = "",
    ) -> Tensor:
        # -1: under tensor parallelism a rank holds only some of the heads, and T grows back from a sequence shard
        q_BHTK, k_BGTK, v_BGTK = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        )
        if self.qk_norm:
            q_BHTK = F.rms_norm(q_BHTK, (self.head_dim,), eps=self.norm_eps)
            k_BGTK = F.rms_norm(k_BGTK, (self.head_dim,), eps=self.norm_eps)
        q_BHTK, k_BGTK = rotate(q_BHTK, rotary_C2K), rotate(k_BGTK, rotary_C2K)
        if cache is not None:
            k_BGTK, v_BGTK = cache.extend(name, k_BGTK, v_BGTK)
            new, seen = q_BHTK.shape[2], k_BGTK.shape[2]
            if mask is None and 1 < new < seen:
                mask = torch.ones(new, seen, dtype=torch.bool, device=x_BTD.device).tril(seen - new)
        if isinstance(mask, BlockMask):
            a_BHTK = documents.attend(q_BHTK, k_BGTK, v_BGTK, mask)
        else:
            a_BHTK = F.scaled_dot_product_attention(
                q_BHTK,
                k_BGTK,
                v_BGTK,
                attn_mask=mask,
                is_causal=mask is None and q_BHTK.shape[2] == k_BGTK.shape[2],
                enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
            )
        return self.o(a_BHTK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, width: int, *, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(
        self, width: int, *, heads: int, kv_heads: int, ffn_hidden: int, norm_eps: float, qk_norm: bool, dropout: float
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.RMSNorm(width, eps=norm_eps)
        self.attention = Attention(width, heads=heads, kv_heads=kv_heads, qk_norm=qk_norm, norm_eps=norm_eps)
        self.ffn_norm = nn.RMSNorm(width, eps=norm_eps)
        self.ffn = FeedForward(width, hidden=ffn_hidden)

    def forward(
        self,
        x_BTD: Tensor,
        rotary_C2K: Tensor,
        mask: Tensor | BlockMask | None = None,
        cache: KeyValueCache | None = None,
        name: str = "",
    ) -> Tensor:
        attended_BTD = self.attention(self.attention_norm(x_BTD), rotary_C2K, mask, cache, name)
        x_BTD = x_BTD + F.dropout(attended_BTD, self.dropout, self.training)
        return x_BTD + F.dropout(self.ffn(self.ffn_norm(x_BTD)), self.dropout, self.training)


class ChunkedCrossEntropy(torch.autograd.Function):
    """`Decoder.loss` of head and targets together, without ever holding the logits of all tokens.

    Each chunk's gradients are made in the forward pass, while its logits are still there, so that nothing is computed
    twice (Liger Kernel, arXiv:2410.10989, 3.2). Takes x (N, D), the head's weight (V, D), targets (N,) and whether
    gradients will be asked for.

    4,096 tokens of width 256 and 32,000 words under bf16 autocast took 0.8 s and 131 MB on one core of an AMD EPYC
    with AVX512-BF16 (2026-11-21, torch 2.13); the plain loss 1.9 s and 1,498 MB; torch's linear_cross_entropy, which
    adds the loss up in bf16, 3.0 s and 174 MB.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, with_gradients: bool) -> Tensor:
        device, tokens, vocabulary = x_ND.device, x_ND.shape[0], weight_VD.shape[0]
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else weight_VD.dtype
        x_low_ND, weight_low_VD = x_ND.to(dtype), weight_VD.to(dtype)
        needs_x, needs_weight = (with_gradients and needed for needed in ctx.needs_input_grad[:2])
        gx_ND = torch.empty_like(x_low_ND) if needs_x else None
        gweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), device=device)
        share = 1 / (targets_N != -100).sum().clamp(min=1)
        # 32 or 512 MiB of fp32 logits: with fewer rows, adding up the weight's gradient costs more than making it
        rows = min(tokens, max(1, (2**23 if device.type == "cpu" else 2**27) // vocabulary))
        # each chunk overwrites the last one's: on a CPU, memory fresh from the system costs more than the softmax
        logits_all, p_all = (
            torch.empty(rows, vocabulary, dtype=kind, device=device) for kind in (dtype, torch.float32)
        )
        part_VD = torch.empty_like(weight_low_VD) if needs_weight else None
        for start in range(0, tokens, rows):
            chunk = slice(start, min(start + rows, tokens))
            x_RD, targets_R1 = x_low_ND[chunk], targets_N[chunk, None]
            keep_R1, target_R1 = (targets_R1 != -100).float(), targets_R1.clamp(min=0)
            logits_RV = torch.mm(x_RD, weight_low_VD.T, out=logits_all[: len(x_RD)])
            p_RV = torch.softmax(logits_RV, dim=-1, dtype=torch.float32, out=p_all[: len(x_RD)])
            # log p of the target through that of the likeliest, which cannot underflow; the log of all of them would
            # cost more than the softmax, on CPUs several times
            above_R1 = logits_RV.gather(1, target_R1).float() - logits_RV.amax(dim=-1, keepdim=True).float()
            total -= ((above_R1 + p_RV.amax(dim=-1, keepdim=True).log()) * keep_R1).sum()
            if gx_ND is None and gweight_VD is None:
                continue
            g_RV = p_RV.scatter_add_(1, target_R1, -torch.ones_like(keep_R1)).mul_(keep_R1)
            g_RV = g_RV if dtype == torch.float32 else logits_RV.copy_(g_RV)
            if gx_ND is not None:
                torch.mm(g_RV, weight_low_VD, out=gx_ND[chunk])
            if gweight_VD is not None:
                gweight_VD += torch.mm(g_RV.T, x_RD, out=part_VD)
        # the mean's share comes last, so that fp16 gradients do not vanish before the scaler's factor reaches them
        ctx.save_for_backward(gx_ND, gweight_VD, share)
        ctx.dtypes = x_ND.dtype, weight_VD.dtype
        return total * share

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,), (gx_ND, gweight_VD, share) = grad_outputs, ctx.saved_tensors
        gx_ND = (gx_ND.float() * (grad * share)).to(ctx.dtypes[0]) if gx_ND is not None else None
        gweight_VD = (gweight_VD * (grad * share)).to(ctx.dtypes[1]) if gweight_VD is not None else None
        return gx_ND, gweight_VD, None, None


def _is_bare(head: nn.Module | None) -> TypeIs[nn.Linear]:
    """Whether only the weight counts: a hook or a subclass may divide, gather or adapt the head when it is called."""
    return type(head) is nn.Linear and not head._forward_pre_hooks and not head._forward_hooks


class Decoder(nn.Module):
    """Embedding, blocks, norm and head; a pipeline stage sets the ends that it does not hold to None.

    `kv_heads` defaults to `heads`, `ffn_hidden` to 8/3 of the width rounded up to a multiple of 64. `rope_scaling`
    stretches the rotary frequencies as Llama 3.1 does. `qk_norm` normalizes queries and keys without weights.
    `document_token` is the id that each document begins with: attention then stays within a document, as if each were
    alone in the batch (Llama 3, arXiv:2407.21783, 3.2). Raises ValueError with every impossible size.
    """

    modality = "tokens"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int | None = None,
        ffn_hidden: int | None = None,
        rope_theta: float = 10_000.0,
        rope_scaling: Mapping[str, float] | None = None,
        norm_eps: float = 1e-5,
        qk_norm: bool = False,
        tied: bool = False,
        dropout: float = 0.0,
        document_token: int | None = None,
    ) -> None:
        if found := problems({k: v for k, v in locals().items() if k not in ("self", "__class__")}):
            raise ValueError("; ".join(found))
        super().__init__()
        self.context, self.width, self.layers, self.head_dim = context, width, layers, width // heads
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.tied, self.document_token = tied, document_token
        self.embed: nn.Embedding | None = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleDict(
            {
                str(i): Block(
                    width,
                    heads=heads,
                    kv_heads=kv_heads or heads,
                    ffn_hidden=ffn_hidden or -(-8 * width // 3 // 64) * 64,
                    norm_eps=norm_eps,
                    qk_norm=qk_norm,
                    dropout=dropout,
                )
                for i in range(layers)
            }
        )
        self.norm: nn.RMSNorm | None = nn.RMSNorm(width, eps=norm_eps)
        self.head: nn.Linear | None = nn.Linear(width, vocab_size, bias=False)
        self._tie()

    def forward(self, inputs: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """Logits (B, T, V) of token ids (B, T), or their loss when targets (B, T) are given.

        A pipeline stage without an embedding takes (B, T, D), one without a head gives (B, T, D).
        """
        start = 0 if cache is None else cache.length
        if self.embed is not None and start + inputs.shape[1] > self.context:
            raise ValueError(f"{start + inputs.shape[1]} positions do not fit in model.context={self.context}")
        rotary_C2K = self.rotary(start=start, device=inputs.device)
        mask = self.within_documents(inputs, cache) if self.document_token is not None else None
        x_BTD = self.embed(inputs) if self.embed is not None else inputs
        for name, block in self.blocks.items():
            x_BTD = block(x_BTD, rotary_C2K, mask, cache, name) if cache is not None else block(x_BTD, rotary_C2K, mask)
        if cache is not None:
            cache.length += inputs.shape[1]
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        if targets is not None and _is_bare(self.head):
            return ChunkedCrossEntropy.apply(
                x_BTD.flatten(0, 1), self.head.weight, targets.flatten(), torch.is_grad_enabled()
            )
        outputs = self.head(x_BTD) if self.head is not None else x_BTD
        return outputs if targets is None else self.loss(outputs, targets)

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the targets that are not -100, summed in fp32; 0 where there are none."""
        total = F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return total / (targets != -100).sum().clamp(min=1)

    def within_documents(self, inputs_BT: Tensor, cache: KeyValueCache | None) -> Tensor | BlockMask:
        """What lets each position see its own document up to itself."""
        document_BT = document_BS = (inputs_BT == self.document_token).cumsum(dim=1, dtype=torch.int32)
        if cache is not None:
            if cache.documents_BS is not None:
                document_BT = document_BT + cache.documents_BS[:, -1:]
                document_BS = torch.cat([cache.documents_BS, document_BT], dim=1)
            cache.documents_BS = document_BS
        elif documents.skips_blocks(inputs_BT.device, self.head_dim):
            return documents.block_mask(document_BT)
        return documents.dense_mask(document_BT, document_BS)

    def rotary(self, *, start: int = 0, device: torch.device | str) -> Tensor:
        """Cosines and sines (C, 2, K/2) in fp32 from position `start`, made here so that the model has no buffers.

        All C rows, whatever the length of the input: a block takes the first T, and never meets a new shape.
        """
        exponent_K = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        frequency_K = self.rope_theta**-exponent_K
        if self.rope_scaling is not None:
            frequency_K = _stretch(frequency_K, **self.rope_scaling)
        position_C = torch.arange(start, start + self.context, device=device, dtype=torch.float32)
        angle_CK = position_C[:, None] * frequency_K  # not a matmul, which autocast would round to bf16
        return torch.stack([angle_CK.cos(), angle_CK.sin()], dim=1)

    def initialize_parameter(self, name: str, param: Tensor, generator: torch.Generator) -> None:
        """Fill one full, undivided parameter, as a function of its name, its shape and the generator alone.

        Norms are 1. Matrices are normal with deviation sqrt(2 / 5D) (arXiv:1910.05895, 2.2: 0.02 at a width of 1,000,
        GPT-2's), and those that write to the residual stream with 1 / sqrt(2 * layers) of it, so that the stream's
        variance does not grow with depth (GPT-2, Radford et al. 2019, 2.3).
        """
        if param.ndim == 1:
            param.fill_(1.0)
            return
        residual = name.endswith(("attention.o.weight", "ffn.down.weight"))
        deviation = math.sqrt(2 / (5 * self.width)) / (math.sqrt(2 * self.layers) if residual else 1.0)
        param.normal_(0.0, deviation, generator=generator)

    def _tie(self) -> None:
        if self.tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def _apply(self, fn: Any, recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)
        self._tie()  # to_empty and to give each module a parameter of its own, which would part the two
        return self


def _stretch(
    frequency_K: Tensor, *, factor: float, low_frequency: float, high_frequency: float, original_context: float
) -> Tensor:
    """Divide slow rotary frequencies by `factor`, keep fast ones, blend between (Llama 3.1, arXiv:2407.21783, 3.4).

    `low_frequency` and `high_frequency` count the turns that a pair makes in `original_context` positions.
    """
    turns_K = original_context * frequency_K / (2 * math.pi)
    keep_K = ((turns_K - low_frequency) / (high_frequency - low_frequency)).clamp(0.0, 1.0)
    return frequency_K * (keep_K + (1.0 - keep_K) / factor)
