"""Attention for Flax NNX: an `attention_fn` for `flax.nnx.MultiHeadAttention`, and a module with a key-value cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxflash._api import attention
from jaxflash._types import Implementation
from jaxflash.flax._adapter import BoundOptions
from jaxflash.flax._rotary import rotate

__all__ = ["AttentionFn", "GroupedQueryAttention", "attention_fn", "rotate"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFn(BoundOptions):
    """Makes an `attention_fn` for `flax.nnx.MultiHeadAttention` that uses further options of `jaxflash.attention`.

        nnx.MultiHeadAttention(..., attention_fn=AttentionFn(logits_soft_cap=50.0), rngs=rngs)

    Equal options give equal, hashable objects, so that rebuilding a model does not compile it again.

    Args:
      scale: As in `jaxflash.attention`. Default 1 / sqrt(H). Static.
      is_causal: Causal in every call, whatever Flax passes. Static.
      causal_alignment: As in `jaxflash.attention`. Flax's own attention is "top_left", the default. Static.
      local_window_size: As in `jaxflash.attention`. Refused in Flax's decode mode. Static.
      logits_soft_cap: As in `jaxflash.attention`. Static.
      deterministic_gradients: `deterministic` of `jaxflash.attention`: gradients the same to the bit. Static.
      implementation: As in `jaxflash.attention`. Static.
    """

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype=None,
        precision=None,
        module: nnx.Module | None = None,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attention with the arguments of `flax.nnx.dot_product_attention`.

        Differs from Flax's function in three points. A query that sees no key gets 0, Flax gives it the mean of all
        values. Dropout is drawn for every element, see `broadcast_dropout`. In decode mode (one query, several keys
        and a mask) is_causal is ignored, since the mask already hides the empty part of the cache; Flax up to 0.12.8
        would let the query see only the first key.

        Args:
          query: [..., T, N, H], any number of batch dims.
          key: [..., S, K, H]. N must be a multiple of K.
          value: [..., S, K, Hv].
          bias: Added to the logits, broadcastable to [..., N, T, S]. Differentiable.
          mask: Nonzero = may attend; bool or a number, as Flax's make_*_mask give. Broadcastable like bias. Not an
            additive mask: pass that as bias.
          broadcast_dropout: Accepted and without effect. Flax, by default, draws one [T, S] pattern and uses it for
            all batch elements and heads; here every element of [..., N, T, S] is drawn for itself, as Flax does with
            broadcast_dropout=False. The rate and the expectation are the same, the patterns are not.
          dropout_rng: A `jax.random.key`; needed when dropout_rate > 0 and deterministic is False.
          dropout_rate: Probability of dropping an element of the softmax. Static.
          deterministic: No dropout. Static.
          dtype: query, key and value are cast to it. Default: their common dtype. float16, bfloat16 or float32.
          precision: A `jax.lax.Precision` or its name; without effect, sums are always float32. Algorithms are refused.
          module: Must be None, that is sow_weights=False: the attention weights are never formed.
          is_causal: Query t sees keys s <= t. Static.
          input_positions: Must be None: no rotary embedding is applied here.

        Returns:
          [..., T, N, Hv] in `dtype`. Differentiable as `jaxflash.attention`.

        Raises:
          NotImplementedError: module, input_positions or an algorithm as precision was given; a bound
            local_window_size in decode mode; or `jaxflash.attention` refuses.
          TypeError, ValueError: as `jaxflash.attention`.
        """
        del broadcast_dropout
        if input_positions is not None:
            raise NotImplementedError(
                "input_positions must be None: this attention_fn applies no rotary embedding; rotate query and key in "
                "a wrapper around it, or use jaxflash.flax.nnx.GroupedQueryAttention."
            )
        return self.attend(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=is_causal,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            module=module,
        )


attention_fn = AttentionFn()


