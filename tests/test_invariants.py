"""Properties that hold whatever the numbers are, on random problems."""

import cases
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Every example compiles a program, so there are few of them, and none is repeated.
modest = settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
SIZES = st.sampled_from([1, 2, 7, 16, 17, 33, 64, 65, 70])
SEEDS = st.integers(0, 2**31 - 1)


def draw(seed, T, S, N=4, K=2, H=16, batch=2, dtype="float32"):
    return cases.qkv(seed, batch, T, S, N, K, H, dtype=dtype)


def run(arrays, implementation="cpu", gradients=True, **static):
    problem = cases.problem(arrays, **static)
    return (cases.forward_and_gradients if gradients else cases.forward)(implementation, problem)


@modest
@given(seed=SEEDS, T=SIZES, S=SIZES, data=st.data())
def test_what_comes_later_cannot_matter(seed, T, S, data):
    """Keys after the diagonal are replaced; the row and those above it stay the same to the bit."""
    alignment = data.draw(st.sampled_from(["top_left", "bottom_right"]))
    arrays = draw(seed, T, S)
    row = data.draw(st.integers(0, T - 1))
    last = row + (S - T if alignment == "bottom_right" else 0)
    later = np.arange(S)[:, None, None] > last
    changed = {name: np.where(later, np.float32(seed % 7 + 10), arrays[name]) for name in ("key", "value")}
    static = {"is_causal": True, "causal_alignment": alignment}
    before = run(arrays, gradients=False, **static)
    after = run(arrays | changed, gradients=False, **static)
    for name in ("out", "lse"):
        assert np.array_equal(before[name][:, : row + 1], after[name][:, : row + 1])


@modest
@given(seed=SEEDS, T=SIZES, S=SIZES)
def test_keys_nobody_sees_get_no_gradient(seed, T, S):
    got = run(draw(seed, T, S), is_causal=True)
    assert np.all(got["dkey"][:, T:] == 0) and np.all(got["dvalue"][:, T:] == 0)


@modest
@given(seed=SEEDS, T=SIZES, S=SIZES, shift=st.floats(-30, 30, width=32))
def test_shift_of_a_rows_logits(seed, T, S, shift):
    """A constant added to a row's logits moves lse by it and nothing else."""
    arrays = draw(seed, T, S) | {"bias": cases.normal(seed, 2, 4, T, 1)}
    before = run(arrays, gradients=False)
    after = run(arrays | {"bias": arrays["bias"] + np.float32(shift)}, gradients=False)
    np.testing.assert_allclose(after["out"], before["out"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after["lse"], before["lse"] + shift, rtol=1e-5, atol=2e-5)


@modest
@given(seed=SEEDS, T=SIZES, S=SIZES)
def test_order_of_keys_does_not_matter(seed, T, S):
    """Permuting keys, values and mask together permutes the gradients and leaves out as it is."""
    arrays = draw(seed, T, S) | {"mask": cases.normal(seed, 2, 1, T, S) > -0.5}
    order = np.random.default_rng(seed).permutation(S)
    permuted = {name: arrays[name][:, order] for name in ("key", "value")} | {"mask": arrays["mask"][..., order]}
    a, b = run(arrays), run(arrays | permuted)
    for name, x in a.items():
        expected = x[:, order] if name in ("dkey", "dvalue") else x
        np.testing.assert_allclose(b[name], expected, rtol=1e-4, atol=2e-5, err_msg=name)


@modest
@given(seed=SEEDS, T=SIZES, S=SIZES)
def test_order_of_queries_does_not_matter(seed, T, S):
    arrays = draw(seed, T, S)
    order = np.random.default_rng(seed).permutation(T)
    a, b = run(arrays, gradients=False), run(arrays | {"query": arrays["query"][:, order]}, gradients=False)
    for name in a:
        np.testing.assert_allclose(b[name], a[name][:, order], rtol=1e-5, atol=1e-5)


@modest
@given(seed=SEEDS, T=SIZES, S=st.integers(2, 140), data=st.data())
def test_parts_of_the_keys_merge_by_lse(seed, T, S, data):
    """softmax over a union is the lse-weighted mean of the softmaxes over its parts."""
    cut = data.draw(st.integers(1, S - 1))
    arrays = draw(seed, T, S)
    whole = run(arrays, gradients=False)
    parts = [
        run(arrays | {name: arrays[name][:, keys] for name in ("key", "value")}, gradients=False)
        for keys in (slice(0, cut), slice(cut, None))
    ]
    lse = np.logaddexp(*(part["lse"].astype(np.float64) for part in parts))
    out = sum(np.exp(part["lse"] - lse)[..., None] * part["out"] for part in parts)
    np.testing.assert_allclose(out, whole["out"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, whole["lse"], rtol=1e-5, atol=1e-5)


@modest
@given(seed=SEEDS, T=SIZES, S=SIZES, dtype=st.sampled_from(cases.DTYPES))
def test_values_enter_linearly(seed, T, S, dtype):
    """Twice the values give exactly twice out: the softmax does not depend on them."""
    arrays = draw(seed, T, S, dtype=dtype)
    once = run(arrays, gradients=False)
    twice = run(arrays | {"value": arrays["value"] * np.asarray(2, arrays["value"].dtype)}, gradients=False)
    assert np.array_equal(twice["out"], once["out"] * np.asarray(2, once["out"].dtype))
    assert np.array_equal(twice["lse"], once["lse"])


@modest
@given(seed=SEEDS, T=SIZES, S=SIZES)
def test_out_is_a_mean_of_values(seed, T, S):
    arrays = draw(seed, T, S)
    out = run(arrays, gradients=False)["out"].reshape(2, T, 2, 2, 16)
    low, high = arrays["value"].min(1), arrays["value"].max(1)
    assert np.all(out >= low[:, None, :, None] - 1e-5) and np.all(out <= high[:, None, :, None] + 1e-5)


@modest
@given(seed=SEEDS, data=st.data())
def test_contents_of_padding_are_never_observed(seed, data):
    """Whatever lies beyond the lengths, NaN and Inf included, every result is the same to the bit."""
    lengths = {
        "query_seq_lengths": np.array(data.draw(st.lists(st.integers(0, 70), min_size=2, max_size=2)), np.int32),
        "key_value_seq_lengths": np.array(data.draw(st.lists(st.integers(0, 65), min_size=2, max_size=2)), np.int32),
    }
    arrays = draw(seed, 70, 65) | {"bias": cases.normal(seed, 2, 1, 70, 65)}
    is_row = np.arange(70) < lengths["query_seq_lengths"][:, None]
    is_key = np.arange(65) < lengths["key_value_seq_lengths"][:, None]
    bad = np.float32(data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e38])))
    problem = cases.problem(arrays | lengths, is_causal=data.draw(st.booleans()))
    before = cases.forward_and_gradients("cpu", problem)
    spoiled = {
        "query": np.where(is_row[..., None, None], arrays["query"], bad),
        "key": np.where(is_key[..., None, None], arrays["key"], bad),
        "value": np.where(is_key[..., None, None], arrays["value"], bad),
        "bias": np.where((is_row[..., None] & is_key[:, None])[:, None], arrays["bias"], np.float32(np.nan)),
    }
    problem.arrays = problem.arrays | spoiled
    problem.dout = np.where(is_row[..., None, None], problem.dout, bad)
    problem.dlse = np.where(is_row[..., None], problem.dlse, bad)
    cases.assert_same_bits(before, cases.forward_and_gradients("cpu", problem))


