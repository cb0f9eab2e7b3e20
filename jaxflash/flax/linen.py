"""Attention for Flax Linen: an `attention_fn` for `flax.linen.MultiHeadDotProductAttention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from flax import linen as nn

from jaxflash.flax._adapter import BoundOptions

__all__ = ["AttentionFn", "attention_fn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFn(BoundOptions):
    """Makes an `attention_fn` for Linen's attention modules that uses further options of `jaxflash.attention`.

        nn.MultiHeadDotProductAttention(..., attention_fn=AttentionFn(is_causal=True))

    Linen has no causal flag; is_causal=True here saves the [T, S] mask that `flax.linen.make_causal_mask` builds.

    Args:
      scale: As in `jaxflash.attention`. Default 1 / sqrt(H). Static.
      is_causal: Query t sees keys s <= t. Static.
      causal_alignment: As in `jaxflash.attention`. Static.
      local_window_size: As in `jaxflash.attention`. Refused in Linen's decode mode. Static.
      logits_soft_cap: As in `jaxflash.attention`. Static.
      deterministic_gradients: `deterministic` of `jaxflash.attention`: gradients the same to the bit. Static.
      implementation: As in `jaxflash.attention`. Static.
    """

    # Linen passes only the keywords that it finds in this signature, and drops the others silently: name every one.
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
        module: nn.Module | None = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        """Attention with the arguments of `flax.linen.dot_product_attention`.

        Differs from Flax's function in three points. A query that sees no key gets 0, Flax gives it the mean of all
        values. Dropout is drawn for every element, see `broadcast_dropout`. In decode mode (one query, several keys
        and a mask) a bound is_causal is ignored, since the mask already hides the empty part of the cache.

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
          force_fp32_for_softmax: Without effect: the softmax is always float32.
          qk_attn_weights_einsum: Must be None: there is no einsum to replace.
          attn_weights_value_einsum: Must be None, likewise.

        Returns:
          [..., T, N, Hv] in `dtype`. Differentiable as `jaxflash.attention`.

        Raises:
          NotImplementedError: module, an einsum or an algorithm as precision was given; a bound local_window_size in
            decode mode; or `jaxflash.attention` refuses.
          TypeError, ValueError: as `jaxflash.attention`.
        """
        del broadcast_dropout, force_fp32_for_softmax
        for name, einsum in (
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if einsum is not None:
                raise NotImplementedError(
                    f"{name} must be None: both products are part of one kernel; use Flax's own "
                    "dot_product_attention where you need to replace them."
                )
        return self.attend(
            query,
            key,
            value,
            bias,
            mask,
            is_causal=False,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            module=module,
        )


attention_fn = AttentionFn()
