"""`jaxflash.flax.nnx.GroupedQueryAttention`: its cache, rotary embedding, groups, dropout and segments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_compare import assert_same, normal
from jax.test_util import check_grads

from jaxflash.flax.nnx import GroupedQueryAttention, rotate

FEATURES, HEADS, KV_HEADS = 24, 6, 2


@pytest.fixture
def implementation():
    """One is enough: the adapters do not depend on it, and other tests compare the implementations."""
    return "cpu"


def layer(**options):
    """The module with 6 query heads on 2 KV heads, and sinks that are not 0."""
    options = {"num_kv_heads": KV_HEADS, "head_dim": 8} | options
    made = GroupedQueryAttention(FEATURES, HEADS, rngs=nnx.Rngs(0), **options)
    if made.sinks is not None:
        made.sinks[...] = normal(9, HEADS).astype(made.sinks.dtype)
    return made


@nnx.jit
def decode(layer, x):
    return layer(x, decode=True)


def by_definition(layer, x):
    """The module in plain jnp: pairs of dims as complex numbers, one KV head a query head, a dense mask."""
    length, half = x.shape[1], layer.head_dim // 2
    turn = np.exp(1j * np.outer(np.arange(length), 10_000.0 ** (-np.arange(half) / half)))[:, None, :]

    def turned(x):
        pairs = (x[..., :half] + 1j * x[..., half:]) * turn
        return jnp.concatenate([pairs.real, pairs.imag], axis=-1)

    query, key, value = (jnp.einsum("bti,inh->btnh", x, p.kernel[...]) for p in (layer.query, layer.key, layer.value))
    key, value = (jnp.repeat(y, layer.num_heads // layer.num_kv_heads, axis=2) for y in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", turned(query), turned(key)) / np.sqrt(layer.head_dim)
    logits = jnp.where(np.tri(length, dtype=bool), logits, -jnp.inf)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)
    return jnp.einsum("btnh,nho->bto", out, layer.out.kernel[...])


def test_equals_the_definition(implementation):
    x, weights = normal(1, 2, 7, FEATURES), normal(2, 2, 7, FEATURES)

    @functools.partial(nnx.jit, static_argnums=1)
    def run(layer, function):
        return nnx.value_and_grad(lambda layer, x: jnp.sum(function(layer, x) * weights), argnums=(0, 1))(layer, x)

    made = layer(implementation=implementation)
    assert_same(made(x), by_definition(made, x))
    assert_same(run(made, GroupedQueryAttention.__call__), run(made, by_definition))


def test_gradients_of_sinks_and_soft_cap(implementation):
    options = {"use_sinks": True, "logits_soft_cap": 2.0, "local_window_size": 2}
    graph, params = nnx.split(layer(implementation=implementation, **options))
    x = normal(1, 1, 4, FEATURES)
    run = jax.jit(lambda params: nnx.merge(graph, params)(x))
    check_grads(run, (params,), order=1, modes=["rev"], eps=1e-2, rtol=2e-2)


def test_groups_equal_repeated_kv_heads(implementation):
    x = normal(1, 2, 7, FEATURES)
    grouped, full = layer(implementation=implementation), layer(num_kv_heads=None, implementation=implementation)
    assert full.num_kv_heads == HEADS and grouped.key.kernel.shape == (FEATURES, KV_HEADS, 8)
    for name in ("query", "key", "value", "out"):
        kernel = getattr(grouped, name).kernel[...]
        repeats = HEADS // KV_HEADS if name in ("key", "value") else 1
        getattr(full, name).kernel[...] = jnp.repeat(kernel, repeats, axis=1)
    assert_same(grouped(x), full(x))


CACHED = {  # the options, and how many tokens each call appends
    "steps": ({}, (1,) * 7),
    "prefill-and-steps-with-window": ({"local_window_size": 2}, (4, 1, 1, 1)),
    "steps-with-window": ({"local_window_size": 2}, (1,) * 7),
    "chunks-without-positions": ({"rope_theta": None}, (2, 3, 2)),
    "chunks-with-sinks-soft-cap-bias": ({"use_sinks": True, "logits_soft_cap": 2.0, "use_bias": True}, (2, 3, 2)),
}


@pytest.mark.parametrize("case", CACHED)
def test_decode_equals_the_full_run(implementation, case):
    options, sizes = CACHED[case]
    x = normal(1, 2, 7, FEATURES)
    made = layer(implementation=implementation, **options)
    made.init_cache(2, 10)
    outs = [decode(made, part) for part in jnp.split(x, np.cumsum(sizes)[:-1], axis=1)]
    assert made.cache_index[...] == 7
    assert_same(jnp.concatenate(outs, axis=1), made(x))
    made.init_cache(2, 10)
    assert_same(decode(made, x[:, :3]), outs[0][:, :3] if sizes[0] >= 3 else made(x)[:, :3])


def test_decode_in_scan_under_jit(implementation):
    x = normal(1, 2, 7, FEATURES)
    made = layer(implementation=implementation)
    full = made(x)
    made.init_cache(2, 7)
    graph, state = nnx.split(made)

    @jax.jit
    def run(state, x):
        def step(state, token):
            made = nnx.merge(graph, state)
            out = made(token[:, None], decode=True)
            return nnx.state(made), out[:, 0]

        return jax.lax.scan(step, state, jnp.swapaxes(x, 0, 1))[1]

    assert_same(jnp.swapaxes(run(state, x), 0, 1), full)


def test_full_cache_is_noticed():
    made = layer()
    made.init_cache(2, 4)
    x = normal(1, 2, 3, FEATURES)
    assert np.all(np.isfinite(decode(made, x)))
    with pytest.raises(ValueError, match="3 tokens and 3 of 4 are taken"):
        made(x, decode=True)
    assert np.all(np.isnan(decode(made, x)))


def test_cache_of_another_dtype():
    x = normal(1, 2, 5, FEATURES)
    made = layer(dtype=jnp.bfloat16)
    made.init_cache(2, 5)
    assert made.cached_key.dtype == jnp.bfloat16
    made.init_cache(2, 5, jnp.float32)
    out = decode(made, x)
    assert out.dtype == jnp.bfloat16 and made.cached_key.dtype == jnp.float32
    np.testing.assert_allclose(out, made(x), atol=2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(out).max())


def test_rotation_depends_on_the_distance_alone():
    query, key = normal(1, 1, 1, 1, 8), normal(2, 1, 1, 1, 8)

    def product(i, j):
        return jnp.sum(rotate(query, jnp.array([i]), 50.0) * rotate(key, jnp.array([[j]]), 50.0))

    assert_same(product(9, 4), product(25, 20))
    assert abs(product(9, 4) - product(9, 5)) > 1e-3
    assert_same(rotate(query, jnp.array([0])), query)
    assert_same(jnp.linalg.norm(rotate(query, jnp.array([7]))), jnp.linalg.norm(query))
    assert rotate(query.astype(jnp.bfloat16), jnp.array([7])).dtype == jnp.bfloat16


def test_positions_shift_but_do_not_stretch():
    x, positions = normal(1, 2, 7, FEATURES), jnp.arange(7)
    made = layer()
    assert_same(made(x, positions=positions), made(x))
    assert_same(made(x, positions=positions + jnp.array([[11], [40]])), made(x))
    assert np.abs(made(x, positions=3 * positions) - made(x)).max() > 0.01
    assert_same(layer(rope_theta=None)(x, positions=3 * positions), layer(rope_theta=None)(x))


def test_segments_see_only_themselves(implementation):
    x = normal(1, 1, 9, FEATURES)
    made = layer(implementation=implementation)
    segment_ids = jnp.array([[0, 0, 0, 0, 1, 1, 1, -1, -1]])
    out = made(x, segment_ids=segment_ids)
    assert_same(out[:, :7], jnp.concatenate([made(x[:, :4]), made(x[:, 4:7])], axis=1))
    assert np.all(np.asarray(out[:, 7:]) == 0)


def test_bidirectional(implementation):
    """Without positions and mask, the order of the tokens makes no difference."""
    x = normal(1, 2, 7, FEATURES)
    made = layer(is_causal=False, rope_theta=None, implementation=implementation)
    assert_same(made(x[:, ::-1]), made(x)[:, ::-1])


def test_dropout_in_training_steps(implementation):
    x = normal(1, 2, 7, FEATURES)
    made, twin = (layer(dropout_rate=0.5, implementation=implementation) for _ in range(2))

    @nnx.jit
    def train(layer):
        return layer(x)

    outs = [train(made), train(made)]
    assert np.abs(outs[0] - outs[1]).max() > 0.01
    np.testing.assert_array_equal(outs, [train(twin), train(twin)])
    expected = layer()(x)
    assert_same(made(x, deterministic=True), expected)
    assert_same(nnx.view(made, deterministic=True)(x), expected)
    made.eval()
    assert_same(train(made), expected)
    made.train()
    assert np.abs(train(made) - expected).max() > 0.01


def test_dropout_under_jax_jit():
    graph, state = nnx.split(layer(dropout_rate=0.5))

    @jax.jit
    def train(state, x):
        made = nnx.merge(graph, state)
        out = made(x)
        return nnx.state(made), out

    x = normal(1, 2, 7, FEATURES)
    state, first = train(state, x)
    assert np.abs(train(state, x)[1] - first).max() > 0.01


def test_sources_of_the_dropout_key():
    x = normal(1, 2, 7, FEATURES)
    made = layer(dropout_rate=0.5)
    key = nnx.Rngs(dropout=5).dropout()
    outs = [made(x, rngs=rngs) for rngs in (nnx.Rngs(dropout=5), nnx.Rngs(dropout=5).dropout, key)]
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])
    assert np.abs(outs[0] - made(x)).max() > 0.01


def test_parameters_and_dtypes():
    made = layer(use_bias=True, use_sinks=True, out_features=5, dtype=jnp.float16, param_dtype=jnp.bfloat16)
    shapes = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree.leaves_with_path(nnx.state(made, nnx.Param))}
    assert sorted(shapes.values()) == sorted(
        [(HEADS,), (5,), (HEADS, 8), (KV_HEADS, 8), (KV_HEADS, 8)]
        + [(FEATURES, HEADS, 8), (FEATURES, KV_HEADS, 8), (FEATURES, KV_HEADS, 8), (HEADS, 8, 5)]
    )
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(nnx.state(made, nnx.Param)))
    out = made(jnp.ones((2, 3, FEATURES)))
    assert out.shape == (2, 3, 5) and out.dtype == jnp.float16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads must divide num_heads 6, it was 4"),
        ({"num_kv_heads": 0}, "num_kv_heads must divide"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": None, "in_features": 25}, "num_heads must divide in_features 25"),
    ],
    ids=["kv-heads", "no-kv-heads", "odd-head-dim", "features"],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    options = {"in_features": FEATURES, "num_heads": HEADS} | options
    with pytest.raises(ValueError, match=message):
        GroupedQueryAttention(**options, rngs=nnx.Rngs(0))


def test_calls_that_do_not_fit_are_refused():
    x = jnp.ones((2, 3, FEATURES))
    made = layer()
    with pytest.raises(ValueError, match=r"call init_cache\(batch_size, max_length\)"):
        made(x, decode=True)
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 24\]"):
        made(x[0])
    made.init_cache(3, 5)
    with pytest.raises(ValueError, match="cache of 3 sequences of 5 tokens"):
        made(x, decode=True)
    with pytest.raises(NotImplementedError, match="segment_ids must be None"):
        made(x, decode=True, segment_ids=jnp.zeros((2, 3), jnp.int32))
    both_ways = layer(is_causal=False)
    both_ways.init_cache(2, 5)
    with pytest.raises(ValueError, match="decode=True needs is_causal=True"):
        both_ways(x, decode=True)
