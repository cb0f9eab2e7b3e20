"""A decoder-only transformer over bytes: RMSNorm before each part, grouped query heads, SwiGLU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from examples.gpt.data import VOCABULARY
from jaxflash.flax.nnx import GroupedQueryAttention


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network.

    Attributes:
      features: Width of the residual stream.
      num_layers: Blocks of attention and feed-forward.
      num_heads: Query heads.
      num_kv_heads: Key and value heads; each serves num_heads // num_kv_heads query heads.
      dropout_rate: Of attention's softmax and of what each part adds to the residual stream.
    """

    features: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dropout_rate: float

    @property
    def head_dim(self) -> int:
        return self.features // self.num_heads


SIZES = {
    "tiny": ModelConfig(features=64, num_layers=2, num_heads=4, num_kv_heads=2, dropout_rate=0.05),
    "small": ModelConfig(features=128, num_layers=4, num_heads=4, num_kv_heads=2, dropout_rate=0.05),
    "medium": ModelConfig(features=512, num_layers=8, num_heads=8, num_kv_heads=4, dropout_rate=0.1),
    "large": ModelConfig(features=1024, num_layers=16, num_heads=16, num_kv_heads=4, dropout_rate=0.1),
    # The trunks of GPT-2's smallest and of a common 1.3 billion, without dropout: what benchmarks/gpt_step.py times.
    "124M": ModelConfig(features=768, num_layers=12, num_heads=12, num_kv_heads=12, dropout_rate=0.0),
    "1.3B": ModelConfig(features=2048, num_layers=24, num_heads=16, num_kv_heads=16, dropout_rate=0.0),
}


class FeedForward(nnx.Module):
    """SwiGLU, arXiv:2002.05202: out(silu(gate(x)) * up(x)), 8/3 times as wide inside, in steps of 64."""

    def __init__(self, features: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden = -(-features * 8 // 3 // 64) * 64
        self.gate = nnx.Linear(features, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(features, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(hidden, features, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), with dropout on what is added."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, implementation: str | None, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.features, dtype=dtype, rngs=rngs)
        self.attention = GroupedQueryAttention(
            config.features,
            config.num_heads,
            config.num_kv_heads,
            dropout_rate=config.dropout_rate,
            implementation=implementation,
            dtype=dtype,
            rngs=rngs,
        )
        self.feed_forward_norm = nnx.RMSNorm(config.features, dtype=dtype, rngs=rngs)
        self.feed_forward = FeedForward(config.features, dtype, rngs)
        self.dropout = nnx.Dropout(config.dropout_rate)

    def __call__(self, x: jax.Array, deterministic: bool, rngs: nnx.Rngs | None, decode: bool) -> jax.Array:
        attended = self.attention(self.attention_norm(x), deterministic=deterministic, rngs=rngs, decode=decode)
        x = x + self.dropout(attended, deterministic=deterministic, rngs=rngs)
        transformed = self.feed_forward(self.feed_forward_norm(x))
        return x + self.dropout(transformed, deterministic=deterministic, rngs=rngs)


class GPT(nnx.Module):
    """Predicts the next byte from those before it; the output layer is the embedding, transposed.

    Args:
      config: Sizes.
      dtype: Of the computation; parameters are float32.
      implementation: Of attention, as in `jaxflash.attention`.
      rngs: Initialises the parameters.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, implementation: str | None, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            VOCABULARY, config.features, dtype=dtype, embedding_init=nnx.initializers.normal(0.02), rngs=rngs
        )
        self.blocks = nnx.List([Block(config, dtype, implementation, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.features, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | None = None, decode: bool = False
    ) -> jax.Array:
        """Logits of the byte after each one.

        Args:
          tokens: Integers in [0, 256), [B, T].
          deterministic: No dropout. Static.
          rngs: Where dropout's keys come from, if not deterministic.
          decode: Append the tokens to the caches that `init_cache` made. Static.

        Returns:
          float32 [B, T, 256].
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, deterministic, rngs, decode)
        return self.embedding.attend(self.norm(x)).astype(jnp.float32)

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Empty caches for `max_length` tokens of `batch_size` sequences, needed for decode=True."""
        for block in self.blocks:
            block.attention.init_cache(batch_size, max_length)
