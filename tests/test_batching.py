"""vmap: every pattern of mapped operands equals a Python loop, forward and gradient."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_close, assert_same_bits, normal, qkv

import jaxflash

SIZE = 3  # of the mapped axis; no other dim has it


def _operands(seed=0):
    """Per-example operands, stacked along a leading axis of SIZE."""
    B, T, S, N = 2, 9, 11, 6
    q, k, v = (jnp.stack(x) for x in zip(*(qkv(B, T, S, N, K=2, seed=seed + i) for i in range(SIZE)), strict=True))
    rng = np.random.default_rng(seed)
    return {
        "query": q,
        "key": k,
        "value": v,
        "bias": normal(SIZE, 1, N, T, 1, seed=7),
        "mask": jnp.asarray(rng.random((SIZE, B, 1, 1, S)) > 0.3),
        "key_value_seq_lengths": jnp.asarray(rng.integers(1, S + 1, (SIZE, B)), jnp.int32),
        "query_segment_ids": jnp.asarray(rng.integers(-1, 2, (SIZE, B, T)), jnp.int32),
        "key_value_segment_ids": jnp.asarray(rng.integers(-1, 2, (SIZE, B, S)), jnp.int32),
        "sinks": normal(SIZE, N, seed=8),
        "dropout_key": jax.random.split(jax.random.key(3), SIZE),
    }


def _attend(implementation, operands):
    rate = 0.2 if "dropout_key" in operands else 0.0
    return jaxflash.attention(
        **operands, dropout_rate=rate, is_causal=True, return_residual=True, implementation=implementation
    )


def _check(implementation, names, mapped):
    """vmap over the `mapped` operands against a loop, for out, lse and all gradients."""
    stacked = {name: _operands()[name] for name in names}
    operands = {name: x if name in mapped else x[0] for name, x in stacked.items()}
    axes = {name: 0 if name in mapped else None for name in names}
    floating = {name for name in names if jnp.issubdtype(stacked[name].dtype, jnp.floating)}

    def value_and_gradients(operands):
        out, vjp = jax.vjp(
            lambda f: _attend(implementation, {**operands, **f}), {n: operands[n] for n in sorted(floating)}
        )
        weights = (normal(*out[0].shape, seed=5), jnp.where(jnp.isfinite(out[1]), 0.5, 0.0))
        return out, vjp(weights)[0]

    together = jax.vmap(value_and_gradients, in_axes=(axes,))(operands)
    one_by_one = [
        value_and_gradients({n: x[i] if n in mapped else x for n, x in operands.items()}) for i in range(SIZE)
    ]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)
    if "bias" in floating and implementation not in ("reference", "cpu"):
        # The GPU sums it over other dims with atomics, in any order.
        assert_close(together[1].pop("bias"), expected[1].pop("bias"))
    if implementation == "reference":
        assert_close(together, expected)
    else:
        assert_same_bits(together, expected)


@pytest.mark.parametrize(
    "mapped", [m for r in (1, 2, 3) for m in itertools.combinations(("query", "key", "value"), r)], ids="-".join
)
def test_every_in_axes_pattern_of_qkv(mapped, implementation):
    _check(implementation, ("query", "key", "value"), mapped)


@pytest.mark.parametrize(
    "option",
    [
        ("bias",),
        ("mask",),
        ("key_value_seq_lengths",),
        ("query_segment_ids", "key_value_segment_ids"),
        ("sinks",),
        ("dropout_key",),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("which", ["only_option", "only_query", "both"])
def test_mapped_and_unmapped_options(option, which, implementation):
    """BC-47 (JAX#23701): a mask that is not mapped while query is, and the reverse."""
    mapped = {"only_option": option, "only_query": ("query",), "both": ("query", *option)}[which]
    _check(implementation, ("query", "key", "value", *option), mapped)


@pytest.mark.parametrize(("in_axis", "out_axis"), [(1, 0), (2, 3), (-1, 1)])
def test_mapped_axis_anywhere(in_axis, out_axis, implementation):
    q, k, v = (x[0] for x in (_operands()[n] for n in ("query", "key", "value")))
    queries = _operands()["query"]

    def attend(q):
        return jaxflash.attention(q, k, v, implementation=implementation)

    moved = jnp.moveaxis(queries, 0, in_axis)
    together = jax.vmap(attend, in_axes=in_axis, out_axes=out_axis)(moved)
    expected = jnp.stack([attend(q) for q in queries], axis=out_axis)
    assert_close(together, expected, rtol=1e-6, atol=1e-6)


def test_nested_vmap(implementation):
    """Mapped over two axes of different size, each over its own operands."""
    q = jnp.stack([_operands(seed)["query"] for seed in (0, 10)])  # [2, SIZE, ...]
    k, v = (_operands()[n] for n in ("key", "value"))  # mapped by the inner vmap only
    bias = normal(2, 1, 6, 1, 11, seed=9)  # by the outer only

    def attend(q, k, v, bias):
        return jaxflash.attention(q, k, v, bias, implementation=implementation)

    inner = jax.vmap(attend, in_axes=(0, 0, 0, None))
    together = jax.vmap(inner, in_axes=(0, None, None, 0))(q, k, v, bias)
    expected = jnp.stack(
        [jnp.stack([attend(q[i, j], k[j], v[j], bias[i]) for j in range(SIZE)]) for i in range(q.shape[0])]
    )
    assert_close(together, expected, rtol=1e-6, atol=1e-6)

    def loss(q, k, v, bias):
        out = jax.vmap(inner, in_axes=(0, None, None, 0))(q, k, v, bias)
        return jnp.sum(out * normal(*out.shape, seed=4))

    def loss_by_loop(q, k, v, bias):
        weights = normal(2, SIZE, 2, 9, 6, 5, seed=4)
        pairs = itertools.product(range(2), range(SIZE))
        return sum(jnp.sum(attend(q[i, j], k[j], v[j], bias[i]) * weights[i, j]) for i, j in pairs)

    assert_close(
        jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, bias),
        jax.jit(jax.grad(loss_by_loop, (0, 1, 2, 3)))(q, k, v, bias),
    )


