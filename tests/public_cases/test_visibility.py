"""Faults reported for other libraries: masks, windows, lengths, segments and blocks. BC-xx names a kind of fault."""

import itertools

import cases
import jax
import numpy as np
import oracle
import pytest

import jaxflash

BOTH = ("top_left", "bottom_right")


def visible(problem):
    names = ("mask", "bias", "query_seq_lengths", "key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids")
    arrays = {name: x for name, x in problem.arrays.items() if name in names}
    static = {name: problem.static[name] for name in ("is_causal", "causal_alignment", "local_window_size")}
    case = problem.case
    return oracle.visible_pairs(case.batch, case.N, case.T, case.S, **arrays, **static)[0]


def assert_no_leak(implementation, problem, row: int) -> None:
    """Replaces what no head's query `row` may see, in every batch element; the row must stay the same to the bit."""
    hidden = ~visible(problem)[..., row, :].any(-2)
    assert hidden.any()
    changed = dict(problem.arrays)
    for name, size in (("key", 7.0), ("value", -1000.0)):
        changed[name] = np.where(hidden[..., None, None], np.asarray(size, changed[name].dtype), changed[name])
    run = lambda arrays: cases.call(implementation, problem, arrays)  # noqa: E731
    for before, after in zip(run(problem.arrays), run(changed), strict=True):
        assert np.array_equal(before[..., row, :, :] if before.ndim == 4 else before[..., row, :],
                              after[..., row, :, :] if after.ndim == 4 else after[..., row, :])  # fmt: skip


def five_ways_of_hiding():
    """The same pairs hidden by a mask, a bias, segments, lengths, and lengths with a window: BC-04."""
    T = 130
    hidden_tail = np.ones((2, 1, T, T), bool)
    hidden_tail[1, :, 120:] = hidden_tail[1, :, :, 120:] = False
    ids = np.where(np.arange(T) < 120, 1, -1) * np.array([[0], [1]]) + np.array([[1], [0]])
    lengths = np.array([T, 120], np.int32)
    both = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    return {
        "mask": ({"mask": hidden_tail}, {}),
        "bias": ({"bias": np.where(hidden_tail, 0, -np.inf).astype(np.float32)}, {}),
        "segments": ({"query_segment_ids": ids.astype(np.int32), "key_value_segment_ids": ids.astype(np.int32)}, {}),
        "lengths": (both, {}),
        "window": (both, {"local_window_size": (T, T)}),
    }


@pytest.mark.parametrize("way", five_ways_of_hiding())
def test_rows_and_columns_without_pairs(kernel, way):
    """BC-04 (PT#41508, FA#1778, mlx#2608, cubecl#1070): NaN for rows or columns that are fully masked."""
    arrays, static = five_ways_of_hiding()[way]
    dtype = {"mask": "bfloat16", "bias": "float16"}.get(way, "float32")
    problem = cases.problem(cases.qkv(4, 2, 130, 130, 2, 2, 64, dtype=dtype) | arrays, **static)
    got = cases.check(kernel, problem)
    assert np.all(got["out"][1, 120:] == 0) and np.all(got["lse"][1, 120:] == -np.inf)
    assert all(np.all(got[name][1, 120:] == 0) for name in ("dquery", "dkey", "dvalue"))
    assert all(np.all(np.isfinite(x)) for name, x in got.items() if name != "lse")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_hidden_row_column_and_tail_of_a_mask(kernel, dtype):
    """BC-04: a whole row, a tail of rows and a column, each in its own batch element."""
    mask = np.ones((2, 1, 130, 130), bool)
    mask[0, :, 7] = mask[1, :, 120:] = mask[1, :, :, 3] = False
    problem = cases.problem(cases.qkv(4, 2, 130, 130, 2, 2, 64, dtype=dtype) | {"mask": mask})
    got = cases.check(kernel, problem)
    assert np.all(got["dkey"][1, 3] == 0) and np.all(got["dvalue"][1, 3] == 0) and np.all(got["out"][0, 7] == 0)


