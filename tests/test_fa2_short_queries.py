"""fa2 on few queries and many keys, where it splits the keys among CTAs and merges the parts."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_fuzz
from arrays import assert_same_bits, qkv

import jaxflash

pytestmark = pytest.mark.gpu

CONFIGS = 160
SEEDS_PER_TEST = 10
MAX_PAIRS = 150_000  # B * N * T * S, for the time the oracle takes
HALF = ("bfloat16", "float16")


def random_config(seed: int) -> cases.Case:
    """One of the fuzz test's problems with 1 to 16 queries and enough keys for the split kernel."""
    rng = np.random.default_rng([seed, 20261130])
    case, _ = test_fuzz.random_config(seed)
    length = int(rng.integers(1, 17))
    kv_length = int(rng.integers(16 * length, 1400))
    heads = case.K * int(rng.choice([1, 1, 2, 3, 4, 8]))
    while length > 1 and np.prod(case.batch, dtype=int) * heads * length * kv_length > MAX_PAIRS:
        length, kv_length = (length + 1) // 2, max(257, kv_length // 2)
    window = None
    if case.local_window_size is not None:
        window = test_fuzz.random_window(rng, int(rng.choice([20, 300, kv_length])))
    changes = {"T": length, "S": kv_length, "N": heads, "local_window_size": window, "sequences": 0}
    if case.sequences:
        changes |= {"batch": (2,), "has_kv_lengths": True}
    if case.H > 128 and rng.random() < 0.5:
        changes |= {"H": 256, "Hv": 256}
    return dataclasses.replace(case, **changes)


@pytest.mark.parametrize("first", range(0, CONFIGS, SEEDS_PER_TEST))
def test_random_problems(first):
    seeds = range(first, first + SEEDS_PER_TEST)
    test_fuzz.check_seeds("fa2", seeds, lambda seed: (random_config(seed), HALF[seed % 2]))


@pytest.mark.parametrize("T", [1, 4, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(6, 6), (12, 2), (40, 2)], ids=["mha", "gqa", "wide-groups"])
def test_shards_equal_the_whole(T, head_dim, heads):
    """Neither the batch nor the number of KV heads changes how the keys are cut."""
    N, K = heads
    query, key, value = qkv(B=3, T=T, S=4999, N=N, K=K, H=head_dim, Hv=head_dim, dtype="bfloat16")
    lengths = jnp.array([4999, 0, 1234], jnp.int32)

    @jax.jit
    def run(query, key, value, lengths):
        return jaxflash.attention(
            query,
            key,
            value,
            key_value_seq_lengths=lengths,
            is_causal=True,
            causal_alignment="bottom_right",
            return_residual=True,
            implementation="fa2",
        )

    out, lse = run(query, key, value, lengths)
    for _ in range(20):
        assert_same_bits(run(query, key, value, lengths), (out, lse))
    for batch in range(3):
        part = slice(batch, batch + 1)
        assert_same_bits(run(query[part], key[part], value[part], lengths[part]), (out[part], lse[part]))
    group = N // K
    for head in range(K):
        part, rows = slice(head, head + 1), slice(head * group, (head + 1) * group)
        expected = (out[:, :, rows], lse[:, :, rows])
        assert_same_bits(run(query[:, :, rows], key[:, :, part], value[:, :, part], lengths), expected)


@pytest.mark.parametrize("T", [1, 7])
def test_many_keys(T):
    """Every chunk of 130,000 keys counts once."""
    query, key, value = qkv(B=1, T=T, S=130_001, N=4, K=1, H=64, Hv=64, dtype="bfloat16")
    cases.check(
        "fa2",
        cases.problem({"query": np.asarray(query), "key": np.asarray(key), "value": np.asarray(value)}),
        gradients=False,
    )


def test_command_buffers_change_nothing():
    """The merge of the chunks starts early, inside a graph too."""
    query, key, value = qkv(B=2, T=3, S=3000, N=8, K=2, H=64, Hv=64, dtype="bfloat16")

    def run(x, key, value):
        for _ in range(6):
            x = jaxflash.attention(x, key, value, implementation="fa2")
        return x

    off = jax.jit(run, compiler_options={"xla_gpu_enable_command_buffer": ""})
    on = jax.jit(run, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    expected = off(query, key, value)
    for _ in range(5):
        assert_same_bits(on(query, key, value), expected)
