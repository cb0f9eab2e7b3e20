"""What is right: attention in float64 NumPy, written from the definitions alone, and how close a result must come.

`attention64` takes the arguments of `jaxflash.attention` (with `dropout_seed` for the key) and returns outputs and
gradients. `naive` runs the same formulas the plain way in query's own dtype. A result passes if its largest error is
at most a small factor times the plain computation's, so no tolerance is set by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

FORWARD_FACTOR = 2.0
BACKWARD_FACTOR = 3.0
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


@dataclasses.dataclass
class Result:
    """Outputs, gradients by argument name, and for each of them the scale of its rounding errors.

    `magnitudes` holds, for each name, the largest value of the same formula with every term replaced by its absolute
    value: rounding errors are proportional to it, whatever cancels. `logit_rounding` is the error of a logit summed in
    float32, in units of its roundoff: its magnitude times a factor that grows like the square root of the terms.
    """

    out: np.ndarray  # [*batch, T, N, Hv]
    lse: np.ndarray  # [*batch, T, N]
    gradients: dict[str, np.ndarray]
    magnitudes: dict[str, float]
    logit_rounding: float

    def named(self) -> dict[str, np.ndarray]:
        return {"out": self.out, "lse": self.lse, **{f"d{name}": x for name, x in self.gradients.items()}}


def attention64(*args, **kwargs) -> Result:
    """The definition, in float64 from the inputs as they are rounded; see `_attention` for the arguments."""
    return _attention(np.float64, lambda x: x, *args, **kwargs)


def naive(query, *args, **kwargs) -> Result:
    """The plain computation in query's dtype: float32 sums, the rest rounded to that dtype after every step."""
    dtype = query.dtype
    return _attention(np.float32, lambda x: x.astype(dtype).astype(np.float32), query, *args, **kwargs)


