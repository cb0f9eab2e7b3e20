"""Sharding: on 8 virtual devices results equal one device to the bit, and nothing is gathered."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_close, assert_same_bits, normal, qkv
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash
from jaxflash._primitive.partition import Layout, choose_layout

DROPOUT = {"dropout_rate": 0.25, "dropout_key": jax.random.key(2)}
BATCH, HEADS, BOTH = P("x"), P(None, None, "y"), P("x", None, "y")


def _mesh(x=2, y=4, kind="Auto", devices=None):
    return jax.make_mesh((x, y), ("x", "y"), axis_types=(getattr(AxisType, kind),) * 2, devices=devices)


def _collectives(compiled) -> dict[str, int]:
    names = re.findall(
        r"= .*? (all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter)(?:-start)?\(", compiled.as_text()
    )
    return {name: names.count(name) for name in set(names)}


def _inputs(K=4, **kwargs):
    return qkv(**{"B": 4, "T": 10, "S": 12, "N": 8, "K": K, "H": 6, "Hv": 5, **kwargs})


def _loss(q, k, v, *bias, weights=None, **options):
    """A loss with non-uniform cotangents for out and lse, per-example so that its gradient needs no collective."""
    out, lse = jaxflash.attention(q, k, v, *bias, return_residual=True, implementation="cpu", **options)
    weights = normal(*out.shape, seed=3) if weights is None else weights
    return jnp.sum(out * weights) + jnp.sum(jnp.sin(lse))


def _attend_and_gradients(*arrays, **options):
    """Forward and backward as users write it, returning only what stays sharded: out, lse, dq, dk, dv[, dbias]."""
    results = jaxflash.attention(*arrays, return_residual=True, implementation="cpu", **options)
    return results, jax.grad(lambda *a: _loss(*a, **options), tuple(range(len(arrays))))(*arrays)


CASES = {
    "batch": (BATCH, BATCH, 4),
    "heads": (HEADS, HEADS, 4),
    "heads_mha": (HEADS, HEADS, 8),
    "batch_and_heads": (BOTH, BOTH, 4),
    "heads_over_both_axes": (P(None, None, ("x", "y")), P(None, None, ("x", "y")), 8),
    "batch_over_both_axes": (P(("y", "x")), P(("y", "x")), 4),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{"is_causal": True}, DROPOUT], ids=["causal", "dropout"])
def test_equal_to_one_device_without_collectives(case, options):
    """BC-60 (JAX#38551) and BC-56 (TE#227): no gather of anything, same bits, dropout included."""
    q_spec, kv_spec, kv_heads = CASES[case]
    arrays = _inputs(kv_heads, B=8)
    run = jax.jit(lambda *a: _attend_and_gradients(*a, **options))
    expected = run(*arrays)
    mesh = _mesh()
    sharded = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (q_spec, kv_spec, kv_spec), strict=True)
    ]
    compiled = run.lower(*sharded).compile()
    assert _collectives(compiled) == {}
    (out, lse), (dq, dk, dv) = compiled(*sharded)
    assert_same_bits(((out, lse), (dq, dk, dv)), expected)
    for x, like in ((out, q_spec), (dq, q_spec), (dk, kv_spec), (dv, kv_spec)):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, like), 4)


@pytest.mark.parametrize(("kv_heads", "q_spec"), [(1, BOTH), (2, BOTH), (1, HEADS), (2, P(None, None, ("x", "y")))])
def test_fewer_kv_heads_than_shards(kv_heads, q_spec):
    """Every device takes its own KV head out of the replicated ones; dk and dv are summed, nothing is gathered."""
    arrays = _inputs(kv_heads)
    run = jax.jit(lambda *a: _attend_and_gradients(*a, **DROPOUT))
    expected = run(*arrays)
    mesh = _mesh()
    specs = (q_spec, P(q_spec[0]), P(q_spec[0]))
    sharded = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    compiled = run.lower(*sharded).compile()
    assert set(_collectives(compiled)) == {"all-reduce"}
    (out, lse), (dq, dk, dv) = compiled(*sharded)
    assert_same_bits((out, lse, dq), (*expected[0], expected[1][0]))
    assert_close((dk, dv), expected[1][1:])