def test_vmap_equals_batch_dim(implementation):
    """Heads mapped one by one, as Equinox does it: a rank-3 call under two vmaps equals one batched call."""
    q, k, v = qkv(B=2, N=4, K=4)
    one_head = jax.vmap(
        lambda q, k, v: jaxflash.attention(
            q[:, None], k[:, None], v[:, None], is_causal=True, implementation=implementation
        )[:, 0],
        in_axes=1,
        out_axes=1,
    )
    expected = jaxflash.attention(q, k, v, is_causal=True, implementation=implementation)
    assert_close(jax.vmap(one_head)(q, k, v), expected, rtol=1e-6, atol=1e-6)


def test_packed(implementation):
    q, k, v = (jnp.stack([x[0] for x in (qkv(seed=i)[j] for i in range(SIZE))]) for j in range(3))
    offsets_q = jnp.asarray([[0, 2, 9], [0, 5, 5], [0, 1, 8]], jnp.int32)
    offsets_k = jnp.asarray([0, 4, 11], jnp.int32)

    def attend(q, k, v, oq, ok):
        return jaxflash.flash_mha_varlen(q, k, v, oq, ok, is_causal=True, implementation=implementation)

    together = jax.vmap(attend, in_axes=(0, 0, 0, 0, None))(q, k, v, offsets_q, offsets_k)
    expected = jnp.stack([attend(q[i], k[i], v[i], offsets_q[i], offsets_k) for i in range(SIZE)])
    assert_close(together, expected, rtol=1e-6, atol=1e-6)


def test_size_zero(implementation):
    q, k, v = qkv()
    attend = jax.vmap(lambda q: jaxflash.attention(q, k, v, implementation=implementation))
    assert attend(jnp.zeros((0, *q.shape))).shape == (0, *q.shape[:-1], v.shape[-1])


def test_jacrev(implementation):
    q, k, v = qkv(B=1, T=2, S=3, N=2, K=1, H=2, Hv=2)

    def attend(implementation):
        return lambda q: jaxflash.attention(q, k, v, implementation=implementation)

    assert_close(jax.jacrev(attend(implementation))(q), jax.jacfwd(attend("reference"))(q))