def packed(attention: Callable, query, key, value, cu_seqlens_q, cu_seqlens_k=None, *, dout=None, dlse=None, **options):
    """`attention64` or `naive` on each packed sequence alone; tokens outside every sequence get out 0 and lse -inf."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    *_, heads, _ = query.shape
    out, lse = np.zeros((*query.shape[:-1], value.shape[-1])), np.full(query.shape[:-1], -np.inf)
    whole = Result(out, lse, {}, {"out": 0.0, "lse": 0.0}, 0.0)
    if dout is not None:
        whole.gradients = {"query": np.zeros(query.shape), "key": np.zeros(key.shape), "value": np.zeros(value.shape)}
        if options.get("sinks") is not None:
            whole.gradients["sinks"] = np.zeros(heads)
    for i in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        cotangents = {} if dout is None else {"dout": dout[rows], "dlse": None if dlse is None else dlse[rows]}
        part = attention(query[rows], key[keys], value[keys], first_batch_index=i, **cotangents, **options)
        whole.out[rows], whole.lse[rows] = part.out, part.lse
        for name, where in (("query", rows), ("key", keys), ("value", keys), ("sinks", slice(None))):
            if name in whole.gradients:
                whole.gradients[name][where] += part.gradients[name]
        for name, size in part.magnitudes.items():
            before = whole.magnitudes.get(name, 0.0)
            whole.magnitudes[name] = before + size if name == "dsinks" else max(before, size)
        whole.logit_rounding = max(whole.logit_rounding, part.logit_rounding)
    return whole


# --- Which pairs are visible ----------------------------------------------------------------------------------------


def visible_pairs(
    batch,
    heads: int,
    length: int,
    kv_length: int,
    *,
    bias=None,
    mask=None,
    is_causal=False,
    causal_alignment="top_left",
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    local_window_size=None,
    block_mask=None,
):
    """bool [*batch, N, T, S] of visible pairs, and which rows [*batch, T] and keys [*batch, S] are no padding."""
    rows, columns = np.arange(length), np.arange(kv_length)
    q_lengths = np.broadcast_to(length if query_seq_lengths is None else query_seq_lengths, batch)
    kv_lengths = np.broadcast_to(kv_length if key_value_seq_lengths is None else key_value_seq_lengths, batch)
    q_lengths = np.clip(q_lengths.astype(np.int64), 0, length)
    kv_lengths = np.clip(kv_lengths.astype(np.int64), 0, kv_length)
    row_valid = rows < q_lengths[..., None]
    key_valid = columns < kv_lengths[..., None]

    visible = np.ones((*batch, heads, length, kv_length), bool)
    shift = (kv_lengths - q_lengths)[..., None, None, None] if causal_alignment == "bottom_right" else 0
    distance = columns[None, :] - rows[:, None] - shift
    left, right = local_window_size if isinstance(local_window_size, (tuple, list)) else (local_window_size,) * 2
    if is_causal:
        right = 0
    if left is not None:
        visible &= -distance <= left
    if right is not None:
        visible &= distance <= right
    if query_segment_ids is not None:
        if key_value_segment_ids is None:
            key_value_segment_ids = query_segment_ids
        row_valid = row_valid & (query_segment_ids >= 0)
        key_valid = key_valid & (key_value_segment_ids >= 0)
        visible &= (query_segment_ids[..., :, None] == key_value_segment_ids[..., None, :])[..., None, :, :]
    if block_mask is not None:
        blocks = np.asarray(block_mask.blocks) != 0
        for axis, index in ((-2, rows // block_mask.block_q), (-1, columns // block_mask.block_kv)):
            if blocks.shape[axis] != 1:
                blocks = np.take(blocks, index, axis=axis)
        visible &= blocks
    if mask is not None:
        visible &= mask
    if bias is not None:
        visible &= bias.astype(np.float64) != -np.inf
    visible &= row_valid[..., None, :, None] & key_valid[..., None, None, :]
    return visible, row_valid, key_valid


# --- Dropout --------------------------------------------------------------------------------------------------------


def philox4x32_7(counter, key):
    """Philox4x32 with 7 rounds, on uint64 arrays that hold 32-bit words; returns four such arrays."""
    low = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    key0, key1 = (int(word) for word in key)
    for _ in range(7):
        first, second = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (
            (second >> np.uint64(32)) ^ x1 ^ np.uint64(key0),
            second & low,
            (first >> np.uint64(32)) ^ x3 ^ np.uint64(key1),
            first & low,
        )
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return x0, x1, x2, x3


def dropout_keep(rate: float, seed, batch_indices, heads: int, length: int, kv_length: int):
    """bool [*batch, N, T, S]: which elements of the softmax dropout keeps."""
    columns = np.arange(kv_length)
    batch_indices = np.asarray(batch_indices)[..., None, None, None]
    head, row = np.arange(heads)[:, None, None], np.arange(length)[:, None]
    words = philox4x32_7((columns >> 3, row, head, batch_indices), seed)
    word = np.choose((columns >> 1) & 3, words)
    bits = np.where(columns % 2 == 1, word >> np.uint64(16), word & np.uint64(0xFFFF))
    return bits >= np.uint64(round(rate * 65536))


# --- The formulas ---------------------------------------------------------------------------------------------------


def _attention(
    accumulator,
    rounded: Callable,
    query,  # [*batch, T, N, H]
    key,  # [*batch, S, K, H]
    value,  # [*batch, S, K, Hv]
    bias=None,
    mask=None,
    *,
    scale=None,
    logits_soft_cap=None,
    sinks=None,  # [N]
    dropout_rate=0.0,
    dropout_seed=None,  # two 32-bit words
    first_batch_index=0,
    dout=None,  # [*batch, T, N, Hv]
    dlse=None,  # [*batch, T, N]
    **visibility,
) -> Result:
    *batch, length, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[-3:-1]
    group_size = heads // kv_heads if kv_heads else 1
    scale = accumulator(head_dim**-0.5 if scale is None else scale)
    visible, row_valid, key_valid = visible_pairs(batch, heads, length, kv_length, bias=bias, mask=mask, **visibility)

    def per_head(x, valid, repeats):  # [*batch, length, heads, size] -> [*batch, N, length, size], padding zeroed
        x = np.where(valid[..., None, None], x.astype(accumulator), 0)
        return np.repeat(np.swapaxes(x, -3, -2), repeats, axis=-3)

    q = per_head(query, row_valid, 1)
    k = per_head(key, key_valid, group_size)
    v = per_head(value, key_valid, group_size)

    logits = q @ transposed(k) * scale
    if logits_soft_cap is not None:
        tanh = np.tanh(logits / accumulator(logits_soft_cap))
        logits = accumulator(logits_soft_cap) * tanh
    if bias is not None:
        finite = np.where(visible, bias, 0).astype(accumulator)
        with np.errstate(over="ignore"):
            logits = np.maximum(logits + finite, np.finfo(accumulator).min)
    logits = np.where(visible, logits, -np.inf)
    row_max = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sink = np.broadcast_to(sinks.astype(accumulator)[:, None, None], row_max.shape)
        sink = np.where(row_valid[..., None, :, None], sink, -np.inf)
        row_max = np.maximum(row_max, sink)
    row_max = np.where(row_max == -np.inf, 0, row_max)
    weights = np.exp(logits - row_max)
    row_sum = weights.sum(-1, keepdims=True)
    if sinks is not None:
        sink_weight = np.exp(sink - row_max)
        row_sum = row_sum + sink_weight
    empty = row_sum == 0
    safe_sum = np.where(empty, 1, row_sum)
    probabilities = weights / safe_sum
    lse = np.where(empty, -np.inf, row_max + np.log(safe_sum))
    keep = accumulator(1)
    if round(dropout_rate * 65536) > 0:
        indices = first_batch_index + np.arange(int(np.prod(batch, dtype=int))).reshape(batch)
        kept = dropout_keep(dropout_rate, dropout_seed, indices, heads, length, kv_length)
        keep = np.where(kept, accumulator(0 if dropout_rate == 1 else 1 / (1 - dropout_rate)), accumulator(0))
    dropped = rounded(probabilities * keep)
    out = rounded(dropped @ v)
    result = Result(
        np.swapaxes(out, -3, -2),
        np.swapaxes(lse[..., 0], -2, -1),
        {},
        {"out": _largest(dropped @ np.abs(v)), "lse": _largest(lse)},
        _largest(np.abs(q) @ transposed(np.abs(k))) * abs(float(scale)) * (2 + head_dim**0.5 / 4),
    )
    if dout is None:
        return result

    do = per_head(dout, row_valid, 1)
    dp = rounded(do @ transposed(v)) * keep
    delta = np.sum(dp * probabilities, axis=-1, keepdims=True)
    # The same with absolute values, for the scale of the rounding errors.
    dp_size = np.abs(do) @ transposed(np.abs(v)) * keep
    delta_size = np.sum(dp_size * probabilities, axis=-1, keepdims=True)
    if dlse is not None:
        dlse = np.where(row_valid[..., None], dlse.astype(accumulator), 0)
        delta = delta - np.swapaxes(dlse, -2, -1)[..., None]
        delta_size = delta_size + np.abs(np.swapaxes(dlse, -2, -1)[..., None])
    dlogits = probabilities * (dp - delta)
    dlogits_size = probabilities * (dp_size + delta_size)
    ds = dlogits * (1 - tanh**2) if logits_soft_cap is not None else dlogits

    def per_group(x):  # [*batch, N, S, size] -> [*batch, S, K, size]
        x = x.reshape(*batch, kv_heads, group_size, *x.shape[-2:]).sum(-3)
        return np.swapaxes(x, -3, -2)

    size = abs(float(scale))
    gradients = {
        "query": (np.swapaxes(scale * (ds @ k), -3, -2), size * (dlogits_size @ np.abs(k))),
        "key": (per_group(scale * (transposed(ds) @ q)), per_group(size * (transposed(dlogits_size) @ np.abs(q)))),
        "value": (per_group(transposed(dropped) @ do), per_group(transposed(dropped) @ np.abs(do))),
    }
    if bias is not None:
        gradients["bias"] = (unbroadcast(dlogits, bias.shape), unbroadcast(dlogits_size, bias.shape))
    if sinks is not None:
        sink_probability = sink_weight / safe_sum
        axes = tuple(i for i in range(delta.ndim) if i != delta.ndim - 3)
        gradients["sinks"] = (
            -np.sum(sink_probability * delta, axis=axes),
            np.sum(sink_probability * delta_size, axis=axes),
        )
    result.gradients = {name: rounded(gradient) for name, (gradient, _) in gradients.items()}
    result.magnitudes |= {f"d{name}": _largest(size) for name, (_, size) in gradients.items()}
    return result


def transposed(x):
    return np.swapaxes(x, -2, -1)


def unbroadcast(x, shape):
    """Sums x over the dims in which an array of `shape` was broadcast to x's."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, (size, full) in enumerate(zip(shape, x.shape, strict=True)) if size != full)
    return x.sum(axis=axes, keepdims=True)


