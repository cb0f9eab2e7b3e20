"""What the Flax tests share: random inputs, and how equal results must be."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def random_mask(seed, *shape):
    """A float 0/1 mask that lets every query see itself, so that no row is empty."""
    keep = jax.random.bernoulli(jax.random.key(seed), 0.4, shape) | jnp.eye(*shape[-2:], dtype=bool)
    return keep.astype(jnp.float32)


def assert_same(ours, expected):
    """Trees equal up to float32 rounding, relative to the largest element of all arrays (key's bias gradient is 0)."""
    ours, expected = (jax.tree.map(lambda x: np.asarray(x, np.float64), tree) for tree in (ours, expected))
    allowed = 64 * np.finfo(np.float32).eps * max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= allowed, f"{jax.tree_util.keystr(path)} differs by {np.abs(a - b).max()}"
