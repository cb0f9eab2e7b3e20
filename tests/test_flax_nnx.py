"""`jaxflash.flax.nnx.attention_fn` in `nnx.MultiHeadAttention`: the same results as Flax's own attention."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_compare import assert_same, normal, random_mask

import jaxflash
from jaxflash.flax.nnx import AttentionFn, attention_fn

HEADS, FEATURES = 4, 24


@pytest.fixture
def implementation():
    """One is enough: the adapters do not depend on it, and other tests compare the implementations."""
    return "cpu"


def module(fn=None, **options):
    """Modules of the same options have the same parameters; without `fn`, with Flax's own attention."""
    attention = {} if fn is None else {"attention_fn": fn}
    options = {"decode": False} | options
    return nnx.MultiHeadAttention(HEADS, 10, FEATURES, 12, rngs=nnx.Rngs(0), **attention, **options)


TRAINING = {  # batch dims, number of KV heads, is_causal and the mask
    "no-mask-gqa": ((2,), 2, False, None),
    "causal-mqa-batch-2x3": ((2, 3), 1, True, None),
    "float-mask-gqa-batch-3x2": ((3, 2), 2, False, random_mask(3, 3, 2, HEADS, 7, 7)),
    "causal-and-float-mask": ((2,), 4, True, random_mask(4, 2, 1, 7, 7)),
    "bool-mask-gqa": ((2,), 2, False, random_mask(5, 2, 1, 7, 7) != 0),
}


@pytest.mark.parametrize("case", TRAINING)
def test_training_equals_flax(implementation, case):
    batch, num_kv_heads, is_causal, mask = TRAINING[case]
    x, weights = normal(1, *batch, 7, 10), normal(2, *batch, 7, 12)

    @nnx.jit
    def run(layer, x):
        def loss(layer, x):
            out = layer(x, mask=mask, is_causal=is_causal)
            return jnp.sum(out * weights), out

        gradients, out = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
        return out, gradients

    ours = run(module(AttentionFn(implementation=implementation), num_kv_heads=num_kv_heads), x)
    assert_same(ours, run(module(num_kv_heads=num_kv_heads), x))


def test_mask_is_honoured():
    x, mask = normal(1, 2, 7, 10), random_mask(3, 2, 1, 7, 7)
    hidden = mask[0, 0, 0] == 0
    assert hidden.any()
    layer = module(attention_fn)
    changed = x.at[0].set(jnp.where(hidden[:, None], 100.0, x[0]))
    for given in (mask, mask != 0):
        np.testing.assert_array_equal(layer(x, changed, mask=given)[0, 0], layer(x, mask=given)[0, 0])
    assert np.abs(layer(x, mask=mask) - layer(x)).max() > 0.01


def test_every_keyword_that_nnx_passes_is_named():
    recorded = {}

    def recorder(query, key, value, **keywords):
        recorded.update(keywords)
        return query

    optional = inspect.signature(nnx.MultiHeadAttention.__call__).parameters.keys() & {"input_positions"}
    x = jnp.ones((2, 4, 10))
    module(recorder)(x, sow_weights=True, **dict.fromkeys(optional, jnp.arange(4)))
    assert {"mask", "dropout_rng", "dropout_rate", "deterministic", "module", "is_causal"} | optional <= recorded.keys()
    assert recorded.keys() <= inspect.signature(attention_fn).parameters.keys()


@pytest.mark.parametrize("has_mask", [False, True], ids=["no-mask", "user-mask"])
def test_decode_equals_the_full_run(implementation, has_mask):
    """With is_causal=True in every step: Flax 0.12.8 passes it on, and along its diagonal it would hide the cache."""
    length = 6
    x = normal(1, 2, length, 10)
    mask = random_mask(3, 2, 1, length, length) if has_mask else None
    layer = module(AttentionFn(implementation=implementation), num_kv_heads=2)
    layer.init_cache(x.shape)

    @nnx.jit
    def step(layer, token, mask):
        return layer(token, mask=mask, is_causal=True, decode=True)

    outs = [step(layer, x[:, t : t + 1], mask if mask is None else mask[:, :, t : t + 1]) for t in range(length)]
    full = module(num_kv_heads=2)(x, mask=mask, is_causal=True)
    assert_same(jnp.concatenate(outs, axis=1), full)

    flax = module(num_kv_heads=2)
    flax.init_cache(x.shape)
    for t in range(length):
        flax(x[:, t : t + 1], decode=True)
    assert_same(
        [layer.cached_key[...], layer.cached_value[...], layer.cache_index[...]],
        [flax.cached_key[...], flax.cached_value[...], flax.cache_index[...]],
    )


def test_is_causal_without_a_mask_keeps_its_diagonal(implementation):
    """One query and no mask is no decode step: the first key is the only one it sees, as in Flax."""
    query, key = normal(1, 2, 1, 4, 8), normal(2, 2, 5, 4, 8)
    ours = AttentionFn(implementation=implementation)(query, key, key, is_causal=True)
    assert_same(ours, key[:, :1])
    assert_same(ours, nnx.dot_product_attention(query, key, key, is_causal=True))