def _largest(x) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max(initial=0.0))


# --- How close is close enough --------------------------------------------------------------------------------------


def assert_no_worse_than(ours: dict, baseline: Result, ref64: Result, label: str = "") -> None:
    """Every array of `ours` is at most FORWARD_FACTOR or BACKWARD_FACTOR times as far from ref64 as the baseline is.

    The baseline can be exact by luck where there are few elements, so a floor is added: one rounding to the array's
    dtype (near 0 half its smallest subnormal), and the float32 rounding of the logits and of a few operations, both
    relative to the magnitude of the terms that were summed. The gradients of bias and sinks, whatever their dtype, are
    allowed one rounding to query's: they are sums of P * (dP - delta), where delta = sum(dout * out) holds out as it
    was rounded (FlashAttention-2, Alg. 2).
    """
    right, plain = ref64.named(), baseline.named()
    for name, got in ours.items():
        factor = FORWARD_FACTOR if name in ("out", "lse") else BACKWARD_FACTOR
        unit32 = UNIT_ROUNDOFF["float32"]
        sums = unit32 * (8 + ref64.logit_rounding)
        if name == "lse":
            floor = sums + 2 * unit32 * ref64.magnitudes["lse"]
        else:
            unit = max(UNIT_ROUNDOFF[got.dtype.name], UNIT_ROUNDOFF[ours["out"].dtype.name], unit32)
            floor = (unit + sums) * ref64.magnitudes[name] + float(ml_dtypes.finfo(got.dtype).smallest_subnormal) / 2
        assert_close(f"{label}{name}", got, plain[name], right[name], factor, floor)