@pytest.mark.parametrize("shape", [(4, 8, 10, 12), (1, 8, 10, 12), (4, 1, 1, 12), (1, 1, 10, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("spec", [BATCH, HEADS, BOTH], ids=["batch", "heads", "both"])
def test_bias_gradient_is_summed_over_the_axes_it_is_broadcast_over(shape, spec):
    arrays = (*_inputs(), normal(*shape, seed=4))
    run = jax.jit(_attend_and_gradients)
    expected = run(*arrays)
    mesh = _mesh()
    bias_axes = P(*(a if size > 1 else None for a, size in zip((*spec, *[None] * 3)[0:3:2], shape[:2], strict=True)))
    sharded = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (spec, spec, spec, bias_axes), strict=True)
    ]
    compiled = run.lower(*sharded).compile()
    assert set(_collectives(compiled)) <= {"all-reduce"}
    actual = compiled(*sharded)
    assert_same_bits((actual[0], actual[1][:3]), (expected[0], expected[1][:3]))
    assert_close(actual[1][3], expected[1][3])


@pytest.mark.parametrize(
    "specs",
    [
        (P("x", "y"), P("x", "y")),
        (P(None, ("x", "y")), P()),
        (P("x", None, None, "y"), P("x")),
        (P(None, "y"), P("x", None, None, "y")),
        (P(), P("x", None, "y")),
        (P("y"), P("x", None, "y")),
    ],
    ids=str,
)
def test_any_other_sharding_is_right_too(specs):
    """Sharded along T, S or a head dim, or keys unlike queries: gathered, never wrong."""
    arrays = _inputs(T=8, S=16, H=8, Hv=4)
    run = jax.jit(lambda *a: _attend_and_gradients(*a, is_causal=True))
    expected = run(*arrays)
    mesh = _mesh()
    sharded = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (specs[0], specs[1], specs[1]), strict=True)
    ]
    assert_close(run(*sharded), expected)


def test_cotangents_sharded_unlike_query():
    q, k, v = _inputs()
    weights = normal(4, 10, 8, 5, seed=3)
    grad = jax.jit(lambda q, k, v, w: jax.grad(_loss, (0, 1, 2))(q, k, v, weights=w))
    expected = grad(q, k, v, weights)
    mesh = _mesh()
    placed = [jax.device_put(x, NamedSharding(mesh, BATCH)) for x in (q, k, v)]
    for spec in (HEADS, P(None, "x"), P(None, None, None), P("y")):
        assert_close(grad(*placed, jax.device_put(weights, NamedSharding(mesh, spec))), expected)


def test_eager_calls_are_sharded():
    q, k, v = _inputs()
    mesh = _mesh()
    placed = [jax.device_put(x, NamedSharding(mesh, BOTH)) for x in (q, k, v)]
    out = jaxflash.attention(*placed, implementation="cpu")
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, BOTH), 4)
    assert_same_bits(out, jaxflash.attention(q, k, v, implementation="cpu"))


def test_device_order_does_not_matter():
    """BC-62's kind on virtual devices: reversed and permuted device order."""
    arrays = _inputs()
    run = jax.jit(lambda *a: _attend_and_gradients(*a, **DROPOUT))
    expected = run(*arrays)
    for order in (jax.devices()[::-1], [jax.devices()[i] for i in (3, 1, 4, 0, 5, 7, 2, 6)]):
        mesh = _mesh(devices=order)
        assert_same_bits(run(*(jax.device_put(x, NamedSharding(mesh, BOTH)) for x in arrays)), expected)


def test_all_options_sharded():
    """Every optional operand at once follows batch and heads."""
    q, k, v = _inputs()
    rng = np.random.default_rng(0)
    options = {
        "mask": jnp.asarray(rng.random((4, 1, 10, 12)) > 0.2),
        "key_value_seq_lengths": jnp.asarray([3, 12, 0, 7], jnp.int32),
        "query_segment_ids": jnp.asarray(rng.integers(-1, 2, (4, 10)), jnp.int32),
        "key_value_segment_ids": jnp.asarray(rng.integers(-1, 2, (4, 12)), jnp.int32),
        "sinks": normal(8, seed=6),
        "block_mask": jaxflash.BlockMask(jnp.asarray(rng.random((4, 8, 3, 3)) > 0.3), 4, 5),
        "logits_soft_cap": 5.0,
        "local_window_size": (6, 3),
        **DROPOUT,
    }
    run = jax.jit(lambda *a: _attend_and_gradients(*a, **options))
    expected = run(q, k, v)
    mesh = _mesh()
    compiled = run.lower(*(jax.device_put(x, NamedSharding(mesh, BOTH)) for x in (q, k, v))).compile()
    assert _collectives(compiled) == {}
    assert_same_bits(compiled(*(jax.device_put(x, NamedSharding(mesh, BOTH)) for x in (q, k, v))), expected)


