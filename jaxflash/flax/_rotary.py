"""Rotary position embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Rotary position embedding in the half-split convention: dims i and i + H/2 form a pair.

    Turns pair i by the angle position * theta ** (-2 i / H), so that the product of a rotated query and a rotated key
    depends on their positions' difference alone.

    Args:
      x: [B, T, N, H], H even.
      positions: Integers, [B, T] or [T].
      theta: Base of the wavelengths, which run from 2 pi to nearly 2 pi theta tokens. Static.

    Returns:
      Rotated x, in x's dtype; angles and products are float32. Differentiable in x.

    Source: Su et al., arXiv:2104.09864, equation 34, with the pairing of GPT-NeoX.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (positions[..., None].astype(jnp.float32) * frequencies)[..., None, :]  # [.., T, 1, H/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