def assert_close(name: str, ours, baseline, ref64, factor: float, floor: float) -> None:
    """Same shape, the same infinities and NaNs, and max|ours - ref64| <= factor * max|baseline - ref64| + floor."""
    ours = np.asarray(ours)
    assert ours.shape == ref64.shape, f"{name}: shape {ours.shape}, expected {ref64.shape}"
    got = ours.astype(np.float64)
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = test(got) != test(ref64)
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise AssertionError(
                f"{name}: {kind} at other places than in the reference ({wrong.sum()} of {wrong.size}); first at "
                f"{where}: got {got[where]}, expected {ref64[where]}"
            )
    finite = np.isfinite(ref64)
    if not finite.any():
        return
    error = np.where(finite, np.abs(np.where(finite, got, 0) - np.where(finite, ref64, 0)), 0)
    plain = np.asarray(baseline, np.float64)
    usable = finite & np.isfinite(plain)
    allowed = factor * np.max(np.abs(plain[usable] - ref64[usable]), initial=0.0) + floor
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
    assert error[worst] <= allowed, (
        f"{name}: error {error[worst]:.3g} at {worst} of {error.shape}, allowed {allowed:.3g} (floor {floor:.3g}); got "
        f"{got[worst]:.9g}, expected {ref64[worst]:.9g}; {np.sum(error > allowed)} of {error.size} elements are off"
    )