@pytest.mark.parametrize("spmd_axis", [None, "y"])
def test_vmap_over_a_sharded_axis(spmd_axis):
    q, k, v = (jnp.stack(x) for x in zip(*(_inputs(seed=i) for i in range(4)), strict=True))
    run = jax.jit(jax.vmap(lambda *a: _attend_and_gradients(*a, is_causal=True), spmd_axis_name=spmd_axis))
    expected = run(q, k, v)
    mesh = _mesh()
    compiled = run.lower(*(jax.device_put(x, NamedSharding(mesh, P("y", "x"))) for x in (q, k, v))).compile()
    assert _collectives(compiled) == {}
    assert_same_bits(compiled(*(jax.device_put(x, NamedSharding(mesh, P("y", "x"))) for x in (q, k, v))), expected)


@pytest.mark.parametrize(
    ("q_spec", "kv_spec", "kv_heads"),
    [(BATCH, BATCH, 4), (HEADS, HEADS, 4), (BOTH, BOTH, 4), (BOTH, BATCH, 2), (BOTH, BATCH, 1)],
)
def test_explicit_axes(q_spec, kv_spec, kv_heads):
    arrays = (*_inputs(kv_heads), normal(4, 1, 1, 12, seed=4))
    expected = jax.jit(lambda *a: _attend_and_gradients(*a, **DROPOUT))(*arrays)
    mesh = _mesh(kind="Explicit")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(arrays, (q_spec, kv_spec, kv_spec, P(kv_spec[0])), strict=True)
        ]
        weights = jax.device_put(normal(4, 10, 8, 5, seed=3), NamedSharding(mesh, q_spec))

        @jax.jit
        def run(*arrays):
            results = jaxflash.attention(*arrays, return_residual=True, implementation="cpu", **DROPOUT)
            loss = lambda *a: _loss(*a, weights=weights, **DROPOUT)  # noqa: E731
            return results, jax.grad(loss, (0, 1, 2, 3))(*arrays)

        compiled = run.lower(*placed).compile()
        assert set(_collectives(compiled)) <= {"all-reduce"}
        (out, lse), grads = compiled(*placed)
        typed = jaxflash.attention(*placed, implementation="cpu")
    assert jax.typeof(typed).sharding.spec == P(*(*q_spec, None, None, None, None)[:3], None)
    assert_same_bits((out, lse, grads[0]), (*expected[0], expected[1][0]))
    assert_close(grads[1:], expected[1][1:])


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map(implementation, check_vma, where, kind):
    arrays = _inputs()
    weights = normal(4, 10, 8, 5, seed=3)

    def attend(q, k, v):
        return jaxflash.attention(q, k, v, is_causal=True, implementation=implementation)

    def gradients(attend):
        return lambda q, k, v, w: jax.grad(lambda *a: jnp.sum(attend(*a) * w), (0, 1, 2))(q, k, v)

    expected = gradients(attend)(*arrays, weights)
    mesh = _mesh(kind=kind)
    shard = lambda f, n, out: jax.shard_map(  # noqa: E731
        f, mesh=mesh, in_specs=(BOTH,) * n, out_specs=out, check_vma=check_vma
    )
    if where == "inside":
        run = shard(gradients(attend), 4, (BOTH,) * 3)
    else:
        run = gradients(shard(attend, 3, BOTH))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, BOTH)) for x in (*arrays, weights)]
        actual = jax.jit(run)(*placed)
    (assert_same_bits if implementation == "cpu" else assert_close)(actual, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_keys_shared_between_devices(check_vma):
    """MQA: keys do not vary over the head axis, so their gradient is a sum over it."""
    q, k, v = _inputs(1)
    weights = normal(4, 10, 8, 5, seed=3)

    def loss(attend):
        return lambda q, k, v: jnp.sum(attend(q, k, v) * weights)

    attend = lambda q, k, v: jaxflash.attention(q, k, v, implementation="cpu")  # noqa: E731
    sharded = jax.shard_map(attend, mesh=_mesh(), in_specs=(BOTH, BATCH, BATCH), out_specs=BOTH, check_vma=check_vma)
    expected = jax.grad(loss(attend), (0, 1, 2))(q, k, v)
    assert_close(jax.jit(jax.grad(loss(sharded), (0, 1, 2)))(q, k, v), expected)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map_over_some_axes(kind):
    """Manual over x; y is left to the partitioner."""
    arrays = _inputs()
    attend = lambda q, k, v: jaxflash.attention(q, k, v, is_causal=True, implementation="cpu")  # noqa: E731
    mesh = _mesh(kind=kind)
    run = jax.shard_map(attend, mesh=mesh, in_specs=(BATCH,) * 3, out_specs=BATCH, axis_names={"x"})
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, BATCH)) for x in arrays]
        assert_same_bits(jax.jit(run)(*placed), attend(*arrays))


