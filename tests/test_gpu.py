"""The GPU kernels: every option against float64, and what only a GPU can get wrong.

Run by `make test-gpu`. The rest of the suite runs on the GPU too, wherever a test takes an implementation.
"""

import dataclasses
import functools
import re
import subprocess
import sys
import textwrap
import threading

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_fuzz
from arrays import assert_same_bits, qkv
from conftest import GPU
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxflash

pytestmark = pytest.mark.gpu

HALF = ("bfloat16", "float16")
CONFIGS = {"fa3": 1000, "fa2": 1000, "fa1": 300}
LONG_CONFIGS = {"fa3": 100, "fa2": 100, "fa1": 50}  # several tiles in each direction
SEEDS_PER_TEST = 25
REPEATS = 1000
DROPOUT = {"dropout_rate": 0.2, "dropout_key": np.array([0, 7], np.uint32)}

every_kernel = pytest.mark.parametrize("kernel", [param.values[0] for param in GPU])


@pytest.fixture(autouse=True)
def dirty_memory():
    """BC-71 (FA#1813): what a kernel does not write, or reads without writing first, is NaN."""
    jax.block_until_ready([jnp.full((size << 18,), jnp.nan, jnp.float32) for size in (1, 4, 16, 64)])


def adapted(kernel: str, case: cases.Case) -> cases.Case:
    """The case without what the kernel refuses (README's table)."""
    if kernel == "fa1":
        untaken = {"bias": None, "sinks": None, "logits_soft_cap": None, "sequences": 0}
        case = dataclasses.replace(case, **untaken, H=min(case.H, 128), Hv=min(case.Hv, 128))
    if kernel == "fa3":
        sizes = {name: min(-(-getattr(case, name) // 8) * 8, 256) for name in ("H", "Hv")}
        scale = case.scale if case.scale is None or case.scale > 0 else None
        case = dataclasses.replace(case, **sizes, bias=None, mask=None, sequences=0, scale=scale, dropout_rate=0.0)
    return case


def seeds_of(counts: dict[str, int]):
    return [
        pytest.param(kernel, range(first, min(first + SEEDS_PER_TEST, count)), id=f"{kernel}-{first}")
        for kernel, count in counts.items()
        for first in range(0, count, SEEDS_PER_TEST)
    ]


def check_seeds(kernel, seeds, dtypes, **options):
    def config_of(seed):
        return adapted(kernel, test_fuzz.random_config(seed, **options)[0]), dtypes[seed % len(dtypes)]

    test_fuzz.check_seeds(kernel, seeds, config_of)


@pytest.mark.parametrize(("kernel", "seeds"), seeds_of(CONFIGS))
def test_random_problems(kernel, seeds):
    check_seeds(kernel, seeds, HALF)


@pytest.mark.parametrize(("kernel", "seeds"), seeds_of(LONG_CONFIGS))
def test_random_long_problems(kernel, seeds):
    lengths = (128, 129, 192, 257, 384, 511, 640, 1025)
    check_seeds(kernel, [10_000 + seed for seed in seeds], HALF, lengths=lengths, max_pairs=2_000_000)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
@every_kernel
def test_table(kernel, case):
    """The table of the CPU suite, in both half-precision types."""
    if max(case.H, case.Hv) > 256:
        case = dataclasses.replace(case, H=256, Hv=min(case.Hv, 256))
    for dtype in HALF:
        cases.check(kernel, cases.build(adapted(kernel, case), dtype))


@every_kernel
@pytest.mark.parametrize("T", [3, 150], ids=["decode", "long"])
def test_nan_is_seen_by_its_rows_alone(kernel, T):
    """A row of NaN gives NaN and not the 0 of a row that sees no key; a NaN key reaches the rows that see it."""
    query, key, value = (np.array(x) for x in qkv(B=2, T=T, S=700, N=4, K=2, H=64, Hv=64, dtype="bfloat16"))
    attend = functools.partial(jaxflash.attention, is_causal=True, return_residual=True, implementation=kernel)
    right = attend(query, key, value)
    query[1, 2, 3], key[0, 1, 1] = np.nan, np.nan
    for x, wanted in zip(attend(query, key, value), right, strict=True):
        is_nan = np.isnan(np.asarray(x, np.float32)).reshape(2, T, 4, -1)
        expected = np.zeros((2, T, 4, 1), bool)
        expected[1, 2, 3] = expected[0, 1:, 2:] = True
        np.testing.assert_array_equal(is_nan, np.broadcast_to(expected, is_nan.shape))
        same = np.broadcast_to(~expected[..., 0], x.shape[:3])
        np.testing.assert_array_equal(np.asarray(x)[same], np.asarray(wanted)[same])


# --- The same bits every time ---------------------------------------------------------------------------------------


def assert_repeats(run, arrays, names):
    """Runs REPEATS times and compares on the device; names: of the results."""
    first = run(*arrays)
    equal = jax.jit(lambda a, b: [jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)])
    same = [equal(run(*arrays), first) for _ in range(REPEATS)]
    differing = {name: int(REPEATS - sum(map(bool, flags))) for name, *flags in zip(names, *same, strict=True)}
    assert not any(differing.values()), f"of {REPEATS} repeats these differ: {differing}"


@every_kernel
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_repeats_bit_for_bit(kernel, head_dim, is_causal, deterministic):
    """dq is summed with atomics unless deterministic; all else always repeats."""
    dtype = HALF[head_dim == 128]
    query, key, value = qkv(B=2, T=333, S=517, N=4, K=2, H=head_dim, Hv=head_dim, dtype=dtype)

    @jax.jit
    def run(*arrays):
        def attend(*arrays):
            options = {"deterministic": deterministic, "is_causal": is_causal, "return_residual": True}
            return jaxflash.attention(*arrays, **options, implementation=kernel)

        (out, lse), pullback = jax.vjp(attend, *arrays)
        dq, dk, dv = pullback((out, lse))
        return (out, lse, dk, dv, dq) if deterministic else (out, lse, dk, dv)

    assert_repeats(run, (query, key, value), ("out", "lse", "dk", "dv", "dq")[: 5 if deterministic else 4])


@every_kernel
@pytest.mark.parametrize(
    "sizes",
    [{"B": 300, "T": 2048, "S": 128, "N": 1, "H": 128}, {"B": 60, "T": 997, "S": 997, "N": 4, "H": 64}],
    ids=["wide", "long"],
)
def test_repeats_on_a_busy_gpu(kernel, sizes):
    """BC-70 (FA#359, FA#2244, FA#429): results that change from run to run while other work shares the GPU."""
    keys = jax.random.split(jax.random.key(70), 3)
    shapes = [(sizes["B"], sizes[length], sizes["N"], sizes["H"]) for length in ("T", "S", "S")]
    arrays = [3 * jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]

    @jax.jit
    def run(*arrays):
        attend = functools.partial(jaxflash.attention, return_residual=True, implementation=kernel)
        (out, lse), pullback = jax.vjp(attend, *arrays)
        return out, lse, *pullback((out, lse))[1:]

    square, done = jax.jit(lambda x: x @ x), threading.Event()

    def keep_busy():
        x = jnp.eye(2048)
        while not done.is_set():
            x = jax.block_until_ready(square(x))

    worker = threading.Thread(target=keep_busy)
    worker.start()
    try:
        assert_repeats(run, arrays, ("out", "lse", "dk", "dv"))
    finally:
        done.set()
        worker.join()


BIASES = ("BNTS", "1NTS", "B1TS", "BN1S", "BNT1", "11TS", "1N11", "B11S", "1111")


@pytest.mark.parametrize("dims", BIASES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_float32", [False, True], ids=["half", "float32"])
def test_gradient_of_a_bias_repeats(dims, seed, is_float32):
    """Whatever the bias is broadcast over, on and off the tiles, right and the same to the bit."""
    rng = np.random.default_rng([seed, BIASES.index(dims)])
    case = cases.Case(
        f"bias-{dims}-{seed}",
        batch=((3,), (2, 3))[seed % 2],
        T=int(rng.integers(1, 300)),
        S=int(rng.integers(1, 300)),
        N=6,
        K=(6, 3, 2, 1)[seed],
        H=(64, 33, 128, 200)[seed],
        Hv=(64, 128, 72, 256)[seed],
        bias=("", "A", "", "1")[seed] + dims,
        bias_dtype=("float32", *HALF)[seed % 3],
        is_causal=seed == 1,
        logits_soft_cap=5.0 if seed == 2 else None,
        dropout_rate=0.3 if seed == 3 else 0.0,
        has_kv_lengths=seed == 0,
    )
    problem = cases.build(case, "float32" if is_float32 else HALF[seed % 2], seed)
    first = cases.check("fa2", problem, deterministic=True)
    for _ in range(3):
        cases.assert_same_bits(cases.forward_and_gradients("fa2", problem, deterministic=True), first)


# --- Sizes that overflow --------------------------------------------------------------------------------------------


def gradients(kernel, arrays, mask=None, **options):
    """out, lse and the gradients of query, key, value for cotangents out and lse."""

    @jax.jit
    def run(arrays, mask):
        every_option = {"mask": mask, "return_residual": True, "implementation": kernel} | options
        (out, lse), pullback = jax.vjp(functools.partial(jaxflash.attention, **every_option), *arrays)
        return out, lse, *pullback((out, jnp.where(jnp.isfinite(lse), lse, 0)))

    return run(arrays, mask)


@every_kernel
@pytest.mark.parametrize(("batch", "heads"), [(65_536, 8), (1, 65_536), (66_000, 3)], ids=str)
def test_more_heads_than_a_grid_dimension_holds(kernel, batch, heads):
    """BC-40 (PT#146704, XF#845, FA#1812): grid dimensions y and z end at 65,535."""
    query, key, value = qkv(B=batch, T=3, S=5, N=heads, K=heads, H=16, Hv=16, dtype="bfloat16")
    results = gradients(kernel, (query, key, value), deterministic=True)
    ends = (slice(-7, None), slice(-3, None)) if batch > 1 else (slice(None), slice(-64, None))
    last = [x[ends[0], :, ends[1]] for x in (query, key, value)]
    assert_same_bits([x[ends[0], :, ends[1]] for x in results], gradients(kernel, last, deterministic=True))
    cases.check(kernel, cases.problem(dict(zip(("query", "key", "value"), map(np.asarray, last), strict=True))))


@every_kernel
def test_keys_past_two_to_the_31_elements(kernel):
    """BC-79 (FA#47): the offset of the last batch entries in K and V does not fit 32 bits."""
    shapes = [(8, 500, 12, 64), (8, 350_000, 12, 64), (8, 350_000, 12, 64)]
    keys = jax.random.split(jax.random.key(79), 3)
    arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    attend = jax.jit(functools.partial(jaxflash.attention, implementation=kernel))
    last = attend(*(x[7:] for x in arrays))
    assert_same_bits(attend(*arrays)[7:], last)
    assert np.all(np.isfinite(np.asarray(last, np.float32))) and np.std(np.asarray(last, np.float32)) > 1e-4


def test_bias_past_two_to_the_31_elements():
    """BC-43 (XF#788): a bias of 2**31 elements equals the same bias broadcast over heads."""
    length, heads = 16_384, 8
    query, key, value = qkv(B=1, T=length, S=length, N=heads, K=heads, H=16, Hv=16, dtype="bfloat16")
    bias = jax.random.normal(jax.random.key(43), (1, 1, length, length), jnp.bfloat16)
    attend = jax.jit(functools.partial(jaxflash.attention, implementation="fa2"))
    whole = attend(query, key, value, jnp.broadcast_to(bias, (1, heads, length, length)))
    assert_same_bits(whole, attend(query, key, value, bias))


@every_kernel
def test_mask_past_two_to_the_32_elements(kernel):
    """BC-43 (flashattention2-custom-mask#2, PT#145040): the last rows of a mask of 65,537 x 65,537, backward too."""
    length = 65_537
    query, key, value = qkv(B=1, T=length, S=length, N=1, K=1, H=16, Hv=16, dtype="bfloat16")
    mask = jax.random.bernoulli(jax.random.key(43), 0.5, (1, 1, length, length))
    results = gradients(kernel, (query, key, value), mask=mask, deterministic=True)
    tail = gradients(kernel, (query[:, -64:], key, value), mask=mask[:, :, -64:], deterministic=True)
    for index in (0, 1, 2):  # out, lse, dq of the last rows
        np.testing.assert_allclose(
            np.asarray(results[index][:, -64:], np.float32), np.asarray(tail[index], np.float32), rtol=2e-2, atol=1e-4
        )


@every_kernel
@pytest.mark.parametrize("count", [65_535, 65_536, 80_000])
def test_very_many_sequences(kernel, count):
    """BC-31 (FA#1786): the first, middle and last of many packed sequences."""
    length = 16
    tokens = count * length
    query, key, value = (x[0] for x in qkv(B=1, T=tokens, S=tokens, N=1, K=1, H=64, Hv=64, dtype="bfloat16"))
    offsets = jnp.arange(count + 1, dtype=jnp.int32) * length
    out = jaxflash.flash_mha_varlen(query, key, value, offsets, is_causal=True, implementation=kernel)
    for first in (0, count // 2, count - 100):
        rows = slice(first * length, (first + 100) * length)
        alone = {
            name: np.asarray(x[rows]).reshape(100, length, 1, 64)
            for name, x in zip(("query", "key", "value"), (query, key, value), strict=True)
        }
        got = cases.check(kernel, cases.problem(alone, is_causal=True), gradients=False)
        assert_same_bits(np.asarray(out[rows]).reshape(got["out"].shape), got["out"])


UNEQUAL = {
    "two": ([1743, 1559], [1743, 1559]),
    "empty": ([0, 0, 1023], [0, 1, 2045]),
    "one long": ([8191, *[1] * 63], [8191, *[1] * 63]),
}


@every_kernel
@pytest.mark.parametrize("lengths", UNEQUAL.values(), ids=UNEQUAL)
def test_very_unequal_sequences(kernel, lengths):
    """BC-30 (candle#3603, FA#1254): wrong results or a hang; 20 repeats give the same bits."""
    heads, head_dim = 4, 128
    offsets = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in lengths]
    totals = [int(x[-1]) for x in offsets]
    query, key, value = (
        x[0] for x in qkv(B=1, T=totals[0], S=totals[1], N=heads, K=heads, H=head_dim, Hv=head_dim, dtype="bfloat16")
    )
    attend = jax.jit(functools.partial(jaxflash.flash_mha_varlen, is_causal=True, implementation=kernel))
    out = attend(query, key, value, *offsets)
    for _ in range(20):
        assert_same_bits(attend(query, key, value, *offsets), out)
    for i in {0, len(lengths[0]) - 1}:
        rows, keys = (slice(x[i], x[i + 1]) for x in offsets)
        if rows.start == rows.stop:
            continue
        alone = {"query": np.asarray(query)[None, rows], "key": np.asarray(key)[None, keys]}
        alone["value"] = np.asarray(value)[None, keys]
        static = {"is_causal": True, "causal_alignment": "bottom_right"}
        if rows.stop - rows.start < 4096:  # the oracle holds every logit
            cases.check(kernel, cases.problem(alone, **static), gradients=False)
        own = [jnp.asarray([0, x.stop - x.start], jnp.int32) for x in (rows, keys)]
        assert_same_bits(out[rows], attend(query[rows], key[keys], value[keys], *own))


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_wide_heads_of_a_batch(batch):
    """BC-39 (TE#3216, FA#1306): the backward at head dim 256 was wrong from batch 2 on."""
    arrays = cases.qkv(39, batch, 300, 300, 16, 2, 256, dtype="bfloat16")
    got = cases.check("fa2", cases.problem(arrays, is_causal=True), deterministic=True)
    for row in range(batch):
        one = cases.problem({name: x[row : row + 1] for name, x in arrays.items()}, is_causal=True)
        whole = cases.problem(arrays, is_causal=True)
        one.dout, one.dlse = whole.dout[row : row + 1], whole.dlse[row : row + 1]
        alone = cases.forward_and_gradients("fa2", one, deterministic=True)
        cases.assert_same_bits({name: x[row : row + 1] for name, x in got.items()}, alone)


# --- Programs -------------------------------------------------------------------------------------------------------


@every_kernel
def test_command_buffers_change_nothing(kernel):
    """BC-58 (FA#314, PT#84614): a captured call replays with new contents, dropout keys among them."""
    query, key, value = qkv(B=2, T=128, S=128, N=4, K=4, H=64, Hv=64, dtype="bfloat16")

    def run(query, key, value, dropout_keys):
        def loss(query, key, value, dropout_key):
            options = {"dropout_rate": 0.3, "dropout_key": dropout_key, "deterministic": True}
            out = jaxflash.attention(query, key, value, **options, implementation=kernel)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        results = []
        for dropout_key in dropout_keys:
            gradient, query = jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value, dropout_key)
            results.append(gradient)
        return results

    off = jax.jit(run, compiler_options={"xla_gpu_enable_command_buffer": ""})
    on = jax.jit(run, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    for step in range(4):
        dropout_keys = jax.random.split(jax.random.key(step), 3)
        assert_same_bits(
            jax.tree.leaves(on(query, key, value, dropout_keys)), jax.tree.leaves(off(query, key, value, dropout_keys))
        )


@every_kernel
def test_export_round_trip(kernel):
    """BC-72 (JAX#26605): a serialised program gives the same bits."""
    arrays = qkv(B=2, T=37, S=53, N=4, K=2, H=64, Hv=64, dtype="bfloat16")
    run = jax.jit(lambda *arrays: gradients(kernel, arrays, deterministic=True))
    exported = jax.export.export(run, platforms=["cuda"], disabled_checks=jaxflash.export_checks())(*arrays)
    loaded = jax.export.deserialize(exported.serialize())
    assert_same_bits(jax.jit(loaded.call)(*arrays), run(*arrays))


FIRST_CALLS = """
    import threading, jax, jax.numpy as jnp, numpy as np, jaxflash
    def call(i):
        rng = np.random.default_rng(i)
        shape = (1 + i % 2, 50 + 9 * i, 4, 16 * (i + 1))
        q, k, v = (jnp.asarray(rng.standard_normal(shape), ["bfloat16", "float16"][i % 2]) for _ in range(3))
        return np.asarray(jaxflash.attention(q, k, v, is_causal=i % 3 == 0, implementation="KERNEL"), np.float32)
    results = [[] for _ in range(8)]
    def work(i):
        for _ in range(125): results[i].append(call(i))
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert all(len(calls) == 125 for calls in results)
    for i, calls in enumerate(results):
        alone = call(i)
        assert all(np.array_equal(x, alone) for x in calls), i
    print("same bits")
"""


@every_kernel
def test_first_calls_from_many_threads(kernel):
    """BC-64 (TE#236, PT#103793): a fresh process whose first calls come from 8 threads at once."""
    script = textwrap.dedent(FIRST_CALLS).replace("KERNEL", kernel)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert run.stdout.strip() == "same bits", run.stderr[-2000:]


@pytest.mark.parametrize(
    ("kernel", "arrays", "options", "reason"),
    [
        ("fa2", qkv(H=257, dtype=jnp.bfloat16), {}, "takes head dims up to 256, this call has 257"),
        ("fa1", qkv(dtype=jnp.float32), {}, "query is float32"),
        ("fa1", qkv(H=129, dtype=jnp.bfloat16), {}, "takes head dims up to 128, this call has 129"),
        ("fa1", qkv(dtype=jnp.bfloat16), {"logits_soft_cap": 2.0}, "takes no logits_soft_cap"),
    ],
    ids=["fa2-head_dim", "fa1-float32", "fa1-head_dim", "fa1-soft_cap"],
)
def test_refuses(kernel, arrays, options, reason):
    assert reason in jaxflash.why(*arrays, **options).reasons[kernel]
    with pytest.raises(NotImplementedError, match=f"{kernel} refused"):
        jaxflash.attention(*arrays, **options, implementation=kernel)


# --- Two GPUs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus():
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    return jax.devices()[:2]


@every_kernel
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("is_reversed", [False, True], ids=["in_order", "reversed"])
@pytest.mark.parametrize("options", [{"is_causal": True}, DROPOUT], ids=["causal", "dropout"])
@pytest.mark.parametrize("T", [257, 4], ids=["long", "decode"])
def test_two_gpus_equal_one(two_gpus, kernel, spec, is_reversed, options, T):
    """BC-60, BC-56 and BC-62 on real devices: same bits, no collective, whichever device comes first."""
    arrays = qkv(B=4, T=T, S=1391, N=8, K=4, H=64, Hv=64, dtype="bfloat16")
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((4, T, 8, 64)), jnp.float32)

    @jax.jit
    def run(*arrays):
        def loss(*arrays):
            attend = functools.partial(jaxflash.attention, deterministic=True, implementation=kernel, **options)
            out, lse = attend(*arrays, return_residual=True)
            return jnp.sum(out.astype(jnp.float32) * weights) + jnp.sum(jnp.sin(lse))

        return jaxflash.attention(*arrays, implementation=kernel, **options), jax.grad(loss, (0, 1, 2))(*arrays)

    expected = [run(*(jax.device_put(x, device) for x in arrays)) for device in two_gpus]
    assert_same_bits(expected[1], expected[0])
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=two_gpus[:: -1 if is_reversed else 1])
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
    compiled = run.lower(*sharded).compile()
    assert not re.search(r"all-(gather|reduce|to-all)(-start)?\(|collective-permute", compiled.as_text())
    assert_same_bits(compiled(*sharded), expected[0])


@every_kernel
def test_pmap_equals_one(two_gpus, kernel):
    arrays = qkv(B=4, T=65, S=129, N=8, K=4, H=64, Hv=64, dtype="bfloat16")
    halves = [jnp.reshape(x, (2, 2, *x.shape[1:])) for x in arrays]
    run = lambda *arrays: gradients(kernel, arrays, deterministic=True)  # noqa: E731
    mapped = jax.pmap(run, devices=two_gpus)(*halves)
    assert_same_bits([np.concatenate(np.asarray(x)) for x in mapped], run(*arrays))


@every_kernel
def test_each_gpu_in_any_order_of_sizes(two_gpus, kernel):
    """BC-62 (FA#54, FA#2356, FI#452): a device that was not first, and large launches after small ones."""
    for order in ((1,), (0, 1), (1, 0)):
        for head_dim in (64, 128, 64):
            arrays = qkv(B=2, T=65, S=129, N=4, K=2, H=head_dim, Hv=head_dim, dtype="bfloat16")
            results = [gradients(kernel, [jax.device_put(x, two_gpus[i]) for x in arrays]) for i in order]
            for result in results:
                assert_same_bits(result[:2], gradients(kernel, arrays)[:2])
