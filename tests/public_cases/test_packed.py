"""Faults reported for other libraries: packed sequences. BC-xx names a kind of fault."""

import cases
import jax
import numpy as np
import pytest

import jaxflash


def packed(seed, q_lengths, k_lengths, heads, kv_heads, head_dim, size=1.0, spare=0):
    """Arrays with sequences of these lengths, and `spare` tokens that belong to none."""
    offsets = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (q_lengths, k_lengths)]
    arrays = cases.qkv(seed, (), offsets[0][-1] + spare, offsets[1][-1] + spare, heads, kv_heads, head_dim, size=size)
    return arrays | {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}


EMPTY = {
    "a: empty first and last queries": ([0, 151, 105, 0], [317, 217, 105, 384], 4, 1, 64),
    "a: wide heads": ([0, 151, 105, 0], [37, 217, 105, 84], 4, 1, 256),
    "b: one token in a batch of four": ([0, 1, 0, 0], [0, 1, 0, 0], 21, 7, 120),
    "c: all empty": ([0, 0, 0], [0, 0, 0], 4, 2, 32),
    "d: queries without keys": ([5, 3], [0, 0], 4, 2, 32),
    "d: queries without keys beside others": ([5, 9, 3], [0, 8, 0], 4, 2, 32),
}


@pytest.mark.parametrize("lengths", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("spare", [0, 6])
def test_empty_sequences(kernel, lengths, spare):
    """BC-28 (FA#1713, FA#2562, FA#1537, FA#1155): garbage, faults and hangs for sequences of length 0."""
    arrays = packed(28, *lengths, spare=spare)
    got = cases.check(kernel, cases.problem(arrays))
    q_sequence = np.repeat(range(len(lengths[0])), lengths[0])
    k_sequence = np.repeat(range(len(lengths[1])), lengths[1])
    lonely_keys = np.array(lengths[0])[k_sequence] == 0
    lonely_rows = np.array(lengths[1])[q_sequence] == 0
    for name in ("dkey", "dvalue"):
        assert np.all(got[name][: len(k_sequence)][lonely_keys] == 0) and np.all(got[name][len(k_sequence) :] == 0)
    assert np.all(got["out"][: len(q_sequence)][lonely_rows] == 0)
    assert np.all(got["lse"][: len(q_sequence)][lonely_rows] == -np.inf)


def test_empty_sequences_of_the_reference():
    """BC-28, on the reference."""
    cases.check("reference", cases.problem(packed(28, [5, 0, 9, 3], [0, 4, 8, 0], 4, 2, 16, spare=6)))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_one_key_a_sequence(kernel, alignment, dtype):
    """BC-11 (FA#443): NaN backward with causal rows that see no key."""
    arrays = packed(11, [76, 34, 146], [1, 1, 1], 2, 2, 32, size=3.0)
    arrays = {name: x.astype(dtype) if x.ndim == 3 and dtype != "bfloat16" else x for name, x in arrays.items()}
    if dtype == "bfloat16":
        arrays |= {name: x for name, x in cases.qkv(11, (), 256, 3, 2, 2, 32, dtype=dtype, size=3.0).items()}
    got = cases.check(kernel, cases.problem(arrays, is_causal=True, causal_alignment=alignment))
    assert all(np.all(np.isfinite(x.astype(np.float32))) for name, x in got.items() if name != "lse")
    if alignment == "bottom_right":
        sees = np.isin(np.arange(256), [75, 109, 255])
        assert np.array_equal(got["lse"][:, 0] != -np.inf, sees) and np.all(got["out"][~sees] == 0)


@pytest.mark.parametrize("option", ["plain", "causal", "window", "dropout", "sinks"])
def test_equals_each_sequence_alone(implementation, option):
    """BC-30's kind at small sizes: unequal lengths, one long sequence among many of length 1."""
    lengths = [1, 1, 97, 1, 1, 1, 30]
    arrays = packed(30, lengths, lengths, 4, 2, 16)
    static = {
        "causal": {"is_causal": True},
        "window": {"local_window_size": (9, 2)},
        "dropout": {"dropout_rate": 0.4},
    }.get(option, {})
    if option == "dropout":
        arrays["dropout_key"] = jax.random.key(30)
    if option == "sinks":
        arrays["sinks"] = cases.normal(31, 4)
    cases.check(implementation, cases.problem(arrays, **static))


def test_many_short_sequences(kernel):
    """BC-31's kind at small sizes: more sequences than a grid dimension holds; first, middle and last are compared."""
    count, length = 66_000, 2
    offsets = np.arange(count + 1, dtype=np.int32) * length
    arrays = cases.qkv(31, (), count * length, count * length, 1, 1, 4)
    out = jaxflash.flash_mha_varlen(**arrays, cu_seqlens_q=offsets, is_causal=True, implementation=kernel)
    for first in (0, count // 2, count - 50):
        rows = slice(first * length, (first + 50) * length)
        alone = {name: x[rows].reshape(50, length, 1, 4) for name, x in arrays.items()}
        wanted = cases.forward(kernel, cases.problem(alone, is_causal=True))["out"]
        np.testing.assert_allclose(out[rows].reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-6)


def test_offsets_may_be_traced(implementation):
    """BC-28: one compiled function serves every way of cutting the same tokens."""
    arrays = packed(28, [20, 12], [20, 12], 2, 1, 8)
    call = jax.jit(
        lambda offsets, qkv: jaxflash.flash_mha_varlen(**qkv, cu_seqlens_q=offsets, implementation=implementation)
    )
    qkv = {name: arrays[name] for name in ("query", "key", "value")}
    for cut in (0, 7, 32):
        offsets = np.array([0, cut, 32], np.int32)
        wanted = jaxflash.flash_mha_varlen(**qkv, cu_seqlens_q=offsets, implementation=implementation)
        assert np.array_equal(call(offsets, qkv), wanted)