@pytest.mark.parametrize("left", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("form", ["window", "causal with a right side", "with lengths"])
def test_left_window_shows_no_future_keys(kernel, form, left):
    """BC-18 (JAX#39576): a window with only a left side let rows see later keys."""
    arrays = cases.qkv(18, 2, 160, 160, 2, 1, 64)
    static = {"local_window_size": (left, 0)}
    if form == "causal with a right side":
        static = {"local_window_size": (left, 50), "is_causal": True}
    if form == "with lengths":
        arrays["key_value_seq_lengths"] = np.array([160, 101], np.int32)
    problem = cases.problem(arrays, **static)
    cases.check(kernel, problem)
    assert_no_leak(kernel, problem, 97)


def test_left_window_of_the_reference():
    """BC-18, on the reference."""
    problem = cases.problem(cases.qkv(18, 2, 160, 160, 2, 1, 64), local_window_size=(63, 0))
    assert_no_leak("reference", problem, 97)


@pytest.mark.parametrize("alignment", BOTH)
@pytest.mark.parametrize("sizes", [(1, 8), (5, 6), (6, 5), (113, 203), (203, 113), (1000, 600)], ids=str)
def test_causal_corner(kernel, sizes, alignment):
    """BC-15 (FA#282, onnxruntime#29020, mlx#2835): causal masking anchored to the wrong corner when T != S."""
    T, S = sizes
    arrays = cases.qkv(15, 1, T, S, 2, 2, 64)
    problem = cases.problem(arrays, is_causal=True, causal_alignment=alignment)
    explicit = np.tri(T, S, S - T if alignment == "bottom_right" else 0, dtype=bool)[None, None]
    same = cases.problem(arrays | {"mask": explicit})
    got, wanted = cases.check(kernel, problem), cases.forward(kernel, same)
    np.testing.assert_allclose(got["out"], wanted["out"], rtol=1e-5, atol=1e-6)
    assert np.array_equal(got["lse"] == -np.inf, wanted["lse"] == -np.inf)
    if alignment == "bottom_right" and T > S:
        assert np.all(got["out"][0, : T - S] == 0) and np.all(got["lse"][0, : T - S] == -np.inf)


@pytest.mark.parametrize(("alignment", "keys"), [("top_left", 1), ("bottom_right", 8)])
def test_one_causal_query_sees(implementation, alignment, keys):
    """BC-15: with T=1 and S=8, one key or all eight, as documented."""
    v = np.eye(8, dtype=np.float32)[None, :, None]
    out = jaxflash.attention(
        *(np.zeros((1, n, 1, 4), np.float32) for n in (1, 8)), v, is_causal=True, causal_alignment=alignment,
        implementation=implementation,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, 0, 0], np.where(np.arange(8) < keys, 1 / keys, 0), rtol=1e-6)


@pytest.mark.parametrize("alignment", BOTH)
@pytest.mark.parametrize("window", [(3, 0), (0, 3), (3, 3), (0, 0), (None, 0), (0, None), 2], ids=str)
def test_window_is_exactly_as_wide_as_said(kernel, window, alignment):
    """BC-16 (TE#1197, transformers#39408, XF#923): windows one key too wide or too narrow. v = identity shows P."""
    T, S = 70, 64
    out = jaxflash.attention(
        *(np.zeros((1, n, 1, 8), np.float32) for n in (T, S)), np.eye(S, dtype=np.float32)[None, :, None],
        local_window_size=window, causal_alignment=alignment, implementation=kernel,
    )  # fmt: skip
    left, right = (window, window) if isinstance(window, int) else window
    distance = np.arange(S) - np.arange(T)[:, None] - (S - T if alignment == "bottom_right" else 0)
    wanted = (distance >= (-S - T if left is None else -left)) & (distance <= (S + T if right is None else right))
    assert np.array_equal(np.asarray(out[0, :, 0]) > 0, wanted)


def test_windows_without_mask_or_causal_are_not_dropped(kernel):
    """BC-17 (JAX#32300): the window was ignored unless there was a mask as well."""
    results = []
    for window in ((0, 31), (0, 0), None):
        problem = cases.problem(cases.qkv(17, 1, 517, 549, 2, 2, 64), local_window_size=window)
        results.append(cases.check(kernel, problem, gradients=False)["out"])
    for a, b in itertools.combinations(results, 2):
        assert np.max(np.abs(a - b)) > 0.1


@pytest.mark.parametrize("sizes", [(300, 100), (129, 100), (100, 300)], ids=str)
@pytest.mark.parametrize("window", [(None, 250), (None, 2**31 - 1), (32, 64), (2**31 - 1, 0), (2**40, 2**40)], ids=str)
def test_windows_longer_than_the_keys(kernel, sizes, window):
    """BC-19 (FA#895, FA#2199): a large right side was clamped to S before it was aligned."""
    problem = cases.problem(
        cases.qkv(19, 1, *sizes, 1, 1, 32), local_window_size=window, causal_alignment="bottom_right"
    )
    lse = cases.check(kernel, problem, gradients=False)["lse"]
    assert np.array_equal(lse[0, :, 0] == -np.inf, ~visible(problem)[0, 0].any(-1))


@pytest.mark.parametrize("left", [99, 100, 4096, 2**31 - 1])
def test_a_window_longer_than_the_sequence_is_causal(kernel, left):
    """BC-20 (FA#1133): such a window behaved unlike is_causal."""
    arrays = cases.qkv(20, 1, 100, 100, 2, 2, 32)
    window = cases.forward_and_gradients(kernel, cases.problem(arrays, local_window_size=(left, 0)))
    cases.assert_same_bits(window, cases.forward_and_gradients(kernel, cases.problem(arrays, is_causal=True)))


