"""Faults reported for other libraries: ranges, precisions, sizes and tails. BC-xx names a kind of fault."""

import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxflash

LOWEST = {dtype: float(jnp.finfo(dtype).min) for dtype in cases.DTYPES}


@pytest.mark.parametrize("bias_dtype", cases.DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowest_finite_bias_hides_keys_but_is_no_infinity(kernel, dtype, bias_dtype):
    """BC-05 (PT#109517): the most negative finite value as bias overflowed to -inf, and then to NaN."""
    bias = np.zeros((1, 1, 441, 441), jnp.dtype(bias_dtype))
    bias[..., :128] = LOWEST[bias_dtype]
    arrays = cases.qkv(5, 1, 441, 441, 2, 2, 32, dtype=dtype)
    got = cases.check(kernel, cases.problem(arrays | {"bias": bias}, has_dlse=False))
    assert all(np.all(np.isfinite(x.astype(np.float32))) for x in got.values())
    mask = np.broadcast_to(np.arange(441) >= 128, (1, 1, 441, 441))
    masked = cases.forward(kernel, cases.problem(arrays | {"mask": mask}))["out"]
    assert np.array_equal(got["out"], masked)


@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("low", [-1e4, -65504.0, -1e9, -1e30, LOWEST["bfloat16"], LOWEST["float32"]])
def test_row_at_a_very_negative_bias(implementation, low, cap):
    """BC-05: such a row is the mean of v, and so are its gradients, although lse cannot hold log S beside the bias."""
    bias = np.zeros((1, 1, 20, 90), np.float32)
    bias[..., 5, :] = low
    problem = cases.problem(cases.qkv(5, 2, 20, 90, 2, 1, 16) | {"bias": bias}, logits_soft_cap=cap)
    got = cases.check(implementation, problem)
    assert all(np.all(np.isfinite(x)) for x in got.values())
    if low < -1e7:  # above it float32 still tells the logits apart
        mean = np.broadcast_to(problem.arrays["value"].mean(1), got["out"][:, 5].shape)
        np.testing.assert_allclose(got["out"][:, 5], mean, rtol=1e-4, atol=1e-5)


def merge(parts):
    """Attention over the union of key sets from attention over each, by lse."""
    outs, lses = zip(*parts, strict=True)
    total = np.logaddexp(*(np.asarray(x, np.float64) for x in lses))
    safe = np.where(total == -np.inf, 0, total)
    return sum(np.exp(lse - safe)[..., None] * out for out, lse in zip(outs, lses, strict=True)), total


@pytest.mark.parametrize("head_dim", [8, 64])
def test_lse_of_empty_rows_merges(implementation, head_dim):
    """BC-07 (FA#978, FI#4484, FlashMLA#77): +inf or 0 for empty rows made merged results NaN or wrong."""
    arrays = cases.qkv(7, 2, 5, 7, 4, 2, head_dim)
    mask = np.ones((1, 1, 5, 7), bool)
    mask[..., 2, :] = mask[..., 3, :3] = mask[..., 4, 3:] = False

    def run(keys):
        part = arrays | {name: arrays[name][:, keys] for name in ("key", "value")} | {"mask": mask[..., keys]}
        out, lse = cases.call(implementation, cases.problem(part), part)
        return np.asarray(out), np.asarray(lse)

    whole, first, second = run(slice(None)), run(slice(0, 3)), run(slice(3, None))
    assert np.all(whole[1][:, 2] == -np.inf) and np.all(first[1][:, [2, 3]] == -np.inf)
    out, lse = merge([first, second])
    np.testing.assert_allclose(out, whole[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-6, atol=1e-6)
    neutral = merge([whole, (np.zeros_like(whole[0]), np.full_like(whole[1], -np.inf))])
    np.testing.assert_allclose(neutral[0], whole[0], rtol=1e-6)


def test_logits_under_any_sentinel(implementation):
    """BC-03 (FI#4267): true logits below a finite stand-in for -inf were taken for masked."""
    arrays = cases.qkv(3, 1, 8, 257, 1, 1, 128, dtype="bfloat16")
    arrays["query"] = np.zeros_like(arrays["query"])
    arrays["key"] = np.zeros_like(arrays["key"])
    arrays["query"][..., 0], arrays["key"][..., 0] = 448, -1880
    out, lse = cases.call(implementation, cases.problem(arrays), arrays)
    mean = arrays["value"].astype(np.float64).mean(1)[:, None]
    np.testing.assert_allclose(np.asarray(out, np.float64), np.broadcast_to(mean, out.shape), atol=2e-3)
    wanted = 448 * float(arrays["key"][0, 0, 0, 0]) / math.sqrt(128) + math.log(257)
    np.testing.assert_allclose(lse, wanted, rtol=1e-6)


def test_lse_is_a_natural_logarithm(implementation):
    """BC-08 (PT#181645): lse was off by the factor ln 2."""
    arrays = cases.qkv(8, 1, 3, 37, 2, 1, 64)
    arrays["query"] = np.zeros_like(arrays["query"])
    np.testing.assert_allclose(cases.call(implementation, cases.problem(arrays), arrays)[1], math.log(37), atol=1e-5)
    cases.check(implementation, cases.problem(cases.qkv(8, 1, 3, 37, 2, 1, 64), scale=0.3, logits_soft_cap=5.0))


@pytest.mark.parametrize("S", [3, 64, 257])
@pytest.mark.parametrize("T", [1, 4])
def test_products_beyond_half_precision(kernel, T, S):
    """BC-09 (executorch#22133): q.k was kept in float16 before it was scaled."""
    arrays = cases.qkv(9, 1, T, S, 2, 1, 128, dtype="float16")
    arrays["query"][:] = arrays["key"][:] = 60
    out, lse = cases.call(kernel, cases.problem(arrays), arrays)
    mean = arrays["value"].astype(np.float64).mean(1)[:, None]
    np.testing.assert_allclose(np.asarray(out, np.float64), np.broadcast_to(mean, out.shape), atol=1e-3)
    np.testing.assert_allclose(lse, 460800 / math.sqrt(128) + math.log(S), rtol=1e-5)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("T", [1, 64])
def test_one_key(kernel, T, dtype):
    """BC-10 (FA#334): the backward gave NaN when there was one key."""
    problem = cases.problem(cases.qkv(352, 1, T, 1, 2, 2, 16, dtype=dtype, size=3.0), has_dlse=False)
    got = cases.check(kernel, problem)
    value = np.broadcast_to(problem.arrays["value"], got["out"].shape)
    if dtype == "float32" and kernel != "cpu":  # fa2 multiplies float32 in parts (docs/numerics.md)
        np.testing.assert_allclose(got["out"], value, rtol=2**-22)
    else:
        assert np.array_equal(got["out"], value)
    assert np.max(np.abs(got["dquery"].astype(np.float32))) < (0.1 if dtype == "bfloat16" else 1e-2)


def test_more_keys_than_16_bits_count(kernel):
    """BC-12 (XF#719): wrong results past 2**15 keys."""
    shape = (1, 33728, 1, 64)
    out, lse = jaxflash.attention(
        np.zeros((1, 2, 1, 64), jnp.bfloat16), np.zeros(shape, jnp.bfloat16), np.ones(shape, jnp.bfloat16),
        return_residual=True, implementation=kernel,
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(out, np.float32), 1, atol=1e-2)
    np.testing.assert_allclose(lse, math.log(33728), rtol=1e-6)


@pytest.mark.parametrize("cap", [1.0, 50.0])
@pytest.mark.parametrize("form", ["dense", "window", "packed"])
def test_soft_cap_and_its_gradient(kernel, form, cap):
    """BC-13 (FA#2402, FA#2396, FA#2544): wrong soft cap or gradient, and a hang with packed sequences."""
    batch = () if form == "packed" else 2
    arrays = cases.qkv(13, batch, 128, 217, 4, 2, 64, size=8.0)
    if form == "packed":
        arrays |= {"cu_seqlens_q": np.array([0, 50, 128], np.int32), "cu_seqlens_k": np.array([0, 101, 217], np.int32)}
    window = (40, 20) if form == "window" else None
    cases.check(kernel, cases.problem(arrays, logits_soft_cap=cap, local_window_size=window))


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-6, -1.0])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_scale_of_any_sign(kernel, scale, cap):
    """BC-14 (FA#1461): a maximum taken before the scale is wrong when the scale is negative or 0."""
    problem = cases.problem(cases.qkv(14, 1, 16, 96, 2, 1, 64, size=4.0), scale=scale, logits_soft_cap=cap)
    got = cases.check(kernel, problem)
    if scale == 0:
        assert np.all(got["dquery"] == 0) and np.all(got["dkey"] == 0)
        mean = np.broadcast_to(problem.arrays["value"].mean(1)[:, None], (1, 16, 2, 64))
        np.testing.assert_allclose(got["out"], mean, atol=1e-5)