class GroupedQueryAttention(nnx.Module):
    """Causal self-attention with grouped key-value heads, rotary positions, dropout and a key-value cache.

    Computes out(attention(rotate(query(x)), rotate(key(x)), value(x))). The four projections have the names and
    kernel shapes of `flax.nnx.MultiHeadAttention`: query [in, N, H], key and value [in, K, H], out [N, H, out].

    `train()` and `eval()` of NNX switch dropout through the attribute `deterministic`, which starts as False.

    Args:
      in_features: Size of x's last dim.
      num_heads: N, query heads.
      num_kv_heads: K, key and value heads; must divide num_heads. Default num_heads.
      head_dim: H. Default in_features // num_heads, which must then divide evenly.
      out_features: Size of the result's last dim. Default in_features.
      rope_theta: Base of the rotary embedding (see `rotate`), None = no positions. H must be even with it.
      dropout_rate: Probability of dropping an element of the softmax.
      use_bias: Whether the projections have biases.
      local_window_size: As in `jaxflash.attention`.
      logits_soft_cap: As in `jaxflash.attention`.
      use_sinks: A learned logit a head, starting at 0, takes part in the softmax's denominator.
      is_causal: Query t sees keys s <= t.
      implementation: As in `jaxflash.attention`.
      dtype: Of the computation: float16, bfloat16 or float32. Default: the common one of x and the parameters.
      param_dtype: Of the parameters.
      kernel_init: Initializer of the four kernels. Default `nnx.initializers.lecun_normal()`.
      rngs: Stream `params` initialises; stream `dropout` is forked and kept if dropout_rate > 0.

    Raises:
      ValueError: sizes that do not fit together.

    Source: Ainslie et al., arXiv:2305.13245 (grouped heads); Su et al., arXiv:2104.09864 (rotary embedding).
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        out_features: int | None = None,
        rope_theta: float | None = 10_000.0,
        dropout_rate: float = 0.0,
        use_bias: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        use_sinks: bool = False,
        is_causal: bool = True,
        implementation: Implementation | None = None,
        dtype=None,
        param_dtype=jnp.float32,
        kernel_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        self.in_features = in_features
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _head_dim(in_features, num_heads, head_dim, rope_theta)
        self.out_features = in_features if out_features is None else out_features
        self.rope_theta = rope_theta
        self.dropout_rate = dropout_rate
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.is_causal = is_causal
        self.implementation = implementation
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.deterministic = False
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, it was {self.num_kv_heads}.")

        def project(inputs, outputs, axis):
            return nnx.LinearGeneral(
                inputs,
                outputs,
                axis=axis,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init or nnx.initializers.lecun_normal(),
                rngs=rngs,
            )

        self.query = project(in_features, (num_heads, self.head_dim), -1)
        self.key = project(in_features, (self.num_kv_heads, self.head_dim), -1)
        self.value = project(in_features, (self.num_kv_heads, self.head_dim), -1)
        self.out = project((num_heads, self.head_dim), self.out_features, (-2, -1))
        self.sinks = nnx.Param(jnp.zeros((num_heads,), param_dtype)) if use_sinks else nnx.data(None)
        self.rngs = rngs.dropout.fork() if dropout_rate > 0 else nnx.data(None)
        self.cached_key = nnx.data(None)
        self.cached_value = nnx.data(None)
        self.cache_index = nnx.data(None)

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        decode: bool = False,
    ) -> jax.Array:
        """Attends from x to x, or with decode=True to everything that the cache holds, x included.

        Args:
          x: [B, T, in_features].
          positions: int32 [B, T] or [T], for the rotary embedding only; what a query may see follows from the order
            of the tokens. Default: 0, 1, ..., counted on from the cache's length with decode=True.
          segment_ids: int32 [B, T]; a token sees its own segment. Negative = padding.
          deterministic: No dropout. Default: the attribute. Static.
          rngs: Where dropout's key comes from: `nnx.Rngs` (its stream `dropout`), a stream, or a `jax.random.key`.
            Default: the stream kept at construction.
          decode: Append the T tokens of x to the cache and attend with them as its last ones. Works for a whole prompt
            as for single tokens, and under jit and scan. Static.

        Returns:
          [B, T, out_features]. Differentiable in x and the parameters. With decode=True, tokens that no longer fit
          into the cache make the result NaN where the length is traced.

        Raises:
          ValueError: x does not fit the module or the cache; the cache is missing or full; no source of randomness.
          NotImplementedError: segment_ids with decode=True; or `jaxflash.attention` refuses.
        """
        if x.ndim != 3 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must have shape [B, T, {self.in_features}], its shape was {list(x.shape)}.")
        start = self._decode_start(x, segment_ids) if decode else 0
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.rope_theta is not None:
            if positions is None:
                positions = start + jnp.arange(x.shape[1], dtype=jnp.int32)
            query = rotate(query, positions, self.rope_theta)
            key = rotate(key, positions, self.rope_theta)
        lengths = None
        if decode:
            key, value = self._append(start, key, value)
            lengths = jnp.full((x.shape[0],), start + x.shape[1], jnp.int32)
        dropout_key = self._dropout_key(deterministic, rngs)
        out = attention(
            query,
            key,
            value,
            is_causal=self.is_causal,
            causal_alignment="bottom_right",
            key_value_seq_lengths=lengths,
            query_segment_ids=segment_ids,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            dropout_rate=0.0 if dropout_key is None else self.dropout_rate,
            dropout_key=dropout_key,
            implementation=self.implementation,
        )
        out = self.out(out)
        return jnp.where(start + x.shape[1] > key.shape[1], jnp.nan, out) if decode else out

    def init_cache(self, batch_size: int, max_length: int, dtype=None) -> None:
        """Gives the module an empty cache, which decode=True needs; again, to start a new sequence.

        The cache is not sharded. On a mesh with Explicit axes, replace `cached_key` and `cached_value` by `nnx.Cache`s
        with the sharding of x's batch.

        Args:
          batch_size: B of the calls with decode=True.
          max_length: Tokens that the cache can hold.
          dtype: Of the cached keys and values; they are cast to query's dtype when read. Default: the module's dtype,
            else param_dtype.
        """
        shape = (batch_size, max_length, self.num_kv_heads, self.head_dim)
        dtype = dtype or self.dtype or self.param_dtype
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def set_view(self, deterministic: bool | None = None) -> None:
        """Lets `nnx.view` switch dropout.

        Args:
          deterministic: No dropout; None leaves it as it is.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _decode_start(self, x, segment_ids) -> jax.Array:
        """The number of tokens already cached, after checking that x can follow them."""
        if segment_ids is not None:
            raise NotImplementedError("segment_ids must be None with decode=True: the cache keeps no segments.")
        if not self.is_causal:
            raise ValueError("decode=True needs is_causal=True, it was False: earlier results would have to change.")
        if self.cached_key is None:
            raise ValueError("decode=True needs a cache, there was none; call init_cache(batch_size, max_length).")
        batch_size, max_length = self.cached_key.shape[:2]
        if x.shape[0] != batch_size or x.shape[1] > max_length:
            raise ValueError(
                f"x must fit the cache of {batch_size} sequences of {max_length} tokens, its shape was "
                f"{list(x.shape)}; call init_cache with the sizes you need."
            )
        start = self.cache_index[...]
        if not isinstance(start, jax.core.Tracer) and start + x.shape[1] > max_length:
            raise ValueError(
                f"x must fit into what is left of the cache, it has {x.shape[1]} tokens and {start} of {max_length} "
                "are taken; call init_cache with a larger max_length."
            )
        return start

    def _append(self, start, key, value) -> tuple[jax.Array, jax.Array]:
        """Writes key and value [B, T, K, H] into the cache; returns all of it, [B, max_length, K, H]."""
        for cached, new in ((self.cached_key, key), (self.cached_value, value)):
            cached[...] = jax.lax.dynamic_update_slice(cached[...], new.astype(cached.dtype), (0, start, 0, 0))
        self.cache_index[...] = start + key.shape[1]
        return self.cached_key[...].astype(key.dtype), self.cached_value[...].astype(value.dtype)

    def _dropout_key(self, deterministic, rngs) -> jax.Array | None:
        """The key for this call's dropout, None if nothing is to be dropped."""
        if self.dropout_rate == 0 or (self.deterministic if deterministic is None else deterministic):
            return None
        rngs = self.rngs if rngs is None else rngs
        if isinstance(rngs, nnx.Rngs):
            return rngs.dropout()
        return rngs() if isinstance(rngs, nnx.RngStream) else rngs


def _head_dim(in_features: int, num_heads: int, head_dim: int | None, rope_theta: float | None) -> int:
    if head_dim is None:
        if num_heads < 1 or in_features % num_heads:
            raise ValueError(
                f"num_heads must divide in_features {in_features} unless head_dim is given, it was {num_heads}."
            )
        head_dim = in_features // num_heads
    if rope_theta is not None and head_dim % 2:
        raise ValueError(f"head_dim must be even for the rotary embedding, it was {head_dim}; or pass rope_theta=None.")
    return head_dim