MASK_DIMS = ("B11S", "11TS", "B1TS", "1NTS", "111S", "BNT1", "BN1S", "1111", "B111", "1N11")


@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize("dims", MASK_DIMS)
def test_broadcast_dims_equal_the_array_in_full(kernel, kind, dims):
    """BC-24 (JAX#28974, pytorch PR#128816): broadcast dims of masks and biases were misread."""
    arrays = cases.qkv(24, 4, 32, 48, 4, 4, 16)
    full = (4, 4, 32, 48)
    shape = tuple(1 if letter == "1" else size for letter, size in zip(dims, full, strict=True))
    x = cases.normal(25, *shape)
    x = x > -0.5 if kind == "mask" else x
    narrow = {
        name: x for name, x in cases.check(kernel, cases.problem(arrays | {kind: x})).items() if name in ("out", "lse")
    }
    whole = cases.forward(kernel, cases.problem(arrays | {kind: np.broadcast_to(x, full).copy()}))
    cases.assert_same_bits(narrow, whole)


FLAGS = ("causal", "mask", "bias", "window", "dropout")


def flags_id(flags) -> str:
    return "-".join(itertools.compress(FLAGS, flags)) or "none"


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=5)), ids=flags_id)
def test_no_flag_switches_another_off(kernel, flags):
    """BC-25 (keras#23038): the causal mask was lost with dropout, or when extra outputs were asked for."""
    on = dict(zip(FLAGS, flags, strict=True))
    arrays = cases.qkv(25, 1, 72, 72, 2, 2, 32)
    if on["mask"]:
        arrays["mask"] = cases.normal(26, 1, 1, 72, 72) > -1
    if on["bias"]:
        arrays["bias"] = cases.normal(27, 1, 2, 72, 72)
    if on["dropout"]:
        arrays["dropout_key"] = jax.random.key(25)
    problem = cases.problem(
        arrays,
        is_causal=on["causal"],
        local_window_size=(20, 10) if on["window"] else None,
        dropout_rate=0.3 if on["dropout"] else 0.0,
    )
    cases.check(kernel, problem)
    if on["causal"] or on["window"]:
        assert_no_leak(kernel, problem, 40)
    out, _ = cases.call(kernel, problem, arrays)
    assert np.array_equal(cases.call(kernel, problem, arrays, return_residual=False), out)


def test_segments_do_not_see_each_other(kernel):
    """BC-26 (maxtext#4476): packed documents saw each other. Each equals the call on it alone."""
    arrays = cases.qkv(26, 1, 384, 384, 4, 2, 32)
    bounds = [0, 100, 250, 384]
    ids = np.repeat([1, 2, 3], np.diff(bounds))[None].astype(np.int32)
    problem = cases.problem(arrays | {"query_segment_ids": ids})
    whole = cases.check(kernel, problem)["out"]
    first = {name: x[:, :100] for name, x in arrays.items()}
    alone = cases.forward(kernel, cases.problem(first))["out"]
    np.testing.assert_allclose(whole[:, :100], alone, rtol=1e-5, atol=1e-6)
    problem.dout[:, 100:] = 0
    problem.dlse[:, 100:] = 0
    gradients = cases.forward_and_gradients(kernel, problem)
    for name in ("dquery", "dkey", "dvalue"):
        assert np.all(gradients[name][:, 100:] == 0), name


def test_padding_segments_do_not_see_each_other(implementation):
    """BC-27 (maxtext#4908, esm#299): padding saw padding because the ids are equal. Zero is no padding here."""
    arrays = cases.qkv(27, 1, 96, 96, 2, 1, 32)
    ids = np.repeat([0, 2, -1], [40, 30, 26])[None].astype(np.int32)
    problem = cases.problem(arrays | {"query_segment_ids": ids})
    got = cases.check(implementation, problem)
    assert np.all(got["out"][:, 70:] == 0) and np.all(got["lse"][:, 70:] == -np.inf)
    assert all(np.all(got[name][:, 70:] == 0) for name in ("dquery", "dkey", "dvalue"))
    other = {name: np.where(np.arange(96)[:, None, None] < 70, x, np.float32(np.nan)) for name, x in arrays.items()}
    changed = cases.problem(other | {"query_segment_ids": ids})
    cases.assert_same_bits(got, cases.forward_and_gradients(implementation, changed))


