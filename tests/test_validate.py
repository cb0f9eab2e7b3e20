"""Bad inputs: each is refused with a TypeError or ValueError that names the argument, eagerly and while tracing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxflash

B, T, S, N, K, H, Hv = 2, 6, 10, 4, 2, 8, 12
TOTAL_Q, TOTAL_K = 20, 30


@dataclasses.dataclass(frozen=True)
class Bad:
    """Arguments that replace good ones, and the name that the message must have in it."""

    argument: str
    why: str
    changes: dict[str, Any]
    error: type[Exception] | tuple[type[Exception], ...] = (TypeError, ValueError)
    function: str = "attention"
    shown: str = ""  # must be in the message too; "|" between several

    def __str__(self) -> str:
        return f"{self.function}-{self.argument}-{self.why}"


def array(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def good(function: str) -> dict[str, Any]:
    if function == "flash_mha_varlen":
        offsets = {"cu_seqlens_q": np.array([0, 8, 20], np.int32), "cu_seqlens_k": np.array([0, 9, 30], np.int32)}
        return {"query": array(TOTAL_Q, N, H), "key": array(TOTAL_K, K, H), "value": array(TOTAL_K, K, Hv)} | offsets
    return {"query": array(B, T, N, H), "key": array(B, S, K, H), "value": array(B, S, K, Hv)}


QKV_SHAPES = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, Hv)}
NOT_ARRAYS = {"list": [[[[1.0]]]], "float": 1.0, "string": "x", "tuple": (1, 2), "dict": {}, "object": object()}
NOT_FLOATS = ("int8", "int32", "uint8", "uint32", "bool", "complex64")


def bad_qkv():
    for name, shape in QKV_SHAPES.items():
        for why, value in (NOT_ARRAYS | {"None": None}).items():
            yield Bad(name, why, {name: value}, TypeError)
        for dtype in NOT_FLOATS:
            yield Bad(name, dtype, {name: array(*shape, dtype=dtype)}, TypeError, shown=dtype)
        yield Bad(name, "numpy-float64", {name: np.zeros(shape)}, TypeError, shown="float64")
        yield Bad(name, "numpy-int64", {name: np.zeros(shape, np.int64)}, TypeError, shown="int64")
        yield Bad(name, "numpy-object", {name: np.full(shape, None)}, TypeError)
        yield Bad(name, "numpy-string", {name: np.full(shape, "a")}, TypeError)
        for rank in range(3):
            yield Bad(name, f"rank-{rank}", {name: array(*shape[:rank])}, ValueError, shown=str(list(shape[:rank])))
        yield Bad(name, "head-dim-0", {name: array(*shape[:-1], 0)}, ValueError)
        if name != "query":
            wrong_batch = (B + 1, *shape[1:])
            yield Bad(name, "batch", {name: array(*wrong_batch)}, ValueError, shown=str([B + 1]))
            yield Bad(name, "batch-1", {name: array(1, *shape[1:])}, ValueError)
            yield Bad(name, "more-batch-dims", {name: array(1, *shape)}, ValueError)
            yield Bad(name, "fewer-batch-dims", {name: array(*shape[1:])}, ValueError)
            for other in ("bfloat16", "float16"):
                yield Bad(name, other, {name: array(*shape, dtype=other)}, TypeError, shown=other)
                halves = {n: array(*s, dtype=other) for n, s in QKV_SHAPES.items() if n != name}
                yield Bad(name, f"float32-with-{other}", halves, TypeError, shown=other)
    yield Bad("key", "head-dim", {"key": array(B, S, K, H + 1)}, ValueError, shown=f"{B}, {S}, {K}, {H + 1}")
    yield Bad("key", "head-dim-of-value", {"key": array(B, S, K, Hv)}, ValueError)
    yield Bad("value", "length", {"value": array(B, S + 1, K, Hv)}, ValueError, shown=str(S + 1))
    yield Bad("value", "length-of-query", {"value": array(B, T, K, Hv)}, ValueError)
    yield Bad("value", "heads", {"value": array(B, S, N, Hv)}, ValueError)
    yield Bad("value", "no-heads", {"value": array(B, S, 0, Hv)}, ValueError)
    for heads, kv_heads in ((4, 3), (6, 4), (2, 4), (1, 2), (4, 0), (5, 2)):
        changes = {
            "query": array(B, T, heads, H), "key": array(B, S, kv_heads, H), "value": array(B, S, kv_heads, Hv)
        }  # fmt: skip
        yield Bad("key", f"groups-{heads}-{kv_heads}", changes, ValueError, shown=f"{kv_heads} KV heads")


def bad_bias_and_mask():
    full = (B, N, T, S)
    wrong = [
        (T, S + 4), (S, T), (T, S), (S,), (), (N, T), (B, N, T, S - 1), (B, N, T + 1, S), (B, N + 1, T, S),
        (B + 1, N, T, S), (B, T, N, S), (B, N, S, T), (B, K, T, S), (1, 1, 1, 1, S), (1, B, N, T, S), (B, T, S),
        (N, T, S + 1), (B, N, 0, S), (B, 1, 1, 2), (2, 2, 2, 2), (3, 1, 1, 1),
    ]  # fmt: skip
    for name, dtype in (("bias", "float32"), ("mask", "bool")):
        for shape in wrong:
            why = "shape-" + "x".join(map(str, shape))
            yield Bad(name, why, {name: array(*shape, dtype=dtype)}, ValueError, shown=f"{list(full)}|{list(shape)}")
        for why, value in NOT_ARRAYS.items():
            yield Bad(name, why, {name: value}, TypeError)
        yield Bad(name, "numpy-object", {name: np.full(full, None)}, TypeError)
    for dtype in NOT_FLOATS:
        yield Bad("bias", dtype, {"bias": array(*full, dtype=dtype)}, TypeError, shown=dtype)
    for dtype in ("float32", "int8", "int32", "uint8", "bfloat16", "complex64"):
        yield Bad("mask", dtype, {"mask": array(*full, dtype=dtype)}, TypeError, shown=dtype)
    yield Bad("bias", "numpy-float64", {"bias": np.zeros(full)}, TypeError, shown="float64")
    yield Bad("mask", "numpy-float32", {"mask": np.zeros(full, np.float32)}, TypeError, shown="float32")


def bad_lengths_and_segments():
    for name, limit in (("query_seq_lengths", T), ("key_value_seq_lengths", S)):
        for why, value in {"int": 3, "float": 1.5, "string": "x", "dict": {}, "object": object()}.items():
            yield Bad(name, why, {name: value}, TypeError)
        for dtype in ("float32", "bool", "complex64", "uint32"):
            yield Bad(name, dtype, {name: array(B, dtype=dtype)}, TypeError, shown=dtype)
        yield Bad(name, "list-of-floats", {name: [1.0, 2.0]}, TypeError)
        yield Bad(name, "list-of-bools", {name: [True, False]}, TypeError)
        for shape in ((), (1,), (B + 1,), (B, 1), (1, B)):
            why = "shape-" + "x".join(map(str, shape))
            yield Bad(name, why, {name: array(*shape, dtype="int32")}, ValueError, shown=str(list(shape)))
        for low in (-1, -(2**31), limit + 1, 1000, 2**31 - 1):
            yield Bad(name, f"list-{low}", {name: [low, 1]}, ValueError, shown=str(low))
            yield Bad(name, f"numpy-{low}", {name: np.array([1, low], np.int32)}, ValueError, shown=str(low))
        yield Bad(name, "int64-too-large", {name: np.array([1, 2**40])}, ValueError)
    ids = {"query_segment_ids": (B, T), "key_value_segment_ids": (B, S)}
    for name, shape in ids.items():
        both = {other: array(*size, dtype="int32") for other, size in ids.items()}
        for why, value in {"int": 3, "float": 1.5, "string": "x", "object": object()}.items():
            yield Bad(name, why, both | {name: value}, TypeError)
        for dtype in ("float32", "bool", "complex64"):
            yield Bad(name, dtype, both | {name: array(*shape, dtype=dtype)}, TypeError, shown=dtype)
        for wrong in ((shape[1],), (B, 1), (1, shape[1]), (B, shape[1] + 1), (B, shape[1], 1), (shape[1], B)):
            why = "shape-" + "x".join(map(str, wrong))
            yield Bad(name, why, both | {name: array(*wrong, dtype="int32")}, ValueError, shown=str(list(wrong)))
        yield Bad(name, "missing", both | {name: None}, ValueError)


def bad_options():
    for window in (-1, (-5, 0), (5, -3), (-5, 5), (-1, -1), (None, -2), (-(2**40), 0), -(2**31)):
        yield Bad("local_window_size", f"negative-{window}", {"local_window_size": window}, ValueError)
    for window in ((1, 2, 3), (1,), (), [1, 2, 3]):
        yield Bad("local_window_size", f"sides-{window}", {"local_window_size": window}, ValueError)
    for window in (1.5, (1.5, 0), (0, 2.0), "x", ("a", "b"), True, (True, False), (1, "2"), 1j, {}, (1, [2])):
        yield Bad("local_window_size", f"type-{window}", {"local_window_size": window}, TypeError)
    yield Bad("local_window_size", "array-of-two", {"local_window_size": np.array([1, 2])}, (TypeError, ValueError))
    for scale in (math.nan, math.inf, -math.inf):
        yield Bad("scale", f"{scale}", {"scale": scale}, ValueError, shown=str(scale))
    for scale in ("x", 1j, True, (1,), [1.0], {}, np.ones(2, np.float32), np.True_):
        yield Bad("scale", f"type-{scale!r}", {"scale": scale}, TypeError)
    for cap in (0, 0.0, -1.0, math.nan, math.inf, -math.inf, np.float32(0)):
        yield Bad("logits_soft_cap", f"{cap!r}", {"logits_soft_cap": cap}, ValueError)
    for cap in ("x", 1j, True, (1,), [1.0], np.ones(1, np.float32)):
        yield Bad("logits_soft_cap", f"type-{cap}", {"logits_soft_cap": cap}, TypeError)
    key = jax.random.key(0)
    for rate in (-0.1, -1e-9, 1.0001, 2, math.nan, math.inf):
        yield Bad("dropout_rate", f"{rate}", {"dropout_rate": rate, "dropout_key": key}, ValueError, shown=str(rate))
    for rate in ("x", None, True, (0.1,), 1j, np.zeros(2, np.float32)):
        yield Bad("dropout_rate", f"type-{rate}", {"dropout_rate": rate, "dropout_key": key}, TypeError)
    yield Bad("dropout_key", "missing", {"dropout_rate": 0.1}, ValueError)
    keys = {
        "int": 3, "float": 1.5, "string": "x", "float-array": array(2), "object": object(), "split": (key, key),
        "batch": jax.random.split(key, 2), "raw-batch": array(2, 2, dtype="uint32"), "numpy": np.zeros(3, np.int32),
    }  # fmt: skip
    for why, value in keys.items():
        yield Bad("dropout_key", why, {"dropout_rate": 0.1, "dropout_key": value}, TypeError)
    for flag in ("is_causal", "deterministic", "return_residual"):
        for value in (0, 1, "yes", None, 1.0, (), np.zeros(1, bool), np.int32(1)):
            yield Bad(flag, f"{value!r}", {flag: value}, TypeError)
    for name in ("causal_alignment", "implementation"):
        for value in ("", "top-left", "CPU", "flash", "fastest", 1, True, b"cpu", ("cpu",)):
            yield Bad(name, f"{value!r}", {name: value}, ValueError, shown=repr(value))
    yield Bad("causal_alignment", "None", {"causal_alignment": None}, ValueError)
    for shape in ((), (1,), (K,), (N + 1,), (1, N), (N, 1), (B, N)):
        yield Bad("sinks", "shape-" + "x".join(map(str, shape)), {"sinks": array(*shape)}, ValueError)
    for why, value in NOT_ARRAYS.items():
        yield Bad("sinks", why, {"sinks": value}, TypeError)
    for dtype in NOT_FLOATS:
        yield Bad("sinks", dtype, {"sinks": array(N, dtype=dtype)}, TypeError, shown=dtype)


def bad_block_masks():
    def block(*shape, dtype="bool", q=4, kv=5):
        return {"block_mask": jaxflash.BlockMask(array(*shape, dtype=dtype), q, kv)}

    for shape in ((2, 2), (1, 1, 2, 3), (1, 1, 3, 2), (1, 3, 2, 2), (3, 1, 2, 2), (B, N, T, S), (), (1, 1, 1, 2, 2)):
        yield Bad("block_mask", "shape-" + "x".join(map(str, shape)), block(*shape), ValueError, shown=str(list(shape)))
    for dtype in ("float32", "int32", "uint8", "complex64"):
        yield Bad("block_mask", dtype, block(1, 1, 2, 2, dtype=dtype), TypeError, shown=dtype)
    for size in (0, -1, 1.5, True, None, "4"):
        yield Bad("block_mask", f"block_q-{size!r}", block(1, 1, 2, 2, q=size), shown="block_q")
        yield Bad("block_mask", f"block_kv-{size!r}", block(1, 1, 2, 2, kv=size), shown="block_kv")
    for why, value in (NOT_ARRAYS | {"array": array(1, 1, 2, 2, dtype="bool")}).items():
        yield Bad("block_mask", why, {"block_mask": value}, TypeError)
        if why != "array":
            yield Bad("block_mask", f"blocks-{why}", {"block_mask": jaxflash.BlockMask(value, 4, 5)}, TypeError)


def bad_packed():
    varlen = {"function": "flash_mha_varlen"}
    for name, total in (("cu_seqlens_q", TOTAL_Q), ("cu_seqlens_k", TOTAL_K)):
        values = {
            "not-from-0": [1, 8, 20], "falls": [0, 8, 4], "negative": [0, -1, 4], "past-the-end": [0, 8, total + 1],
            "negative-start": [-1, 8, 20], "huge": [0, 8, 2**40],
        }  # fmt: skip
        for why, value in values.items():
            yield Bad(name, f"list-{why}", {name: value}, ValueError, **varlen)
            yield Bad(name, f"numpy-{why}", {name: np.array(value)}, ValueError, **varlen)
        for shape in ((), (1,), (0,), (1, 3), (3, 1)):
            why = "shape-" + "x".join(map(str, shape))
            yield Bad(name, why, {name: array(*shape, dtype="int32")}, ValueError, shown=str(list(shape)), **varlen)
        for dtype in ("float32", "bool", "complex64"):
            yield Bad(name, dtype, {name: array(3, dtype=dtype)}, TypeError, shown=dtype, **varlen)
        for why, value in {"int": 3, "string": "x", "floats": [0.0, 1.0], "object": object()}.items():
            yield Bad(name, why, {name: value}, TypeError, **varlen)
    yield Bad("cu_seqlens_q", "None", {"cu_seqlens_q": None}, TypeError, **varlen)
    yield Bad("cu_seqlens_k", "more-sequences", {"cu_seqlens_k": [0, 5, 9, 30]}, ValueError, **varlen)
    yield Bad("cu_seqlens_k", "fewer-sequences", {"cu_seqlens_k": array(2, dtype="int32")}, ValueError, **varlen)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        for value in (-2, 1.5, "x", None, True, 0, 3, (9,)):
            yield Bad(name, f"{value!r}", {name: value}, (TypeError, ValueError), **varlen)
    for name, shape in {"query": (TOTAL_Q, N, H), "key": (TOTAL_K, K, H), "value": (TOTAL_K, K, Hv)}.items():
        yield Bad(name, "with-batch", {name: array(1, *shape)}, ValueError, **varlen)
        yield Bad(name, "rank-2", {name: array(*shape[:2])}, ValueError, **varlen)
        yield Bad(name, "None", {name: None}, TypeError, **varlen)
        yield Bad(name, "int32", {name: array(*shape, dtype="int32")}, TypeError, **varlen)
    for function in ("flash_mha_varlen", "flash_mha"):
        for window in ((-2, 0), (0, -3), (1, 2, 3), 1.5, (True, 1), "ab"):
            yield Bad("window_size", f"{window!r}", {"window_size": window}, function=function)
        for scale in (math.nan, "x"):
            yield Bad("softmax_scale", f"{scale}", {"softmax_scale": scale}, function=function)
        for flag in ("is_causal", "deterministic", "return_residual"):
            yield Bad(flag, "1", {flag: 1}, TypeError, function=function)


BAD = tuple(
    itertools.chain(
        bad_qkv(), bad_bias_and_mask(), bad_lengths_and_segments(), bad_options(), bad_block_masks(), bad_packed()
    )
)


def test_there_are_enough_and_no_two_are_one():
    assert len(BAD) >= 300 and len({str(bad) for bad in BAD}) == len(BAD)


def expect_refusal(bad: Bad, run) -> None:
    with pytest.raises(bad.error) as caught:
        run()
    # Exactly a builtin type: no JAX error that happens to be a TypeError.
    assert type(caught.value) in (TypeError, ValueError)
    message = str(caught.value)
    assert bad.argument in message, f"{bad.argument} is not named in: {message}"
    for text in bad.shown.split("|"):
        assert text in message, f"{text!r} is not shown in: {message}"


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_refused_eagerly(bad):
    arguments = good(bad.function) | bad.changes
    expect_refusal(bad, lambda: getattr(jaxflash, bad.function)(**arguments))


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_refused_while_tracing(bad):
    arguments = good(bad.function) | bad.changes
    traced = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    fixed = {name: x for name, x in arguments.items() if name not in traced}
    function = getattr(jaxflash, bad.function)
    expect_refusal(bad, lambda: jax.eval_shape(lambda arrays: function(**arrays, **fixed), traced))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", 0.5),
        ("logits_soft_cap", 3.0),
        ("dropout_rate", 0.5),
        ("is_causal", True),
        ("deterministic", True),
        ("return_residual", True),
        ("local_window_size", 3),
        ("local_window_size", (3, 4)),
    ],
)
def test_traced_static_options_are_refused(name, value):
    def call(option):
        return jaxflash.attention(**good("attention"), **{name: option})

    with pytest.raises(TypeError, match=name):
        jax.eval_shape(call, value)


def test_traced_max_seqlen_is_refused():
    with pytest.raises((TypeError, ValueError), match="max_seqlen_q"):
        jax.eval_shape(lambda n: jaxflash.flash_mha_varlen(**good("flash_mha_varlen"), max_seqlen_q=n), 20)


GOOD = {
    "window of numpy ints": {"local_window_size": (np.int64(3), np.int32(2))},
    "window beyond int32": {"local_window_size": 2**40},
    "scale of an array scalar": {"scale": np.float32(0.5)},
    "scale of a JAX scalar": {"scale": jnp.float32(0.5)},
    "numpy bool": {"is_causal": np.True_},
    "lengths as a list": {"query_seq_lengths": [0, T], "key_value_seq_lengths": [S, 1]},
    "lengths of small ints": {"query_seq_lengths": np.array([1, 2], np.uint8)},
    "raw key": {"dropout_rate": 0.1, "dropout_key": np.array([1, 2], np.uint32)},
    "bias of three dims": {"bias": array(N, T, S)},
    "bias of one element": {"bias": array(1, 1, 1, 1)},
    "mask of numpy": {"mask": np.ones((1, 1, 1, S), bool)},
    "int8 block mask": {"block_mask": jaxflash.BlockMask(np.ones((1, 1, 2, 2), np.int8), 4, 5)},
    "block larger than the array": {"block_mask": jaxflash.BlockMask(np.ones((1, 1, 1, 1), np.int8), 512, 512)},
}


@pytest.mark.parametrize("changes", GOOD.values(), ids=GOOD)
def test_accepted(changes):
    assert jax.eval_shape(lambda: jaxflash.attention(**good("attention"), **changes)).shape == (B, T, N, Hv)


def test_process_is_usable_afterwards():
    with pytest.raises(ValueError, match="mask"):
        jaxflash.attention(**good("attention"), mask=array(S, T, dtype="bool"))
    assert jnp.all(jaxflash.attention(**good("attention")) == 0)