@pytest.mark.parametrize("sizes", [(517, 128), (517, 1000), (250, 500)], ids=str)
def test_lengths_that_differ(kernel, sizes):
    """BC-36 (JAX#24491, XLA#19780): one length was used for both axes; all-ones input gives ones."""
    cases.check(kernel, cases.problem(cases.qkv(36, 1, *sizes, 2, 2, 32)))
    ones = {name: np.ones_like(x) for name, x in cases.qkv(36, 1, *sizes, 2, 2, 32).items()}
    np.testing.assert_allclose(cases.call(kernel, cases.problem(ones), ones)[0], 1, rtol=1e-6)


def test_every_length_of_a_tail(implementation):
    """BC-35 (JAX#27224, JAX#23819): keys after the last full block were dropped. A batch element for each length."""
    lengths = np.arange(1, 261, dtype=np.int32)
    arrays = cases.qkv(35, 260, 3, 260, 1, 1, 16) | {"key_value_seq_lengths": lengths}
    cases.check(implementation, cases.problem(arrays))


@pytest.mark.parametrize(
    "size", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 192, 255, 257]
)
def test_sizes_around_tiles(kernel, size):
    """BC-35: arrays that end in a tail, and the same bits from the first call on."""
    problem = cases.problem(cases.qkv(35, 2, size, size, 2, 1, 16), is_causal=size % 2 == 0)
    first = cases.check(kernel, problem, deterministic=True)
    cases.assert_same_bits(first, cases.forward_and_gradients(kernel, problem, deterministic=True))


