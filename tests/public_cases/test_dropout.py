"""Faults reported for other libraries: dropout. BC-xx names a kind of fault."""

import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxflash


@pytest.mark.parametrize("sizes", [(5, 7, 6, 2, 8), (256, 256, 2, 2, 64)], ids=str)
def test_gradient_of_dropout(implementation, sizes):
    """BC-54 (nki-samples#81, FA#1251): the backward applied the keep mask at the wrong place."""
    T, S, N, K, H = sizes
    arrays = cases.qkv(54, 2, T, S, N, K, H) | {"dropout_key": jax.random.key(54)}
    cases.check(implementation, cases.problem(arrays, dropout_rate=0.3))


def test_value_of_one_hot_rows_shows_the_keep_mask(implementation):
    """BC-54: the elements that are kept are those of the documented function of (key, batch, head, row, column)."""
    B, T, S, N = 2, 9, 21, 3
    key = jax.random.key(5)
    v = np.broadcast_to(np.eye(S, dtype=np.float32)[None, :, None], (B, S, N, S))
    zeros = [np.zeros((B, n, N, 4), np.float32) for n in (T, S)]
    out = jaxflash.attention(*zeros, v, dropout_rate=0.3, dropout_key=key, implementation=implementation)
    seed = np.asarray(jax.random.bits(key, (2,), jnp.uint32))
    keep = oracle.dropout_keep(0.3, seed, np.arange(B), N, T, S)
    np.testing.assert_allclose(np.swapaxes(out, 1, 2), keep / S / 0.7, rtol=1e-5)


@pytest.mark.parametrize("rate", [1e-6, 0.1, 0.125, 0.5, 0.999])
def test_rate_is_kept(kernel, rate):
    """BC-57 (apex#1614, FA#2597): within 4 sigma of the rate, and the steps of 2**-16 in which it is held."""
    T, N = 512, 4
    q = np.zeros((1, T, N, 4), np.float32)
    v = np.ones((1, T, N, 1), np.float32)
    out = jaxflash.attention(q, q, v, dropout_rate=rate, dropout_key=jax.random.key(57), implementation=kernel)
    kept = float(np.mean(out)) * (1 - rate)
    sigma = math.sqrt(rate * (1 - rate) / (N * T * T))
    assert abs(kept - (1 - rate)) <= 4 * sigma + 2**-16


def test_rates_at_the_ends(implementation):
    """BC-57: 0 is no dropout, to the bit; 1 gives zeros everywhere; 1e-6 is below half a step and drops nothing."""
    arrays = cases.qkv(57, 2, 20, 30, 2, 1, 8)
    plain = cases.forward_and_gradients(implementation, cases.problem(arrays))
    keyed = arrays | {"dropout_key": jax.random.key(0)}
    cases.assert_same_bits(plain, cases.forward_and_gradients(implementation, cases.problem(keyed, dropout_rate=0.0)))
    tiny = cases.forward_and_gradients(implementation, cases.problem(keyed, dropout_rate=1e-6))
    np.testing.assert_allclose(tiny["out"], plain["out"], rtol=1e-5)
    all_dropped = cases.forward_and_gradients(implementation, cases.problem(keyed, dropout_rate=1.0, has_dlse=False))
    for name in ("out", "dquery", "dkey", "dvalue"):
        assert np.all(all_dropped[name] == 0), name
    # On a GPU a call with dropout takes another instance, whose logits are rounded elsewhere.
    rtol = 0 if implementation in ("cpu", "reference") else 1e-6
    np.testing.assert_allclose(all_dropped["lse"], plain["lse"], rtol=rtol)


def test_every_step_has_a_mask_of_its_own(kernel):
    """BC-58 (FA#314, PT#84614): the seed was baked in at trace time, so every step dropped the same elements."""
    T, S, rate = 32, 40, 0.5
    v = np.eye(S, dtype=np.float32)[None, :, None]
    zeros = [np.zeros((1, n, 1, 4), np.float32) for n in (T, S)]

    def kept(key):
        return jaxflash.attention(*zeros, v, dropout_rate=rate, dropout_key=key, implementation=kernel) > 0

    keys = jax.random.split(jax.random.key(58), 16)
    _, scanned = jax.jit(lambda keys: jax.lax.scan(lambda c, key: (c, kept(key)), 0, keys))(keys)
    compiled = jax.jit(kept)
    for i in range(16):
        assert np.array_equal(scanned[i], compiled(keys[i]))
    assert np.array_equal(scanned[3], kept(keys[3]))
    sigma = 0.5 / math.sqrt(T * S)
    for i in range(1, 16):
        assert abs(np.mean(scanned[0] == scanned[i]) - 0.5) < 4 * sigma


def test_batch_elements_and_heads_have_masks_of_their_own(implementation):
    """BC-56's kind on one device: elements agree only by chance between any two of (batch, head)."""
    B, T, S, N = 3, 24, 40, 4
    v = np.broadcast_to(np.eye(S, dtype=np.float32)[None, :, None], (B, S, N, S))
    zeros = [np.zeros((B, n, N, 4), np.float32) for n in (T, S)]
    out = jaxflash.attention(*zeros, v, dropout_rate=0.5, dropout_key=jax.random.key(1), implementation=implementation)
    planes = np.swapaxes(np.asarray(out) > 0, 1, 2).reshape(B * N, -1)
    for i in range(B * N):
        for j in range(i):
            assert abs(np.mean(planes[i] == planes[j]) - 0.5) < 5 * 0.5 / math.sqrt(T * S)