def test_pmap(implementation):
    """Over all of 8 devices on the CPU, and over as many as there are and share 8 entries evenly on GPUs."""
    count = math.gcd(8, jax.local_device_count())
    arrays = _inputs(B=8)
    weights = normal(8, 10, 8, 5, seed=3)

    def gradients(q, k, v, w):
        attend = lambda *a: jaxflash.attention(*a, is_causal=True, implementation=implementation)  # noqa: E731
        return jax.grad(lambda *a: jnp.sum(attend(*a) * w), (0, 1, 2))(q, k, v)

    expected = gradients(*arrays, weights)
    split = [x.reshape(count, 8 // count, *x.shape[1:]) for x in (*arrays, weights)]
    actual = [x.reshape(8, *x.shape[2:]) for x in jax.pmap(gradients)(*split)]
    (assert_same_bits if implementation == "cpu" else assert_close)(tuple(actual), expected)

    def summed(q, k, v, w):
        return jax.lax.psum(gradients(q, k, v, w)[0], "devices")

    total = jnp.sum(jax.pmap(summed, axis_name="devices")(*split)[0], axis=0)
    assert_close(total, jnp.sum(expected[0], axis=0), rtol=1e-4, atol=1e-4)


def test_reference_is_sharded_by_jax():
    arrays = _inputs()
    run = jax.jit(lambda q, k, v: jaxflash.attention(q, k, v, is_causal=True, implementation="reference"))
    mesh = _mesh()
    assert_close(run(*(jax.device_put(x, NamedSharding(mesh, BOTH)) for x in arrays)), run(*arrays))


@pytest.mark.parametrize("spec", [BATCH, BOTH], ids=["batch", "both"])
def test_reference_on_explicit_axes(spec):
    arrays = _inputs()
    mesh = _mesh(kind="Explicit")

    def gradients(*arrays):
        attend = lambda *a: jaxflash.attention(*a, is_causal=True, implementation="reference")  # noqa: E731
        return attend(*arrays), jax.grad(lambda *a: jnp.sum(attend(*a) ** 2), (0, 1, 2))(*arrays)

    expected = gradients(*arrays)
    with jax.set_mesh(mesh):
        out, grads = jax.jit(gradients)(*(jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays))
    assert_close((out, grads), expected)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


@pytest.mark.parametrize(
    ("axes", "heads", "kv_heads", "expected_heads", "expected_kv_heads"),
    [
        (("x", "y"), 8, 8, ("x", "y"), ("x", "y")),  # whole KV groups
        (("y",), 8, 4, ("y",), ("y",)),
        (("y",), 8, 2, ("y",), ()),  # each device's heads lie in one group
        (("y",), 8, 1, ("y",), ()),
        (("y",), 12, 6, (), ()),  # neither: replicated
        (("y",), 6, 2, (), ()),  # heads do not divide
    ],
)
def test_choose_layout(axes, heads, kv_heads, expected_heads, expected_kv_heads):
    query_axes = (("x",) if "x" not in axes else (), (), axes, ())
    layout = choose_layout(_mesh(), query_axes, (4, 10, heads, 8), (4, 12, kv_heads, 8))
    assert layout == Layout((query_axes[0],), expected_heads, expected_kv_heads, (4,), heads)
