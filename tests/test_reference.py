"""The oracle itself: numbers computed by hand, finite differences, Random123's vectors, and plain JAX's accuracy."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxflash


def rows(*values):
    """[1, len(values), 1, H] from one list of numbers a token."""
    return np.array(values, np.float64)[None, :, None, :]


def test_two_keys_by_hand():
    # Logits 0 and ln 3: weights 1/4 and 3/4.
    got = oracle.attention64(rows([1.0]), rows([0.0], [math.log(3)]), rows([8.0], [16.0]), scale=1.0)
    np.testing.assert_allclose(got.out, [[[[14.0]]]])
    np.testing.assert_allclose(got.lse, [[[math.log(4)]]])


def test_gradients_of_two_keys_by_hand():
    # p = (1/4, 3/4), dp = dout * v = (8, 16), delta = 14, ds = p * (dp - delta) = (-3/2, 3/2).
    got = oracle.attention64(
        rows([1.0]),
        rows([0.0], [math.log(3)]),
        rows([8.0], [16.0]),
        scale=1.0,
        bias=np.zeros((1, 1, 1, 2)),
        dout=rows([1.0]),
    )
    np.testing.assert_allclose(got.gradients["query"], rows([1.5 * math.log(3)]))
    np.testing.assert_allclose(got.gradients["key"], rows([-1.5], [1.5]))
    np.testing.assert_allclose(got.gradients["value"], rows([0.25], [0.75]))
    np.testing.assert_allclose(got.gradients["bias"], [[[[-1.5, 1.5]]]])


def test_gradient_of_lse_is_the_softmax():
    got = oracle.attention64(
        rows([1.0]),
        rows([0.0], [math.log(3)]),
        rows([8.0], [16.0]),
        scale=1.0,
        dout=rows([0.0]),
        dlse=np.array([[[2.0]]]),
    )
    np.testing.assert_allclose(got.gradients["key"], rows([0.5], [1.5]))


def test_sink_by_hand():
    # Weights 1 and 1, sink exp(ln 2) = 2: each key gets a quarter. dsink = -(2/4) * (dout * out) = -(1/2) * 6.
    got = oracle.attention64(
        rows([0.0]), rows([1.0], [1.0]), rows([8.0], [16.0]), sinks=np.array([math.log(2)]), dout=rows([1.0])
    )
    np.testing.assert_allclose(got.out, [[[[6.0]]]])
    np.testing.assert_allclose(got.lse, [[[math.log(4)]]])
    np.testing.assert_allclose(got.gradients["sinks"], [-3.0])


def test_soft_cap_by_hand():
    got = oracle.attention64(rows([3.0]), rows([1.0]), rows([5.0]), scale=1.0, logits_soft_cap=2.0)
    np.testing.assert_allclose(got.lse, [[[2 * math.tanh(1.5)]]])


def test_row_without_keys():
    mask = np.array([[[[True, True], [False, False]]]])
    got = oracle.attention64(
        rows([1.0], [1.0]), rows([1.0], [2.0]), rows([3.0], [4.0]), mask=mask, dout=rows([1.0], [5.0])
    )
    assert got.out[0, 1, 0, 0] == 0 and got.lse[0, 1, 0] == -np.inf and got.gradients["query"][0, 1, 0, 0] == 0
    np.testing.assert_allclose(got.gradients["value"].sum(), 1.0)  # nothing from row 1


def test_row_without_keys_but_with_a_sink():
    got = oracle.attention64(
        rows([1.0]), rows([1.0]), rows([3.0]), mask=np.zeros((1, 1, 1, 1), bool), sinks=np.array([0.5]),
        dout=rows([1.0]), dlse=np.array([[[7.0]]]),
    )  # fmt: skip
    assert got.out[0, 0, 0, 0] == 0 and got.lse[0, 0, 0] == 0.5
    np.testing.assert_allclose(got.gradients["sinks"], [7.0])


def test_padding_row_ignores_the_sink():
    got = oracle.attention64(
        rows([1.0]), rows([1.0]), rows([3.0]), query_seq_lengths=np.array([0]), sinks=np.array([0.5]),
        dout=rows([np.nan]), dlse=np.array([[[np.nan]]]),
    )  # fmt: skip
    assert got.lse[0, 0, 0] == -np.inf and got.gradients["sinks"] == [0.0] and got.gradients["key"] == 0


def picture(visible):
    return ["".join("x" if seen else "." for seen in row) for row in visible[0, 0]]


def test_causal_corners():
    drawn = lambda **o: picture(oracle.visible_pairs((1,), 1, 2, 4, is_causal=True, **o)[0])  # noqa: E731
    assert drawn() == ["x...", "xx.."]
    assert drawn(causal_alignment="bottom_right") == ["xxx.", "xxxx"]


def test_window_by_hand():
    drawn = lambda T, S, **o: picture(oracle.visible_pairs((1,), 1, T, S, **o)[0])  # noqa: E731
    assert drawn(4, 5, local_window_size=(1, 0)) == ["x....", "xx...", ".xx..", "..xx."]
    assert drawn(4, 5, local_window_size=(None, 1)) == ["xx...", "xxx..", "xxxx.", "xxxxx"]
    assert drawn(3, 4, local_window_size=1, causal_alignment="bottom_right") == ["xxx.", ".xxx", "..xx"]
    assert drawn(3, 4, local_window_size=(1, 9), is_causal=True) == ["x...", "xx..", ".xx."]


def test_bottom_right_follows_actual_lengths():
    visible, row_valid, key_valid = oracle.visible_pairs(
        (1,), 1, 3, 5, is_causal=True, causal_alignment="bottom_right",
        query_seq_lengths=np.array([2]), key_value_seq_lengths=np.array([3]),
    )  # fmt: skip
    assert picture(visible) == ["xx...", "xxx..", "....."]
    assert row_valid.tolist() == [[True, True, False]] and key_valid.tolist() == [[True, True, True, False, False]]


def test_segments_by_hand():
    visible, row_valid, _ = oracle.visible_pairs(
        (1,), 1, 3, 4, query_segment_ids=np.array([[0, 2, -1]]), key_value_segment_ids=np.array([[0, 0, 2, -1]])
    )
    assert picture(visible) == ["xx..", "..x.", "...."] and not row_valid[0, 2]


def test_block_mask_by_hand():
    blocks = jaxflash.BlockMask(np.array([[[[1, 0], [0, 1]]]], np.int8), 2, 3)
    assert picture(oracle.visible_pairs((1,), 1, 3, 5, block_mask=blocks)[0]) == ["xxx..", "xxx..", "...xx"]


def test_heads_read_their_group():
    value = np.arange(3.0).reshape(1, 1, 3, 1)
    got = oracle.attention64(np.ones((1, 1, 6, 2)), np.ones((1, 1, 3, 2)), value)
    assert got.out.ravel().tolist() == [0, 0, 1, 1, 2, 2]


def test_packed_is_each_sequence_alone():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, 1, 2)) for _ in range(3))
    got = oracle.packed(oracle.attention64, q, k, v, np.array([0, 2, 2, 5]), is_causal=True)
    np.testing.assert_allclose(got.out[2:5], oracle.attention64(q[2:5], k[2:5], v[2:5], is_causal=True).out)
    assert np.all(got.out[5] == 0) and np.all(got.lse[5] == -np.inf)


def textbook_philox(counter, key, rounds):
    for _ in range(rounds):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            (second >> 32) ^ counter[1] ^ key[0], second & 0xFFFFFFFF,
            (first >> 32) ^ counter[3] ^ key[1], first & 0xFFFFFFFF,
        )  # fmt: skip
        key = ((key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32)
    return counter


def test_philox_is_random123s():
    # Known-answer vectors of Random123 for philox4x32 with 10 rounds check the round; 7 rounds is the same loop.
    zeros = textbook_philox((0, 0, 0, 0), (0, 0), 10)
    assert zeros == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = textbook_philox((2**32 - 1,) * 4, (2**32 - 1,) * 2, 10)
    assert ones == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    counter, key = (1, 2**31 + 5, 77, 2**32 - 3), (123456789, 3141592653)
    assert tuple(int(x) for x in oracle.philox4x32_7(counter, key)) == textbook_philox(counter, key, 7)


def test_dropout_bits_by_hand():
    seed = (11, 22)
    keep = oracle.dropout_keep(0.5, seed, [3], 2, 4, 19)
    for head, row, column in itertools.product(range(2), range(4), range(19)):
        word = textbook_philox((column // 8, row, head, 3), seed, 7)[column // 2 % 4]
        bits = word >> 16 if column % 2 else word & 0xFFFF
        assert keep[0, head, row, column] == (bits >= 32768)


def test_dropout_by_hand():
    seed, rate = (5, 6), 0.25
    keep = oracle.dropout_keep(rate, seed, [0], 1, 1, 4)[0, 0, 0]
    got = oracle.attention64(
        *(np.zeros((1, 1, 1, 1)), np.zeros((1, 4, 1, 1)), np.eye(4)[None, :, None, :]),
        dropout_rate=rate,
        dropout_seed=seed,
    )
    np.testing.assert_allclose(got.out[0, 0, 0], keep / 4 / 0.75)
    np.testing.assert_allclose(got.lse[0, 0, 0], math.log(4))  # the denominator is summed without dropout


OPTIONS = {
    "plain": {},
    "soft cap": {"logits_soft_cap": 1.3},
    "causal bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "dropout": {"dropout_rate": 0.4, "dropout_seed": (7, 8)},
    "lengths": {"query_seq_lengths": np.array([2, 3]), "key_value_seq_lengths": np.array([4, 2])},
    "all": {"logits_soft_cap": 1.3, "local_window_size": (2, 1), "dropout_rate": 0.4, "dropout_seed": (7, 8)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_finite_differences(options):
    rng = np.random.default_rng(1)
    sizes = {"query": (2, 3, 4, 5), "key": (2, 6, 2, 5), "value": (2, 6, 2, 7), "bias": (2, 1, 3, 6), "sinks": (4,)}
    arrays = {name: rng.standard_normal(shape) for name, shape in sizes.items()}
    dout, dlse = rng.standard_normal((2, 3, 4, 7)), rng.standard_normal((2, 3, 4))

    def loss(**changed):
        got = oracle.attention64(**(arrays | changed), **options)
        return np.sum(got.out * dout) + np.sum(np.where(np.isfinite(got.lse), got.lse, 0) * dlse)

    gradients = oracle.attention64(**arrays, **options, dout=dout, dlse=dlse).gradients
    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        slope = (loss(**{name: x + 1e-5 * direction}) - loss(**{name: x - 1e-5 * direction})) / 2e-5
        np.testing.assert_allclose(np.sum(gradients[name] * direction), slope, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_yardstick_is_not_looser_than_plain_jax(dtype):
    """`naive` is as accurate as jax.nn in the same dtype; float32 sums of another order differ by a small factor."""
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal((2, 96, 3, 64)).astype(jnp.dtype(dtype)) for _ in range(4)]
    right, plain = (
        oracle.attention64(*arrays[:3], dout=arrays[3]).named(), oracle.naive(*arrays[:3], dout=arrays[3]).named()
    )  # fmt: skip
    function = lambda *x: jax.nn.dot_product_attention(*x, implementation="xla")  # noqa: E731
    out, pullback = jax.vjp(function, *arrays[:3])
    theirs = dict(zip(("out", "dquery", "dkey", "dvalue"), (out, *pullback(jnp.asarray(arrays[3]))), strict=True))
    for name, x in theirs.items():
        error = np.max(np.abs(plain[name] - right[name]))
        factor = 2.0 if dtype == "float32" else 1.05
        assert error <= factor * np.max(np.abs(np.asarray(x, np.float64) - right[name])), name


class TestAssertClose:
    ref = np.array([[1.0, -np.inf], [np.inf, 2.0]])

    def check(self, ours, ref=None):
        ref = self.ref if ref is None else ref
        oracle.assert_close("x", np.array(ours), ref + 1e-3, ref, 2.0, 0.0)

    def test_accepts_twice_the_error(self):
        self.check([[1.0019, -np.inf], [np.inf, 1.9981]])

    def test_refuses_more_and_names_the_worst(self):
        with pytest.raises(AssertionError, match=r"error 0.004 at \(1, 1\).*2 of 4 elements"):
            self.check([[1.003, -np.inf], [np.inf, 2.004]])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, 5.0])
    def test_infinities_come_first(self, bad):
        with pytest.raises(AssertionError, match=r"x: .* at other places.*\(0, 1\)"):
            self.check([[1.0, bad], [np.inf, 2.0]])

    def test_shape(self):
        with pytest.raises(AssertionError, match="shape"):
            self.check([[1.0], [2.0]])