def test_bound_options_are_used(implementation):
    query, key, value = normal(1, 2, 6, 4, 8), normal(2, 2, 6, 2, 8), normal(3, 2, 6, 2, 8)
    options = {"scale": 0.3, "is_causal": True, "local_window_size": 2, "logits_soft_cap": 3.0}
    options |= {"causal_alignment": "bottom_right", "implementation": implementation}
    ours = AttentionFn(**options)(query, key, value, is_causal=False)
    np.testing.assert_array_equal(ours, jaxflash.attention(query, key, value, **options))


def test_equal_options_do_not_compile_again():
    traced = []

    @nnx.jit
    def run(layer, x):
        traced.append(x)
        return layer(x)

    for _ in range(2):
        run(module(AttentionFn(local_window_size=3)), jnp.ones((2, 5, 10)))
    assert len(traced) == 1


def test_query_that_sees_no_key_gets_zero(implementation):
    query = normal(1, 2, 5, 3, 8)
    mask = jnp.ones((2, 1, 5, 5)).at[:, :, 3].set(0)
    out = AttentionFn(implementation=implementation)(query, query, query, mask=mask)
    assert np.all(np.asarray(out[:, 3]) == 0)
    assert_same(out.at[:, 3].set(query.mean(1)), nnx.dot_product_attention(query, query, query, mask=mask))


def test_dtype_is_promoted_as_flax_does():
    query, key = normal(1, 2, 5, 3, 8).astype(jnp.bfloat16), normal(2, 2, 5, 3, 8)
    assert_same(attention_fn(query, key, key), nnx.dot_product_attention(query, key, key))
    assert attention_fn(query, key, key).dtype == jnp.float32
    assert attention_fn(query, query, query).dtype == jnp.bfloat16
    assert attention_fn(key, key, key, dtype=jnp.float16).dtype == jnp.float16


@pytest.mark.parametrize("broadcast_dropout", [True, False], ids=["broadcast", "elementwise"])
def test_dropout_drops_every_element_for_itself(implementation, broadcast_dropout):
    """Equal logits and one-hot values show the dropped softmax itself."""
    batch, heads, length, rate = 2, 3, 64, 0.25
    query = jnp.zeros((batch, length, heads, 8))
    value = jnp.broadcast_to(jnp.eye(length)[:, None, :], (batch, length, heads, length))
    fn = AttentionFn(implementation=implementation)

    def weights(seed, **options):
        options |= {"broadcast_dropout": broadcast_dropout, "dropout_rate": rate}
        return np.asarray(fn(query, query, value, dropout_rng=jax.random.key(seed), **options))

    dropped = weights(0)
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], 1 / (length * (1 - rate)), rtol=1e-5)
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / kept.size)
    assert not np.array_equal(kept[0], kept[1]) and not np.array_equal(kept[:, :, 0], kept[:, :, 1])
    np.testing.assert_array_equal(dropped, weights(0))
    assert not np.array_equal(dropped, weights(1))
    assert np.all(weights(0, deterministic=True) != 0)


def test_dropout_differs_between_steps_and_repeats_with_the_seed():
    x = normal(1, 2, 7, 10)

    @nnx.jit
    def train(layer):
        return layer(x, deterministic=False)

    first, second = module(attention_fn, dropout_rate=0.5), module(attention_fn, dropout_rate=0.5)
    outs = [train(first), train(first)]
    assert np.abs(outs[0] - outs[1]).max() > 0.01
    np.testing.assert_array_equal(outs, [train(second), train(second)])
    plain = module(dropout_rate=0.5)
    assert_same(first(x, deterministic=True), plain(x, deterministic=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": nnx.Dropout(0.5)}, "sow_weights=False"),
        ({"input_positions": jnp.arange(4)}, "input_positions must be None"),
        ({"precision": "BF16_BF16_F32"}, "precision must be None or a jax.lax.Precision"),
    ],
    ids=["module", "input_positions", "precision"],
)
def test_what_cannot_be_honoured_is_refused(options, message):
    x = jnp.ones((2, 4, 3, 8))
    with pytest.raises(NotImplementedError, match=message):
        attention_fn(x, x, x, **options)


def test_sow_weights_is_refused_by_the_module():
    with pytest.raises(NotImplementedError, match="sow_weights=False"):
        module(attention_fn)(jnp.ones((2, 4, 10)), sow_weights=True)


def test_window_is_refused_in_decode_mode():
    layer = module(AttentionFn(local_window_size=2))
    layer.init_cache((2, 5, 10))
    with pytest.raises(NotImplementedError, match="GroupedQueryAttention"):
        layer(jnp.ones((2, 1, 10)), decode=True)
