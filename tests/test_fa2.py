"""FlashAttention-2 on a GPU: every option against float64, and what only a GPU can get wrong."""

import functools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_fuzz
from arrays import assert_same_bits, qkv
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash

pytestmark = pytest.mark.gpu

CONFIGS = 300
SEEDS_PER_TEST = 50
HALF = ("bfloat16", "float16")
DROPOUT = {"dropout_rate": 0.2, "dropout_key": np.array([0, 7], np.uint32)}


@pytest.mark.parametrize("first", range(0, CONFIGS, SEEDS_PER_TEST))
def test_random_problems(first):
    failures = []
    for seed in range(first, first + SEEDS_PER_TEST):
        case, _ = test_fuzz.random_config(seed)
        try:
            cases.check("fa2", cases.build(case, HALF[seed % 2], seed))
        except Exception as error:  # each seed is reported, whatever it raised
            failures.append(f"{str(error).splitlines()[:1]}\n  {case!r} {HALF[seed % 2]} seed {seed}")
    jax.clear_caches()  # no program is used twice
    assert not failures, f"{len(failures)} of {SEEDS_PER_TEST} configurations failed:\n" + "\n".join(failures)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_repeats_bit_for_bit(dtype, head_dim, is_causal):
    query, key, value = qkv(B=2, T=333, S=517, N=4, K=2, H=head_dim, Hv=head_dim, dtype=dtype)

    @jax.jit
    def run(query, key, value):
        def attend(*arrays):
            return jaxflash.attention(*arrays, is_causal=is_causal, deterministic=True, implementation="fa2")

        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(out)

    first = run(query, key, value)
    for _ in range(50):
        assert_same_bits(run(query, key, value), first)


def test_more_heads_than_a_grid_dimension_holds():
    batch = 66_000
    query, key, value = qkv(B=batch, T=3, S=5, N=1, K=1, H=8, Hv=8, dtype="bfloat16")
    out = jaxflash.attention(query, key, value, implementation="fa2")
    last = jaxflash.attention(query[-7:], key[-7:], value[-7:], implementation="fa2")
    assert_same_bits(out[-7:], last)
    assert np.all(np.isfinite(np.asarray(out, np.float32)))


def test_command_buffers_change_nothing():
    query, key, value = qkv(B=2, T=128, S=128, N=4, K=4, H=64, Hv=64, dtype="bfloat16")

    def run(x, key, value):
        for _ in range(4):
            x = jaxflash.attention(x, key, value, implementation="fa2")
        return x

    off = jax.jit(run, compiler_options={"xla_gpu_enable_command_buffer": ""})
    on = jax.jit(run, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    expected = off(query, key, value)
    for _ in range(3):
        assert_same_bits(on(query, key, value), expected)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (qkv(dtype=jnp.float32), "query is float32"),
        (qkv(H=257, dtype=jnp.bfloat16), "takes head dims up to 256, this call has 257"),
    ],
    ids=["float32", "head_dim"],
)
def test_refuses(arrays, reason):
    assert reason in jaxflash.why(*arrays).reasons["fa2"]
    with pytest.raises(NotImplementedError, match="fa2 refused"):
        jaxflash.attention(*arrays, implementation="fa2")


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("is_reversed", [False, True], ids=["in_order", "reversed"])
@pytest.mark.parametrize("options", [{"is_causal": True}, DROPOUT], ids=["causal", "dropout"])
def test_two_gpus_equal_one(spec, is_reversed, options):
    """BC-60, BC-56 and BC-62 on real devices: same bits, no collective, whichever device comes first."""
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    arrays = qkv(B=4, T=257, S=391, N=8, K=4, H=64, Hv=64, dtype="bfloat16")
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((4, 257, 8, 64)), jnp.float32)

    @jax.jit
    def run(*arrays):
        def loss(*arrays):
            attend = functools.partial(jaxflash.attention, deterministic=True, implementation="fa2", **options)
            out, lse = attend(*arrays, return_residual=True)
            return jnp.sum(out.astype(jnp.float32) * weights) + jnp.sum(jnp.sin(lse))

        return jaxflash.attention(*arrays, implementation="fa2", **options), jax.grad(loss, (0, 1, 2))(*arrays)

    expected = [run(*(jax.device_put(x, device) for x in arrays)) for device in devices]
    assert_same_bits(expected[1], expected[0])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:: -1 if is_reversed else 1])
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
    compiled = run.lower(*sharded).compile()
    assert not re.search(r"all-(gather|reduce|to-all)(-start)?\(|collective-permute", compiled.as_text())
    assert_same_bits(compiled(*sharded), expected[0])
