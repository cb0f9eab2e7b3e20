"""`jaxflash.flax.linen.attention_fn` in Linen's attention module: the same results as Flax's own attention."""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax_compare import assert_same, normal, random_mask

import jaxflash
from jaxflash.flax.linen import AttentionFn, attention_fn

HEADS, FEATURES = 3, 24


@pytest.fixture
def implementation():
    """One is enough: the adapters do not depend on it, and other tests compare the implementations."""
    return "cpu"


def module(fn, **options):
    return nn.MultiHeadDotProductAttention(HEADS, qkv_features=FEATURES, attention_fn=fn, **options)


def causal_and_padding(x):
    key_is_token = jnp.broadcast_to(jnp.arange(x.shape[-2]) != 2, x.shape[:-1])[..., None, None, :]
    return nn.combine_masks(nn.make_causal_mask(x[..., 0]), key_is_token)


TRAINING = {  # batch dims and the mask
    "no-mask": ((2,), lambda x: None),
    "float-causal-batch-2x3": ((2, 3), lambda x: nn.make_causal_mask(x[..., 0])),
    "bool-causal-no-batch": ((), lambda x: nn.make_causal_mask(x[..., 0], dtype=bool)),
    "float-random-per-head-batch-3x2": ((3, 2), lambda x: random_mask(3, 3, 2, HEADS, 7, 7)),
    "int-random-shared": ((2,), lambda x: random_mask(4, 1, 1, 7, 7).astype(jnp.int32)),
    "causal-and-padding": ((2,), causal_and_padding),
}


@pytest.mark.parametrize("case", TRAINING)
def test_training_equals_flax(implementation, case):
    batch, make_mask = TRAINING[case]
    x = normal(1, *batch, 7, 10)
    mask = make_mask(x)
    weights = normal(2, *batch, 7, 10)
    params = module(nn.dot_product_attention).init(jax.random.key(0), x)

    @functools.partial(jax.jit, static_argnums=0)
    def run(fn, params, x):
        def loss(params, x):
            out = module(fn).apply(params, x, mask=mask)
            return jnp.sum(out * weights), out

        gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return out, gradients

    ours = run(AttentionFn(implementation=implementation), params, x)
    assert_same(ours, run(nn.dot_product_attention, params, x))


def test_cross_attention_equals_flax(implementation):
    x, y = normal(1, 2, 5, 10), normal(2, 2, 9, 6)
    mask = random_mask(3, 2, 1, 5, 9)
    params = module(nn.dot_product_attention).init(jax.random.key(0), x, y)
    ours = module(AttentionFn(implementation=implementation)).apply(params, x, y, mask=mask)
    assert_same(ours, module(nn.dot_product_attention).apply(params, x, y, mask=mask))


@pytest.mark.parametrize("dtype", [jnp.float32, bool], ids=["float", "bool"])
def test_mask_is_honoured(dtype):
    x = normal(1, 2, 7, 10)
    params = module(attention_fn).init(jax.random.key(0), x)
    mask = random_mask(3, 2, 1, 7, 7).astype(dtype)
    hidden = mask[0, 0, 0] == 0
    assert hidden.any()

    def first_token(changed):
        return module(attention_fn).apply(params, x, changed, mask=mask)[0, 0]

    changed = x.at[0].set(jnp.where(hidden[:, None], 100.0, x[0]))
    np.testing.assert_array_equal(first_token(changed), first_token(x))
    without = module(attention_fn).apply(params, x)
    assert np.abs(module(attention_fn).apply(params, x, mask=mask) - without).max() > 0.01


class EveryName(inspect.Signature):
    """A signature that has whatever name is asked for: Linen filters its keywords by it and so passes them all."""

    class _Names(dict):
        def __contains__(self, name):
            return True

    parameters = _Names()


def test_every_keyword_that_linen_passes_is_named():
    recorded = {}

    def recorder(query, key, value, **keywords):
        recorded.update(keywords)
        return query

    recorder.__signature__ = EveryName()
    module(recorder).init(jax.random.key(0), jnp.ones((2, 4, 10)), sow_weights=True)
    assert {"mask", "dropout_rng", "dropout_rate", "deterministic", "module"} <= recorded.keys()
    assert recorded.keys() <= inspect.signature(attention_fn).parameters.keys()


@pytest.mark.parametrize("is_causal", [False, True], ids=["user-mask", "bound-causal"])
def test_decode_equals_flax_and_the_full_run(implementation, is_causal):
    length = 6
    x = normal(1, 2, length, 10)
    user = None if is_causal else random_mask(3, 2, 1, length, length)
    fn = AttentionFn(implementation=implementation, is_causal=is_causal)

    def decode(fn):
        decoder = module(fn, decode=True)
        variables = decoder.init(jax.random.key(0), x)

        @jax.jit
        def step(cache, token, mask):
            out, state = decoder.apply({**variables, "cache": cache}, token, mask=mask, mutable=["cache"])
            return state["cache"], out

        cache, outs = variables["cache"], []
        for t in range(length):
            cache, out = step(cache, x[:, t : t + 1], None if user is None else user[:, :, t : t + 1])
            outs.append(out)
        return variables["params"], cache, jnp.concatenate(outs, axis=1)

    params, cache, ours = decode(fn)
    assert_same((cache, ours), decode(nn.dot_product_attention)[1:])
    full_mask = nn.combine_masks(nn.make_causal_mask(x[..., 0]), user)
    assert_same(ours, module(nn.dot_product_attention).apply({"params": params}, x, mask=full_mask))