@modest
@given(seed=SEEDS, T=SIZES, S=SIZES)
def test_a_nan_that_is_seen_reaches_only_rows_that_see_it(seed, T, S):
    arrays = draw(seed, T, S)
    position = seed % S
    arrays["key"][:, position] = np.nan
    got = run(arrays, gradients=False, is_causal=True)
    sees = np.arange(T) >= position
    assert np.all(np.isnan(got["lse"][:, sees])) and np.all(np.isfinite(got["lse"][:, ~sees]))
    query = draw(seed, T, S)
    query["query"][:, seed % T] = np.nan
    out = run(query, gradients=False)["out"]
    assert np.array_equal(np.isnan(out).all((0, 2, 3)), np.arange(T) == seed % T)
    assert np.array_equal(np.isnan(out).any((0, 2, 3)), np.arange(T) == seed % T)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_runs_repeat_to_the_bit(dtype, deterministic):
    """All gradients, with broadcast bias and groups, whose sums run over threads."""
    arrays = draw(3, 150, 170, N=6, K=2, batch=3, dtype=dtype)
    arrays |= {"bias": cases.normal(4, 1, 6, 1, 170), "sinks": cases.normal(5, 6), "dropout_key": jax.random.key(3)}
    problem = cases.problem(arrays, is_causal=True, dropout_rate=0.1)
    fixed = {name: x for name, x in arrays.items() if name not in problem.differentiable}

    @jax.jit
    def step(differentiable, dout, dlse):
        results, pullback = jax.vjp(
            lambda x: cases.call("cpu", problem, fixed | x, deterministic=deterministic), differentiable
        )
        return results, pullback((dout, dlse))

    differentiable = {name: arrays[name] for name in problem.differentiable}
    first = jax.tree.leaves(step(differentiable, problem.dout, problem.dlse))
    for _ in range(30):
        again = jax.tree.leaves(step(differentiable, problem.dout, problem.dlse))
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_implementations_drop_the_same_elements(kernel):
    """Dropout does not depend on the implementation: results agree to rounding, not only in distribution."""
    arrays = draw(9, 40, 50) | {"dropout_key": jax.random.key(9)}
    a, b = (run(arrays, implementation, dropout_rate=0.5) for implementation in (kernel, "reference"))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5, err_msg=name)
