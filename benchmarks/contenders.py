"""The attention functions that are compared: jaxflash's implementations and what else JAX users can call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jaxflash


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one attention call: q [B, T, N, H], k and v [B, S, K, H]."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int

    def flops(self, *, is_causal: bool, has_backward: bool) -> float:
        """Floating point operations of the matrix products, the numerator of every FLOP/s here.

        Forward: 2 products of 2*B*N*T*S*H each, half of it if causal. Forward and backward: 7 products instead of 2
        (the backward computes the scores again), so 3.5 times as much. Source: FlashAttention-2, arXiv:2307.08691,
        section 4.1.
        """
        forward = 4.0 * self.B * self.N * self.T * self.S * self.H
        return forward * (0.5 if is_causal else 1.0) * (3.5 if has_backward else 1.0)

    def random_inputs(self, dtype: jnp.dtype, seed: int = 0) -> tuple[jax.Array, ...]:
        """q, k, v and dout, standard normal."""
        q, kv, out = (
            (self.B, self.T, self.N, self.H),
            (self.B, self.S, self.K, self.H),
            (self.B, self.T, self.N, self.H),
        )
        keys = jax.random.split(jax.random.key(seed), 4)
        return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, (q, kv, kv, out), strict=True))


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute attention.

    Attributes:
      attend: (q, k, v, *, is_causal) -> out.
      refusal: Why it cannot run inputs of a dtype on the default device, or None.
    """

    attend: Callable[..., jax.Array]
    refusal: Callable[[jnp.dtype], str | None]


def contenders() -> dict[str, Contender]:
    """Every contender by name, ours first."""
    found = {f"jaxflash-{name}": _ours(name) for name in _reasons(jnp.dtype("float32"))}
    found["jax-xla"] = Contender(_jax_nn("xla"), lambda dtype: None)
    found["jax-cudnn"] = Contender(_jax_nn("cudnn"), _cudnn_refusal)
    return found


BASELINE = "jax-xla"  # what every ratio is against: the attention of a JAX user who installs nothing


def _ours(name: str) -> Contender:
    return Contender(functools.partial(jaxflash.attention, implementation=name), lambda dtype: _reasons(dtype)[name])


def _reasons(dtype: jnp.dtype) -> dict[str, str | None]:
    array = jax.ShapeDtypeStruct((1, 8, 1, 64), dtype)
    return jaxflash.why(array, array, array).reasons


def _jax_nn(implementation: str) -> Callable[..., jax.Array]:
    return functools.partial(jax.nn.dot_product_attention, implementation=implementation)


def _cudnn_refusal(dtype: jnp.dtype) -> str | None:
    if jax.default_backend() != "gpu":
        return f"cuDNN needs an NVIDIA GPU, the default device is {jax.default_backend()!r}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {dtype}"
    return None