def test_bound_options_are_used(implementation):
    query, key, value = normal(1, 2, 6, 4, 8), normal(2, 2, 6, 2, 8), normal(3, 2, 6, 2, 8)
    options = {"scale": 0.3, "is_causal": True, "local_window_size": 2, "logits_soft_cap": 3.0}
    options |= {"causal_alignment": "bottom_right", "implementation": implementation}
    ours = AttentionFn(**options, deterministic_gradients=True)(query, key, value)
    np.testing.assert_array_equal(ours, jaxflash.attention(query, key, value, **options))
    x = normal(1, 2, 6, 10)
    params = module(attention_fn).init(jax.random.key(0), x)
    causal = module(AttentionFn(is_causal=True)).apply(params, x)
    assert_same(causal, module(attention_fn).apply(params, x, mask=nn.make_causal_mask(x[..., 0])))


def test_equal_options_are_equal():
    assert AttentionFn(local_window_size=(4, 0)) == AttentionFn(local_window_size=(4, 0)) != AttentionFn()
    assert hash(AttentionFn()) == hash(attention_fn)
    assert pickle.loads(pickle.dumps(attention_fn)) == attention_fn


def test_query_that_sees_no_key_gets_zero(implementation):
    query = normal(1, 2, 5, 3, 8)
    mask = jnp.ones((5, 5)).at[3].set(0)  # [T, S]: leading dims are added as NumPy's broadcasting does
    out = AttentionFn(implementation=implementation)(query, query, query, mask=mask)
    assert np.all(np.asarray(out[:, 3]) == 0)
    expected = nn.dot_product_attention(query, query, query, mask=mask)
    assert_same(out.at[:, 3].set(0), expected.at[:, 3].set(0))
    assert_same(jnp.broadcast_to(query.mean(1), (2, 3, 8)), expected[:, 3])


def test_bias_and_its_gradient_equal_flax(implementation):
    query = normal(1, 2, 5, 3, 8)
    bias = normal(2, 3, 1, 5)

    def run(fn):
        return jax.value_and_grad(lambda bias: jnp.sum(fn(query, query, query, bias) ** 2))(bias)

    assert_same(run(AttentionFn(implementation=implementation)), run(nn.dot_product_attention))


def test_dtype_is_promoted_as_flax_does():
    query, key = normal(1, 2, 5, 3, 8).astype(jnp.bfloat16), normal(2, 2, 5, 3, 8)
    assert attention_fn(query, key, key).dtype == jnp.float32
    assert attention_fn(query, query, query).dtype == jnp.bfloat16
    assert attention_fn(key, key, key, dtype=jnp.float16).dtype == jnp.float16
    ours = attention_fn(query, key, key)
    assert_same(ours, nn.dot_product_attention(query, key, key))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_every_element_for_itself(implementation, rate):
    """Equal logits and one-hot values show the dropped softmax itself."""
    batch, heads, length, size = 2, 3, 64, 64
    query = jnp.zeros((batch, length, heads, 8))
    value = jnp.broadcast_to(jnp.eye(size)[:, None, :], (batch, size, heads, size))
    fn = AttentionFn(implementation=implementation)

    def weights(seed, **options):
        return np.asarray(fn(query, query, value, dropout_rng=jax.random.key(seed), dropout_rate=rate, **options))

    dropped = weights(0)
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], 1 / (size * (1 - rate)), rtol=1e-5)
    deviation = np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation
    assert not np.array_equal(kept[0], kept[1]) and not np.array_equal(kept[:, :, 0], kept[:, :, 1])
    np.testing.assert_array_equal(dropped, weights(0))
    np.testing.assert_array_equal(dropped, weights(0, broadcast_dropout=False))
    assert not np.array_equal(dropped, weights(1))
    assert np.all(weights(0, deterministic=True) != 0)


def test_dropout_key_comes_from_the_module():
    x = normal(1, 2, 7, 10)
    layer = module(attention_fn, dropout_rate=0.5)
    params = layer.init(jax.random.key(0), x, deterministic=True)

    @jax.jit
    def train(key):
        return layer.apply(params, x, deterministic=False, rngs={"dropout": key})

    first, again, other = (train(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01
    plain = module(nn.dot_product_attention, dropout_rate=0.5)
    assert_same(layer.apply(params, x, deterministic=True), plain.apply(params, x, deterministic=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": nn.Dense(3)}, "sow_weights=False"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum must be None"),
        ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum must be None"),
        ({"precision": "BF16_BF16_F32"}, "precision must be None or a jax.lax.Precision"),
        ({"precision": ("highest", jax.lax.DotAlgorithmPreset.TF32_TF32_F32)}, "precision must be None"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_honoured_is_refused(options, message):
    x = jnp.ones((2, 4, 3, 8))
    with pytest.raises(NotImplementedError, match=message):
        attention_fn(x, x, x, **options)


@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.HIGHEST, ("high", "float32")], ids=str)
def test_precisions_are_accepted(precision):
    x = normal(1, 2, 4, 3, 8)
    np.testing.assert_array_equal(attention_fn(x, x, x, precision=precision), attention_fn(x, x, x))


def test_dropout_without_a_key_is_refused():
    x = jnp.ones((2, 4, 3, 8))
    with pytest.raises(ValueError, match="dropout_rng must be given"):
        attention_fn(x, x, x, dropout_rate=0.5)


def test_window_is_refused_in_decode_mode():
    query, key = jnp.ones((2, 1, 3, 8)), jnp.ones((2, 4, 3, 8))
    fn = AttentionFn(local_window_size=2)
    with pytest.raises(NotImplementedError, match="GroupedQueryAttention"):
        fn(query, key, key, mask=jnp.ones((2, 1, 1, 4)))
    assert fn(query, key, key).shape == (2, 1, 3, 8)
