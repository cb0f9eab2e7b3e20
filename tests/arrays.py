"""Random inputs and comparisons that several test files share."""

import jax
import jax.numpy as jnp
import numpy as np


def qkv(B=2, T=9, S=11, N=6, K=3, H=8, Hv=5, dtype=jnp.float32, seed=0):
    """query [B, T, N, H], key [B, S, K, H], value [B, S, K, Hv], standard normal."""
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, Hv))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_same_bits(actual, expected):
    """Equal to the bit, NaN and infinities included."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_close(actual, expected, rtol=2e-5, atol=2e-5):
    """Equal up to a different order of float32 sums; `oracle.assert_no_worse_than` is the test of accuracy."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol, atol), actual, expected)
