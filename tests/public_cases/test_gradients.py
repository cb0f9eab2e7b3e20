"""Faults reported for other libraries: gradients, head groups and layouts. BC-xx names a kind of fault."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash

BIAS_DIMS = ("1NTS", "B1TS", "111S", "BN1S", "BNTS", "B1T1", "1N11")


@pytest.mark.parametrize("options", ["plain", "causal", "dropout"])
@pytest.mark.parametrize("dims", BIAS_DIMS)
def test_bias_gradient(kernel, dims, options):
    """BC-44 (JAX#27184, JAX#30593, PT#148476): wrong for B > 1, missing, or a crash if nothing else is wanted."""
    full = (3, 4, 100, 130)
    shape = tuple(1 if letter == "1" else size for letter, size in zip(dims, full, strict=True))
    arrays = cases.qkv(44, 3, 100, 130, 4, 2, 32) | {"bias": cases.normal(45, *shape)}
    if options == "dropout":
        arrays["dropout_key"] = jax.random.key(44)
    static = {"is_causal": options == "causal", "dropout_rate": 0.3 if options == "dropout" else 0.0}
    problem = cases.problem(arrays, **static)
    got = cases.check(kernel, problem)
    assert got["dbias"].shape == shape
    if options == "causal" and dims.endswith("TS"):
        assert np.all(got["dbias"][..., ~np.tri(100, 130, dtype=bool)] == 0)


@pytest.mark.parametrize("wanted", [("bias",), ("query",), ("key", "value"), ("bias", "query")], ids="-".join)
def test_gradients_do_not_depend_on_which_are_wanted(kernel, wanted):
    """BC-44: alone or together, every gradient is the same."""
    arrays = cases.qkv(44, 3, 20, 33, 4, 2, 32) | {"bias": cases.normal(45, 1, 4, 20, 33)}
    problem = cases.problem(arrays, has_dlse=False)

    def loss(some):
        return jnp.sum(cases.call(kernel, problem, arrays | some)[0] * problem.dout)

    every = jax.jit(jax.grad(loss))({name: arrays[name] for name in ("query", "key", "value", "bias")})
    some = jax.jit(jax.grad(loss))({name: arrays[name] for name in wanted})
    for name in wanted:
        np.testing.assert_allclose(some[name], every[name], rtol=1e-5, atol=1e-6)


GROUPS = ((6, 2), (12, 3), (9, 3), (8, 1), (5, 5))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_groups_equal_repeated_heads(kernel, groups):
    """BC-59 (native-sparse-attention-triton#27, levanter#449): dk, dv wrong when N / K is not K."""
    heads, kv_heads = groups
    problem = cases.problem(cases.qkv(59, 2, 50, 70, heads, kv_heads, 32))
    got = cases.check(kernel, problem)
    repeated = {name: np.repeat(problem.arrays[name], heads // kv_heads, axis=2) for name in ("key", "value")}
    every = cases.forward_and_gradients(kernel, cases.problem(problem.arrays | repeated))
    for name in ("dkey", "dvalue"):
        grouped = every[name].reshape(2, 70, kv_heads, heads // kv_heads, 32)
        np.testing.assert_allclose(got[name], grouped.sum(3), rtol=1e-4, atol=1e-5)
        if 1 < kv_heads < heads:
            interleaved = every[name].reshape(2, 70, heads // kv_heads, kv_heads, 32).sum(2)
            assert np.max(np.abs(got[name] - interleaved)) > 0.1


@pytest.mark.parametrize("window", [None, (30, 10)], ids=str)
@pytest.mark.parametrize("sizes", [(256, 256), (100, 228)], ids=str)
@pytest.mark.parametrize("groups", [(8, 2), (6, 2)], ids=str)
def test_causal_limits_of_packed_groups(kernel, groups, sizes, window):
    """BC-22 (FA#2528): row limits wrong when the heads of a group share a tile."""
    arrays = cases.qkv(22, 1, *sizes, *groups, 32)
    repeated = {name: np.repeat(arrays[name], groups[0] // groups[1], axis=2) for name in ("key", "value")}
    static = {"is_causal": True, "causal_alignment": "bottom_right", "local_window_size": window}
    got = cases.check(kernel, cases.problem(arrays, **static), gradients=False)
    same = cases.forward(kernel, cases.problem(arrays | repeated, **static))
    np.testing.assert_allclose(got["out"], same["out"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("option", ["causal", "window", "bias", "lengths"])
def test_few_queries(kernel, option, T):
    """BC-23 (FA#708): T = 1, or T equal to the group size, was mistaken for another dim."""
    arrays = cases.qkv(23, 3, T, 77, 8, 2, 64)
    static = {"causal_alignment": "bottom_right"}
    if option == "bias":
        arrays["bias"] = cases.normal(24, 1, 8, T, 77)
    if option == "lengths":
        arrays["key_value_seq_lengths"] = np.array([77, 0, 30], np.int32)
    static |= {"causal": {"is_causal": True}, "window": {"local_window_size": (20, 0)}}.get(option, {})
    cases.check(kernel, cases.problem(arrays, **static))


def test_layout_of_cotangents(implementation):
    """BC-50 (FA#355, FA#2777, diffusers#14338): wrong for cotangents that are broadcast or transposed."""
    arrays = cases.qkv(50, 2, 33, 40, 4, 2, 16)
    weights = cases.normal(51, 2, 4, 33, 16)

    def gradients(loss, barrier):
        def attend(arrays):
            out = jaxflash.attention(**arrays, implementation=implementation)
            return jax.lax.optimization_barrier(out) if barrier else out

        return jax.jit(jax.grad(lambda x: loss(attend(x))))(arrays)

    for loss in (jnp.sum, lambda out: jnp.sum(out.transpose(0, 2, 1, 3) * weights)):
        plain, copied = gradients(loss, False), gradients(loss, True)
        for name in arrays:
            np.testing.assert_allclose(plain[name], copied[name], rtol=1e-5, atol=1e-6)
    problem = cases.problem(arrays, has_dlse=False)
    problem.dout = np.swapaxes(weights, 1, 2)
    right = cases.expected(problem)[1].gradients
    for name in arrays:
        np.testing.assert_allclose(plain[name], right[name], rtol=1e-4, atol=1e-5)


def test_layout_of_operands(kernel):
    """BC-51 (FlagGems#5896, FlagAttention#45): K and V in different layouts inside one program."""
    x, w = cases.normal(51, 2, 40, 24), cases.normal(52, 24, 4, 16)
    fused = cases.normal(53, 2, 80, 3, 4, 16)

    def operands(x, fused):
        key = jnp.einsum("bsd,dkh->bksh", x, w).transpose(0, 2, 1, 3)
        return fused[:, ::2, 0], key, fused[:, 1::2, 2]

    attend = lambda *a: jaxflash.attention(*a, is_causal=True, implementation=kernel)  # noqa: E731
    fusable = jax.jit(lambda x, fused: attend(*operands(x, fused)))(x, fused)
    contiguous = jax.jit(attend)(*(np.ascontiguousarray(a) for a in jax.jit(operands)(x, fused)))
    assert np.array_equal(fusable, contiguous)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_of_the_two_outputs_is_used(implementation, used):
    """BC-49 (JAX#28408): the gradient broke when lse was asked for but not used, or alone."""
    arrays = cases.qkv(49, 2, 17, 20, 4, 2, 16)
    problem = cases.problem(arrays)
    weights = problem.dout if used == "out" else problem.dlse

    def loss(arrays, **options):
        results = cases.call(implementation, problem, arrays, **options)
        results = results if isinstance(results, tuple) else (results,)
        return jnp.sum(results[used == "lse"] * weights)

    got = jax.jit(jax.grad(loss))(arrays)
    if used == "out":
        alone = jax.jit(jax.grad(lambda x: loss(x, return_residual=False)))(arrays)
        assert all(np.array_equal(got[name], alone[name]) for name in arrays)
    problem.dout, problem.dlse = (problem.dout, None) if used == "out" else (np.zeros_like(problem.dout), problem.dlse)
    right = cases.expected(problem)[1].gradients
    for name in arrays:
        np.testing.assert_allclose(got[name], right[name], rtol=1e-4, atol=1e-5)


def test_mask_that_is_not_mapped(kernel):
    """BC-47 (JAX#23701, JAX#22830): vmap with a bias that is mapped and a mask that is not crashed."""
    arrays = cases.qkv(47, (3, 2), 20, 30, 4, 2, 16)
    bias, mask = cases.normal(48, 3, 2, 4, 20, 30), cases.normal(49, 1, 1, 30) > 0

    def attend(arrays, bias):
        return jaxflash.attention(**arrays, bias=bias, mask=mask, implementation=kernel)

    out, pullback = jax.vjp(jax.vmap(attend), arrays, bias)
    gradients = pullback(out)
    for i in range(3):
        one, pull_one = jax.vjp(attend, {name: x[i] for name, x in arrays.items()}, bias[i])
        np.testing.assert_allclose(out[i], one, rtol=1e-5, atol=1e-6)
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(pull_one(one)), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)


ZEROS = {"B": ((0,), 5, 7, 4, 2), "T": ((2,), 0, 7, 4, 2), "S": ((2,), 5, 0, 4, 2), "N": ((2,), 5, 7, 0, 0)}


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("option", ["plain", "everything"])
def test_dims_of_size_zero(implementation, zero, option):
    """BC-41 (PT#141218, FA#1159, FA#2470): empty arrays crashed. H = 0 is refused (test_validate.py)."""
    batch, T, S, N, K = ZEROS[zero]
    arrays, static = cases.qkv(41, batch, T, S, N, K, 8), {}
    if option == "everything":
        arrays |= {
            "bias": cases.normal(42, *batch, 1, T, S),
            "mask": np.ones((*batch, N, 1, S), bool),
            "sinks": cases.normal(43, N),
            "query_seq_lengths": np.full(batch, T, np.int32),
            "query_segment_ids": np.zeros((*batch, T), np.int32),
            "key_value_segment_ids": np.zeros((*batch, S), np.int32),
            "dropout_key": jax.random.key(41),
        }
        static = {"is_causal": True, "dropout_rate": 0.5, "causal_alignment": "bottom_right", "logits_soft_cap": 2.0}
    got = cases.check(implementation, cases.problem(arrays, **static))
    if zero == "S" and option == "plain":
        assert np.all(got["lse"] == -np.inf) and np.all(got["out"] == 0) and np.all(got["dquery"] == 0)
    vmapped = jax.vmap(lambda q, k, v: jaxflash.attention(q, k, v, implementation=implementation))
    shapes = [np.zeros((0, *arrays[name].shape), np.float32) for name in ("query", "key", "value")]
    assert vmapped(*shapes).shape == (0, *batch, T, N, 8)
