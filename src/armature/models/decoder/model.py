"""A decoder-only language model in the standard form: RMSNorm, rotary positions, SwiGLU,
grouped-query attention.

Llama (arXiv:2302.13971, arXiv:2407.21783) is this model with the published sizes. The loss is at
the end of `Decoder.forward`; `loss.py` computes it without holding all the logits.

Shapes: B batch, T positions, D width, V vocabulary, H query heads, G key-value heads, K head width,
C context.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from armature.models.autocast import to_compute_dtype
from armature.models.decoder import documents as packing
from armature.models.decoder import names, rope
from armature.models.decoder.cache import KeyValueCache
from armature.models.decoder.check import ffn_hidden_of, problems, windows_of
from armature.models.decoder.loss import Head, computes_loss
from armature.models.loss import mean_cross_entropy
from armature.models.plan import by_rows


def rotate(x_BHTK: Tensor, rotary_C2K: Tensor, start: int = 0) -> Tensor:
    """Rotate each pair (i, i + K/2) by its position's angle (RoFormer, arXiv:2104.09864), always in
    fp32. The first position of x is `start`.
    """
    cos_TK, sin_TK = rotary_C2K[..., start : start + x_BHTK.shape[2], :, :].unbind(-2)
    x, y = x_BHTK.float().chunk(2, dim=-1)
    return torch.cat([x * cos_TK - y * sin_TK, y * cos_TK + x * sin_TK], dim=-1).to(x_BHTK.dtype)


def takes_groups(v_BGTK: Tensor, mask: Tensor | None) -> bool:
    """Return whether a kernel that does not hold all the scores takes fewer key-value heads than
    query heads.

    Of CUDA's, only flash attention does before torch 2.14: in 16 bits, without a mask, from compute
    capability 8.0 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). The memory-efficient one
    takes equally many heads.
    """
    if v_BGTK.device.type != "cuda":
        return True
    flash = (
        mask is None and v_BGTK.dtype in (torch.bfloat16, torch.float16) and v_BGTK.shape[-1] <= 256
    )
    return flash and torch.cuda.get_device_properties(v_BGTK.device).major >= 8


class AttentionCore(nn.Module):
    """Rotary positions and attention: all that looks at other positions. It has no weights.

    Queries, keys and values come first, since a context axis exchanges them here
    (`parallel.context`). Fewer queries than keys are those of the last positions.
    """

    def __init__(self, *, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, rotary_C2K: Tensor,
        mask: Tensor | BlockMask | None = None, cache: KeyValueCache | None = None, name: str = "",
    ) -> Tensor:  # fmt: skip
        """Return attention (B, H, T, K)."""
        if cache is None:
            start = k_BGTK.shape[2] - q_BHTK.shape[2]
            q_BHTK, k_BGTK = rotate(q_BHTK, rotary_C2K, start), rotate(k_BGTK, rotary_C2K)
        else:  # of one position, the number of operations is what takes time
            both = rotate(torch.cat([q_BHTK, k_BGTK], dim=1), rotary_C2K)
            q_BHTK, k_BGTK = both.split([q_BHTK.shape[1], k_BGTK.shape[1]], dim=1)
            k_BGTK, v_BGTK = cache.extend(name, k_BGTK, v_BGTK, window=self.window)
        seen = k_BGTK.shape[2]
        if mask is None:  # made here: only here T is whole under sequence parallelism
            mask = packing.position_mask(
                q_BHTK.shape[2],
                seen,
                window=self.window,
                device=q_BHTK.device,
                head_dim=q_BHTK.shape[3],
                cached=cache is not None,
            )
        elif cache is not None and not isinstance(mask, BlockMask):
            mask = mask[..., -seen:]  # it has dropped the positions before a window
        elif mask.shape[-2] != q_BHTK.shape[2]:  # a piece of the positions
            mask = packing.rows(mask, seen - q_BHTK.shape[2], seen)
        if isinstance(mask, BlockMask):
            return packing.attend(q_BHTK, k_BGTK, v_BGTK, mask)
        if q_BHTK.shape[1] != k_BGTK.shape[1] and not takes_groups(v_BGTK, mask):
            groups = q_BHTK.shape[1] // k_BGTK.shape[1]
            k_BGTK, v_BGTK = (x.repeat_interleave(groups, dim=1) for x in (k_BGTK, v_BGTK))
        return F.scaled_dot_product_attention(
            q_BHTK, k_BGTK, v_BGTK, attn_mask=mask, enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
            is_causal=mask is None and q_BHTK.shape[2] == seen,
        )  # fmt: skip


class Attention(nn.Module):
    """Causal self-attention with possibly fewer key-value heads than query heads (GQA,
    arXiv:2305.13245).
    """

    def __init__(
        self, width: int, *, heads: int, kv_heads: int, qk_norm: bool | str, norm_eps: float,
        head_dim: int, bias: bool, window: int | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_dim, self.window = head_dim, window
        self.qk_norm, self.norm_eps = qk_norm, norm_eps
        self.q = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        if qk_norm == "weighted":
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=norm_eps) for _ in range(2))
        self.core = AttentionCore(window=window)
        self.o = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(
        self, x_BTD: Tensor, rotary_C2K: Tensor, mask: Tensor | BlockMask | None = None,
        cache: KeyValueCache | None = None, name: str = "",
    ) -> Tensor:  # fmt: skip
        # -1: under tensor parallelism a rank holds only some of the heads, and projections gather a
        # sequence shard
        q_BHTK, k_BGTK, v_BGTK = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        )
        if self.qk_norm == "weighted":
            q_BHTK, k_BGTK = self.q_norm(q_BHTK), self.k_norm(k_BGTK)
        elif self.qk_norm:
            q_BHTK = F.rms_norm(q_BHTK, (self.head_dim,), eps=self.norm_eps)
            k_BGTK = F.rms_norm(k_BGTK, (self.head_dim,), eps=self.norm_eps)
        a_BHTK = self.core(q_BHTK, k_BGTK, v_BGTK, rotary_C2K, mask, cache, name)
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
    """Pre-norm residual block. Its further options are those of `Attention`."""

    def __init__(
        self, width: int, *, ffn_hidden: int, norm_eps: float, dropout: float, **attention: Any
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.RMSNorm(width, eps=norm_eps)
        self.attention = Attention(width, norm_eps=norm_eps, **attention)
        self.ffn_norm = nn.RMSNorm(width, eps=norm_eps)
        self.ffn = FeedForward(width, hidden=ffn_hidden)

    def forward(
        self, x_BTD: Tensor, rotary_C2K: Tensor, mask: Tensor | BlockMask | None = None,
        cache: KeyValueCache | None = None, name: str = "",
    ) -> Tensor:  # fmt: skip
        attended_BTD = self.attention(
            to_compute_dtype(self.attention_norm(x_BTD)), rotary_C2K, mask, cache, name
        )
        x_BTD = x_BTD + F.dropout(attended_BTD, self.dropout, self.training)
        changed_BTD = self.feed_forward(to_compute_dtype(self.ffn_norm(x_BTD)))
        return x_BTD + F.dropout(changed_BTD, self.dropout, self.training)

    def feed_forward(self, x_BTD: Tensor) -> Tensor:
        return self.ffn(x_BTD)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head; a pipeline stage sets the parts that it does not hold to
    None.

    `kv_heads` defaults to `heads`, `head_dim` to width / heads, `ffn_hidden` to 8/3 of the width
    rounded up to a multiple of 64. `attention_bias` adds biases to queries, keys and values.
    `qk_norm` normalizes the queries and keys of each head: true without weights, "weighted" with.
    `windows` has one entry for each block: a position attends to so many newest positions, itself
    included, or to all (null); a single number is that of every block. `rope_scaling` stretches the
    rotary frequencies: `kind` llama3 (if it is left out), yarn or linear, and its numbers
    (`rope.py`). `pretrained` names the Hugging Face folder that the weights of a new run come from;
    the strategy reads it. `document_token` is the id that begins each document: attention then
    stays within a document, as if it were alone in the batch (Llama 3, arXiv:2407.21783, 3.2).
    Raises ValueError with every impossible size.
    """

    modality = "tokens"
    # without all the logits: a pipeline gives its last stage the targets
    computes_loss_in_forward = True
    pretrained_name = staticmethod(names.theirs)

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_hidden: int | None = None,
        rope_theta: float = 10_000.0,
        rope_scaling: Mapping[str, Any] | None = None,
        norm_eps: float = 1e-5,
        qk_norm: bool | str = False,
        attention_bias: bool = False,
        windows: int | Sequence[int | None] | None = None,
        tied: bool = False,
        dropout: float = 0.0,
        document_token: int | None = None,
        pretrained: str | None = None,
    ) -> None:
        if found := problems({k: v for k, v in locals().items() if k not in ("self", "__class__")}):
            raise ValueError("; ".join(found))
        super().__init__()
        self.context, self.width, self.layers, self.head_dim = (
            context,
            width,
            layers,
            head_dim or width // heads,
        )
        self.rope_theta, self.rope_scaling, self.pretrained = rope_theta, rope_scaling, pretrained
        self.windows = windows_of(windows, layers=layers)
        self.tied, self.document_token = tied, document_token
        self.embed: nn.Embedding | None = nn.Embedding(vocab_size, width)
        block = partial(
            self.make_block,
            heads=heads,
            kv_heads=kv_heads or heads,
            head_dim=self.head_dim,
            bias=attention_bias,
            norm_eps=norm_eps,
            qk_norm=qk_norm,
            dropout=dropout,
            ffn_hidden=ffn_hidden or ffn_hidden_of(width),
        )
        self.blocks = nn.ModuleDict(
            {str(i): block(i, window=window) for i, window in enumerate(self.windows)}
        )
        self.norm: nn.RMSNorm | None = nn.RMSNorm(width, eps=norm_eps)
        self.head: Head | None = Head(width, vocab_size)
        self._tie()

    def make_block(self, index: int, **options: Any) -> Block:
        """Return the block with this number. A model of other blocks overrides it."""
        return Block(self.width, **options)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None,
        documents: Tensor | None = None, reduction: str = "mean",
    ) -> Tensor:  # fmt: skip
        """Return logits (B, T, V) of token ids (B, T), or their loss if targets (B, T) are given:
        the mean, or with reduction "none" that of each target, if the head `computes_loss`.

        `documents` (B, T) numbers the documents that a row packs, in order: attention stays within
        each. A pipeline stage without an embedding takes (B, T, D); one without a head returns (B,
        T, D).
        """
        start = 0 if cache is None else cache.length
        end, room = start + inputs.shape[1], (cache and cache.positions) or self.context
        if end > room:
            raise ValueError(f"{end} positions do not fit in {room} (model.context={self.context})")
        rotary = partial(self.rotary, device=inputs.device)
        rotary_C2K = rotary() if cache is None else cache.rotary(rotary)
        masks: dict[int | None, Tensor] | dict[int | None, BlockMask] = {}
        within = cache is not None and cache.documents_BS is not None
        if documents is not None or self.document_token is not None or within:
            masks = self.within_documents(inputs, cache, documents)
        x_BTD = self.embed(inputs) if self.embed is not None else inputs
        for name, block in self.blocks.items():
            mask = masks.get(self.windows[int(name)])
            x_BTD = (
                block(x_BTD, rotary_C2K, mask, cache, name)
                if cache is not None
                else block(x_BTD, rotary_C2K, mask)
            )
        if cache is not None:
            x_BTD = cache.advance(x_BTD)
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        # a tensor axis replaces it
        own_loss = getattr(self.loss, "unsharded", self.loss) is Decoder.loss
        own_loss = own_loss or reduction == "none"
        if targets is not None and own_loss and computes_loss(self.head):
            # `self.loss` of the head's outputs, without holding all of them
            return self.head(x_BTD, targets, reduction)
        if reduction != "mean":
            raise ValueError("reduction: a head that does not compute the loss gives its logits")
        outputs = self.head(x_BTD) if self.head is not None else x_BTD
        return outputs if targets is None else self.loss(outputs, targets)

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (B, T, V), in nats, over the targets (B, T) that
        are not -100.
        """
        return mean_cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def flops_per_sample(self, inputs: Tensor) -> float:
        """Return the FLOPs of forward and backward of one sample of `inputs` (B, …, T), by PaLM's
        formula.

        Per token, 6 for each weight of a matrix and 12 L H K T for attention (arXiv:2204.02311,
        appendix B).
        """
        positions, tokens = inputs.shape[-1], inputs[0].numel()  # a sample may be several rows
        linears = [module for module in self.modules() if isinstance(module, nn.Linear)]
        matrices = sum(module.in_features * module.out_features for module in linears)
        attention = sum(  # L H K T; a window in place of T where it is shorter
            module.q.out_features * min(positions, module.window or positions)
            for module in self.modules() if isinstance(module, Attention)
        )  # fmt: skip
        return float((6 * matrices + 12 * attention) * tokens)

    def within_documents(
        self, inputs_BT: Tensor, cache: KeyValueCache | None, document_BT: Tensor | None = None
    ) -> dict[int | None, Tensor] | dict[int | None, BlockMask]:
        """Return, for each window, the mask that lets each position see its own document up to
        itself.
        """
        if document_BT is None:
            begins_BT = (
                torch.zeros_like(inputs_BT)
                if (token := self.document_token) is None
                else inputs_BT == token
            )
            document_BT = begins_BT.cumsum(dim=1, dtype=torch.int32)
        document_BS = document_BT
        if cache is not None:
            if cache.documents_BS is not None:
                document_BT = document_BT + cache.documents_BS[:, -1:]
                document_BS = torch.cat([cache.documents_BS, document_BT], dim=1)
            cache.documents_BS = document_BS
        elif packing.skips_blocks(inputs_BT.device, self.head_dim):
            return {
                window: packing.block_mask(document_BT, window=window) for window in {*self.windows}
            }
        return {
            window: packing.dense_mask(document_BT, document_BS, window=window)
            for window in {*self.windows}
        }

    def rotary(self, *, device: torch.device | str) -> Tensor:
        """Return cosines and sines (C, 2, K/2) in fp32. Computing them here avoids buffers.

        There are always C rows, whatever the input's length: a block takes the first T, so its
        shapes never change.
        """
        frequency_K, scale = rope.frequencies(
            self.head_dim, theta=self.rope_theta, scaling=self.rope_scaling, device=device
        )
        position_C = torch.arange(self.context, device=device, dtype=torch.float32)
        # not a matmul, which autocast would round to bf16
        angle_CK = position_C[:, None] * frequency_K
        rotary_C2K = torch.stack([angle_CK.cos(), angle_CK.sin()], dim=1)
        return rotary_C2K if scale == 1.0 else rotary_C2K * scale

    @by_rows
    def initialize_parameter(self, name: str, param: Tensor, generator: torch.Generator) -> None:
        """Fill rows of one parameter, as a function of its name, its row's size and the generator
        alone.

        Norms are 1, biases 0. Matrices are normal with deviation sqrt(2 / 5D) (arXiv:1910.05895,
        2.2; at a width of 1,000 that is GPT-2's 0.02). Those that write to the residual stream get
        1 / sqrt(2 * layers) of it, so that the stream's variance does not grow with depth (GPT-2,
        Radford et al. 2019, 2.3).
        """
        if param.ndim == 1:
            param.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        residual = name.endswith(("attention.o.weight", "ffn.down.weight"))
        deviation = math.sqrt(2 / (5 * self.width)) / (
            math.sqrt(2 * self.layers) if residual else 1.0
        )
        param.normal_(0.0, deviation, generator=generator)

    def _tie(self) -> None:
        if self.tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def _apply(self, fn: Any, recurse: bool = True) -> "Decoder":
        super()._apply(fn, recurse)
        self._tie()  # to_empty and to give each module its own parameter, which breaks the tie
        return self