@pytest.mark.parametrize(("head_dim", "size"), [(128, 33), (128, 65), (128, 129), (256, 97), (256, 257)])
def test_tail_of_one_key(kernel, head_dim, size):
    """BC-78 (PT#191937): wrong when the key length is 1 mod 32 with a mask and shared K/V."""
    arrays = cases.qkv(78, 1, size, size, 8, 1, head_dim, dtype="bfloat16")
    arrays["key"] = (arrays["key"].astype(np.float32) * 20).astype(arrays["key"].dtype)
    arrays["mask"] = cases.normal(79, 1, 1, size, size) > -1
    got = cases.check(kernel, cases.problem(arrays), gradients=False)
    padded = {name: np.pad(arrays[name], [(0, 0), (0, 1), (0, 0), (0, 0)]) for name in ("key", "value")}
    padded["mask"] = np.pad(arrays["mask"], [(0, 0), (0, 0), (0, 0), (0, 1)])
    same = cases.forward(kernel, cases.problem(arrays | padded))
    np.testing.assert_allclose(*(x["out"].astype(np.float32) for x in (got, same)), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("bias_dtype", cases.DTYPES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dtype_of_bias_is_its_own(kernel, dtype, bias_dtype):
    """BC-45 (JAX#32242): a float32 bias with bfloat16 operands gave NaN or a gradient of the wrong dtype."""
    arrays = cases.qkv(45, 3, 65, 70, 4, 4, 32, dtype=dtype) | {
        "bias": cases.normal(46, 1, 4, 65, 70, dtype=bias_dtype)
    }
    got = cases.check(kernel, cases.problem(arrays))
    assert got["dbias"].dtype == jnp.dtype(bias_dtype) and np.all(np.isfinite(got["dbias"].astype(np.float32)))


class TestDtypeContract:
    """BC-73 (FA#152): float32 and float64 run as such; anything else is refused, never cast (test_validate.py)."""

    def test_float32_is_not_rounded_on_the_way(self, implementation):
        arrays = cases.qkv(73, 2, 40, 50, 2, 1, 64)
        out, _ = cases.call(implementation, cases.problem(arrays), arrays)
        right = oracle.attention64(**arrays).out
        assert np.max(np.abs(out - right)) <= 1e-5 * np.max(np.abs(right)) and out.dtype == np.float32

    def test_float64(self, kernel):
        with jax.enable_x64(True):
            arrays = {name: x.astype(np.float64) for name, x in cases.qkv(73, 2, 40, 50, 2, 1, 64).items()}
            out = jaxflash.attention(**arrays, is_causal=True, logits_soft_cap=3.0)
            right = oracle.attention64(**arrays, is_causal=True, logits_soft_cap=3.0).out
            assert out.dtype == np.float64 and np.max(np.abs(out - right)) < 1e-12
            with pytest.raises(NotImplementedError, match="float64"):
                jaxflash.attention(**arrays, implementation=kernel)


@pytest.mark.parametrize("kv_lengths", [None, [1, 9, 4096], [0, 100, 700]], ids=str)
@pytest.mark.parametrize("S", [1, 17, 4096])
def test_one_query_against_many_keys(kernel, S, kv_lengths):
    """BC-69 (FA#1647, FlagGems#5235, torchtitan#3235): splits without keys, when lengths are far below S."""
    arrays = cases.qkv(69, 3, 1, S, 16, 8, 32)
    if kv_lengths:
        arrays["key_value_seq_lengths"] = np.minimum(kv_lengths, S).astype(np.int32)
    cases.check(kernel, cases.problem(arrays))


@pytest.mark.parametrize("sizes", [(192, 128), (64, 96), (96, 64), (128, 64), (8, 256), (256, 8)], ids=str)
def test_value_head_dim_of_its_own(kernel, sizes):
    """BC-38 (native-sparse-attention-triton#27, FA#1487): a value head dim unlike the key's was cut off."""
    H, Hv = sizes
    cases.check(kernel, cases.problem(cases.qkv(38, 2, 70, 90, 4, 2, H, Hv)))


@pytest.mark.parametrize("T", [1, 100])
def test_a_row_does_not_depend_on_its_batch(kernel, T):
    """BC-74 (vllm#47069): the same row in another batch gave other bits."""
    arrays = cases.qkv(74, 64, T, 130, 4, 2, 32)
    whole = cases.forward(kernel, cases.problem(arrays, is_causal=True))
    for rows in (slice(0, 1), slice(56, 64)):
        part = cases.forward(kernel, cases.problem({name: x[rows] for name, x in arrays.items()}, is_causal=True))
        cases.assert_same_bits({name: x[rows] for name, x in whole.items()}, part)