def test_key_lengths_alone(implementation):
    """BC-33 (JAX#23349): lengths of keys without lengths of queries were ignored or refused."""
    lengths = np.array([24, 125, 53, 28, 77, 96, 13, 114], np.int32)
    arrays = cases.qkv(33, 8, 128, 128, 2, 1, 16)
    problem = cases.problem(arrays | {"key_value_seq_lengths": lengths})
    gradients = cases.check(implementation, problem)
    padding = np.arange(128) >= lengths[:, None]
    assert np.all(gradients["dkey"][padding] == 0) and np.all(gradients["dvalue"][padding] == 0)


def test_rows_of_a_batch_have_their_own_segments(kernel):
    """BC-34 (marin#5749): only the first row's segments were used. Row by row equals the batch, to the bit."""
    rng = np.random.default_rng(34)
    ids = np.sort(rng.integers(0, 8, (2, 600)), axis=-1).astype(np.int32)
    ids[:, 500:] = -1
    arrays = cases.qkv(34, 2, 600, 600, 4, 2, 64) | {"query_segment_ids": ids}
    whole = cases.check(kernel, cases.problem(arrays), gradients=False)
    for row in range(2):
        alone = cases.forward(kernel, cases.problem({name: x[row : row + 1] for name, x in arrays.items()}))
        cases.assert_same_bits({name: x[row : row + 1] for name, x in whole.items()}, alone)


@pytest.mark.parametrize("length", [512, 500])
@pytest.mark.parametrize("pattern", ["first key block", "random", "not the tile's size"])
def test_block_masks(kernel, pattern, length):
    """BC-67 (FA#2897, PT#141126): block masks ignored, or mis-sized at the last, partial block."""
    block_q, block_kv = (48, 80) if pattern == "not the tile's size" else (128, 128)
    shape = (1, 2, -(-length // block_q), -(-length // block_kv))
    blocks = np.zeros(shape, bool) if pattern == "first key block" else np.random.default_rng(67).random(shape) < 0.3
    blocks[..., 0] |= pattern == "first key block"
    arrays = cases.qkv(67, 1, length, length, 2, 2, 32)
    cases.check(kernel, cases.problem(arrays | {"block_mask": jaxflash.BlockMask(blocks, block_q, block_kv)}))


def test_empty_block_rows_and_columns(implementation):
    """BC-68 (FA#2906, LMCache#3092): a block row without blocks returned what memory held."""
    blocks = np.ones((1, 1, 4, 4), np.int8)
    blocks[:, :, 2] = blocks[..., 1] = 0
    arrays = cases.qkv(68, 1, 512, 512, 2, 1, 32)
    problem = cases.problem(arrays | {"block_mask": jaxflash.BlockMask(blocks, 128, 128)})
    got = cases.check(implementation, problem)
    rows, keys = slice(256, 384), slice(128, 256)
    assert np.all(got["out"][:, rows] == 0) and np.all(got["lse"][:, rows] == -np.inf)
    assert all(np.all(got[name][:, where] == 0) for name, where in (("dquery", rows), ("dkey", keys), ("dvalue", keys)))


class TestLengthsOutsideTheArray:
    """BC-76 (FA#1661, XF#1122) and BC-75 (JAX#30023): refused as host values, clamped as traced ones."""

    values = ([100, 101, 1000, 2**31 - 1], [100, 0, -1, 5], [-(2**31), 50, 99, 3])

    @pytest.mark.parametrize("lengths", values, ids=str)
    @pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
    def test_lengths(self, implementation, name, lengths):
        arrays = cases.qkv(76, 4, 100, 100, 2, 1, 16)
        given = np.array(lengths, np.int32)
        with pytest.raises(ValueError, match=name):
            jaxflash.attention(**arrays, **{name: given}, implementation=implementation)
        traced = cases.forward_and_gradients(implementation, cases.problem(arrays | {name: given}))
        clamped = cases.problem(arrays | {name: np.clip(given, 0, 100)})
        cases.assert_same_bits(traced, cases.forward_and_gradients(implementation, clamped))

    @pytest.mark.parametrize("offsets", [[0, 30, 20, 60], [0, 30, 200, 60], [-5, 30, 60, 2**31 - 1]], ids=str)
    def test_offsets(self, implementation, offsets):
        arrays = cases.qkv(76, (), 60, 60, 2, 1, 16)
        given = np.array(offsets, np.int32)
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            jaxflash.flash_mha_varlen(**arrays, cu_seqlens_q=given, implementation=implementation)
        clamped = np.minimum(np.maximum.accumulate(np.clip(given, 0, 60)), 60).astype(np.int32)
        run = lambda x: cases.forward_and_gradients(  # noqa: E731
            implementation, cases.problem(arrays | {"cu_seqlens_q": x, "cu_seqlens_k": x})
        )
        cases.assert_same_bits(run(given), run(clamped))
