"""A compact Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

At the sizes that a laptop trains, a step costs what its tensor operations move and launch as much as what they compute.
Hence the shape of this code: one matrix (batch x length, hidden) between the operations, queries and keys rotated
together, and native operations only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twophase.tasks.lm.config import ModelConfig
from twophase.tasks.lm.loss import cross_entropy

EMBEDDING_STD = 0.02


class Llama(nn.Module):
    """A Llama-like decoder that computes what `transformers.LlamaForCausalLM` does with the weights of `to_hf`.

        x_0     = E[tokens]
        x_i'    = x_i + O attention(R q, R k, v),     (q, k, v) = W_qkv norm(x_i)
        x_{i+1} = x_i' + D (silu(g) * u),             (g, u)    = W_gu norm(x_i')
        logits  = H norm(x_layers),                   norm(x)   = w * x / sqrt(mean(x^2) + eps)

    R turns the pair (x_j, x_{j + size/2}) of each head by the angle position / theta^(2 j / size). Embedding and head
    start as N(0, 0.02^2), the other matrices as N(0, 1 / fan_in), O and D divided by sqrt(2 layers), norms as 1.

    Args:
        seed: of the initial weights, which are the same on every device.
        compute_dtype: type of products, attention and the residual stream; None means the weights' type. With float32
            weights bfloat16 is mixed precision: gradients are cast to float32 before they are summed.
        recompute: keep only each block's input for the backward pass, and compute the rest again.

    Source: Touvron et al., "LLaMA" (2023). Su et al., "RoFormer" (2021). Zhang and Sennrich, "Root mean square layer
    normalization" (2019). Shazeer, "GLU variants improve Transformer" (2020). Ainslie et al., "GQA" (2023).

    >>> model = Llama(ModelConfig(layers=1), 96, seed=0)
    >>> tuple(model(torch.zeros(2, 5, dtype=torch.int64)).shape)
    (2, 5, 96)
    """

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_size: int,
        *,
        seed: int,
        compute_dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocabulary_size = vocabulary_size
        self.compute_dtype = compute_dtype
        self.recompute = recompute
        size = config.hidden_size
        self.embedding = nn.Parameter(torch.empty(vocabulary_size, size))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(size))
        # A tied head is absent rather than a second name for the embedding, so that no file holds a matrix twice.
        self.head = None if config.tie_embeddings else nn.Parameter(torch.empty(vocabulary_size, size))
        self._rotation: tuple[Any, tuple[Tensor, Tensor]] | None = None
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 1:  # a norm
                continue
            std = EMBEDDING_STD if name in ("embedding", "head") else weight.shape[1] ** -0.5
            if name.endswith((".output", ".down")):
                std *= (2 * config.layers) ** -0.5
            # Always on the CPU and in float32: random numbers differ by device and type.
            weight.data.copy_(std * torch.randn(weight.shape, generator=generator, device="cpu", dtype=torch.float32))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, vocabulary) of tokens (batch, length) int64, in the type of the computation."""
        x = self._hidden(tokens)
        return F.linear(x, self._head.to(x.dtype)).view(*tokens.shape, self.vocabulary_size)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy of next tokens, -log softmax(logits)[target], in nats; at least float32.

        Tokens and targets are (batch, length) int64.
        """
        return cross_entropy(self._hidden(tokens), self._head, targets.flatten())

    @property
    def _head(self) -> Tensor:
        return self.embedding if self.head is None else self.head

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Return the head's input, (batch x length, hidden_size)."""
        x = F.embedding(tokens.flatten(), self.embedding)
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        cos, sin = self._rotary(tokens.shape[1], x)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        return rms_norm(x, self.norm, self.config.norm_eps)

    def _rotary(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotation tables for a length, in the type and on the device of `like`."""
        if torch.compiler.is_compiling():
            # Not kept: what a compiled graph allocates may be overwritten by its next replay.
            return rotary_tables(self.config, length, like.dtype, like.device)
        key = (length, like.dtype, like.device)
        if self._rotation is None or self._rotation[0] != key:
            with torch.inference_mode(False):  # tables made by an evaluation must serve later gradients, too
                self._rotation = key, rotary_tables(self.config, length, like.dtype, like.device)
        return self._rotation[1]

    def to_hf(self) -> dict[str, Tensor]:
        """Copy the weights, by their names in `transformers.LlamaForCausalLM`; a tied head is left out."""
        parts: dict[str, Tensor] = {"model.embed_tokens": self.embedding}
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            parts |= {f"model.layers.{index}.{name}": part for name, part in block.hf_parts().items()}
        parts |= {"model.norm": self.norm} | ({} if self.head is None else {"lm_head": self.head})
        return {f"{name}.weight": part.detach().clone() for name, part in parts.items()}

    def hf_config(self, max_position_embeddings: int = 2048) -> dict[str, Any]:
        """Return this model's keyword arguments of `transformers.LlamaConfig`; the limit changes no logit."""
        config = self.config
        return {
            "vocab_size": self.vocabulary_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads or config.heads,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "tie_word_embeddings": config.tie_embeddings,
            "max_position_embeddings": max_position_embeddings,
        }


class Block(nn.Module):
    """One decoder block: attention, then SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_size = size // config.heads
        self.eps = config.norm_eps
        self.attention_norm = nn.Parameter(torch.ones(size))
        self.query_key_value = nn.Parameter(torch.empty((self.heads + 2 * self.kv_heads) * self.head_size, size))
        self.output = nn.Parameter(torch.empty(size, size))
        self.mlp_norm = nn.Parameter(torch.ones(size))
        self.gate_up = nn.Parameter(torch.empty(2 * inner, size))
        self.down = nn.Parameter(torch.empty(size, inner))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream (batch x length, hidden_size) after this block; see `rotary_tables`."""
        dtype = x.dtype
        x = x + F.linear(self._attention(x, cos, sin), self.output.to(dtype))
        h = rms_norm(x, self.mlp_norm, self.eps)
        weight = self.gate_up.to(dtype)
        if x.device.type == "cpu":
            # Two products with halves of one weight: their results are contiguous, so SiLU and its gradient run twice
            # as fast. No gradient has to be joined.
            gate, up = (F.linear(h, half) for half in weight.chunk(2))
        else:
            # One product, whose gradients the compiler writes side by side: 36 products fewer a step of 12 layers.
            gate, up = F.linear(h, weight).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down.to(dtype))

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads, size = self.heads, self.kv_heads, self.head_size
        h = rms_norm(x, self.attention_norm, self.eps)
        qkv = F.linear(h, self.query_key_value.to(x.dtype)).view(-1, cos.shape[0], heads + 2 * kv_heads, size)
        qk, v = qkv.split((heads + kv_heads, kv_heads), 2)
        qk = qk * cos + qk.roll(size // 2, -1) * sin
        q, k = qk.split((heads, kv_heads), 2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=heads != kv_heads
        )
        return attended.transpose(1, 2).reshape(x.shape)

    def hf_parts(self) -> dict[str, Tensor]:
        """Return views of the weights under transformers' names."""
        rows = self.head_size * self.heads, self.head_size * self.kv_heads, self.head_size * self.kv_heads
        query, key, value = self.query_key_value.split(rows)
        gate, up = self.gate_up.chunk(2)
        return {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": self.output,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": self.down,
            "input_layernorm": self.attention_norm,
            "post_attention_layernorm": self.mlp_norm,
        }


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize by the root mean square over the last dimension, weight * x / sqrt(mean(x^2) + eps)."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        # PyTorch has one kernel for it on GPUs, but on CPUs takes more operations than these: 3 % of a demo step.
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / weight.shape[0] + eps) * weight
    if weight.dtype != x.dtype:  # mixed precision: in the weight's type, and rounded once
        y = x.to(weight.dtype)
        return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def rotary_tables(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines such that `x * cos + x.roll(size / 2, -1) * sin` turns every head of x.

        angle[t, j] = t / theta^(2 j / size),   cos = (cos, cos),   sin = (-sin, sin)

    For positions t = 0 … length - 1: (length, 1, head size), or repeated over queries' and keys' heads on the CPU. The
    angles are float32 in transformers' order of operations, and pairs are its pairs.
    """
    size = config.hidden_size // config.heads
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequencies = 1.0 / config.rope_theta**exponents
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None, None] * frequencies
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    if device.type == "cpu":
        # Repeated in memory, because a product that broadcasts over heads runs loops of one head's few numbers.
        heads = config.heads + (config.kv_heads or config.heads)
        cos, sin = cos.expand(-1, heads, -1).contiguous(), sin.expand(-1, heads, -1).contiguous()
    return cos, sin
