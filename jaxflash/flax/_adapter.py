"""What the Linen and the NNX adapter share: from the arguments that Flax passes to those of `jaxflash.attention`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxflash._api import attention
from jaxflash._types import CausalAlignment, Implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """The options of `jaxflash.attention` that Flax's calls do not carry. Hashable; equal options compare equal."""

    scale: float | None = None
    is_causal: bool = False
    causal_alignment: CausalAlignment = "top_left"
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    deterministic_gradients: bool = False
    implementation: Implementation | None = None

    def attend(
        self,
        query,
        key,
        value,
        bias,
        mask,
        *,
        is_causal,
        dropout_rng,
        dropout_rate,
        deterministic,
        dtype,
        precision,
        module,
    ) -> jax.Array:
        """Attention as Flax's functions define it, with these options added."""
        if module is not None:
            raise NotImplementedError(
                "module must be None (sow_weights=False): the attention weights it would record are never formed; "
                "use Flax's own dot_product_attention where you need them."
            )
        _check_precision(precision)
        query, key, value = (jnp.asarray(x) for x in (query, key, value))
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        is_causal = is_causal or self.is_causal
        if mask is not None:
            mask = _all_dims(mask, query.ndim) != 0
            if query.shape[-3] == 1 < key.shape[-3]:
                is_causal = False
                self._check_decode_window()
        is_dropping = dropout_rate > 0 and not deterministic
        if is_dropping and dropout_rng is None:
            raise ValueError(
                f"dropout_rng must be given when dropout_rate > 0 and deterministic is False, it was None and "
                f"dropout_rate {dropout_rate}; pass a jax.random.key or deterministic=True."
            )
        return attention(
            query,
            key,
            value,
            None if bias is None else _all_dims(bias, query.ndim),
            mask,
            scale=self.scale,
            is_causal=is_causal,
            causal_alignment=self.causal_alignment,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            dropout_rate=dropout_rate if is_dropping else 0.0,
            dropout_key=dropout_rng if is_dropping else None,
            deterministic=self.deterministic_gradients,
            implementation=self.implementation,
        )

    def _check_decode_window(self) -> None:
        if self.local_window_size is not None:
            raise NotImplementedError(
                "local_window_size cannot be used with one query, several keys and a mask, which is how Flax's "
                "attention modules decode: the call does not say at which key the query stands; use "
                "jaxflash.flax.nnx.GroupedQueryAttention, whose cache does, or put the window into the mask."
            )


def _all_dims(x, ndim: int) -> jax.Array:
    """x with leading dims of 1 up to `ndim`, as NumPy's broadcasting adds them."""
    x = jnp.asarray(x)
    return x.reshape((1,) * max(ndim - x.ndim, 0) + x.shape)


def _check_precision(precision) -> None:
    """Accepts what asks for at most float32 arithmetic, refuses a choice of algorithm."""
    for choice in precision if isinstance(precision, tuple) else (precision,):
        try:
            jax.lax.Precision(choice)
        except ValueError:
            raise NotImplementedError(
                f"precision must be None or a jax.lax.Precision, it was {choice!r}: the algorithm of the products "
                "cannot be chosen."
            ) from None
