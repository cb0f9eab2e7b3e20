"""The only place that checks what users pass in: arguments in, canonical arrays and an `AttentionSpec` out.

Every message says which argument, what it must be, what it was, and what to do.
"""

from __future__ import annotations

import math
import numbers
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jaxflash._types import AttentionSpec, BlockMask, Operands

_FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
_SMALL_INTS = (jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint16)


def canonicalize(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    causal_alignment="top_left",
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    local_window_size=None,
    logits_soft_cap=None,
    sinks=None,
    block_mask=None,
    dropout_rate=0.0,
    dropout_key=None,
    cu_seqlens=None,
) -> tuple[AttentionSpec, Operands]:
    """Checks the arguments of `jaxflash.attention` (and packed offsets) and brings them into canonical form."""
    query, key, value = _check_qkv(query, key, value)
    *batch, length, heads, _ = query.shape
    kv_length = key.shape[-3]
    mask_block, blocks = _check_block_mask(block_mask, (*batch, heads, length, kv_length))
    rate = _check_rate(dropout_rate)
    scale = check_scale("scale", scale)
    spec = AttentionSpec(
        softmax_scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else scale,
        window=_check_window(local_window_size, check_flag("is_causal", is_causal)),
        causal_alignment=check_choice("causal_alignment", causal_alignment, ("top_left", "bottom_right")),
        logits_soft_cap=_check_soft_cap(logits_soft_cap),
        dropout_rate=rate,
        mask_block=mask_block,
    )
    query_ids, kv_ids = _check_segment_ids(query_segment_ids, key_value_segment_ids, batch, length, kv_length)
    query_offsets, kv_offsets = cu_seqlens or (None, None)
    dropout_batch, dropout_heads = (None, None)
    if spec.dropout_threshold > 0:
        dropout_batch, dropout_heads = _dropout_state(dropout_key, batch, heads)
    operands = Operands(
        query=query,
        key=key,
        value=value,
        bias=_check_bias(bias, (*batch, heads, length, kv_length)),
        mask=_check_mask(mask, (*batch, heads, length, kv_length)),
        block_mask=blocks,
        query_lengths=_check_lengths("query_seq_lengths", query_seq_lengths, batch, length),
        kv_lengths=_check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, kv_length),
        query_segment_ids=query_ids,
        kv_segment_ids=kv_ids,
        query_offsets=query_offsets,
        kv_offsets=kv_offsets,
        sinks=_check_sinks(sinks, len(batch), heads),
        dropout_batch=dropout_batch,
        dropout_heads=dropout_heads,
    )
    return spec, operands


def check_flag(name: str, value) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} must be a Python bool (it is static), it was {_describe(value)}.")


def check_scale(name: str, scale) -> float | None:
    hint = "to use a traced scale, multiply query by it and pass 1.0 here"
    return None if scale is None else _real(name, scale, "a finite Python number", math.isfinite, hint)


def check_choice(name: str, value, choices):
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, it was {value!r}.")


def _check_offsets(name: str, value, total: int) -> jax.Array:
    """cu_seqlens of a packed batch: [num_sequences + 1], 0 first, rising to at most `total`."""
    array = _integers(name, value)
    if array.ndim != 1 or array.shape[0] < 2:
        raise ValueError(
            f"{name} must have shape [num_sequences + 1] with at least one sequence, its shape was {list(array.shape)}."
        )
    if isinstance(array, np.ndarray):
        if array[0] != 0 or np.any(np.diff(array) < 0) or array[-1] > total:
            raise ValueError(
                f"{name} must start at 0, never fall, and end at no more than the {total} packed tokens; it was "
                f"{_shorten(array)}."
            )
    return _as_int32(array, 0, total)


def check_cu_seqlens(query, key, offsets_q, offsets_k, max_q, max_k) -> tuple[jax.Array, jax.Array]:
    """cu_seqlens of queries and keys; keys default to the queries'."""
    for name, x in (("query", query), ("key", key)):
        if _floats(name, x).ndim != 3:
            raise ValueError(f"{name} must have shape [total, heads, head_dim] when packed, it was {_describe(x)}.")
    if offsets_k is None:
        offsets_k = offsets_q
    checked = []
    for side, x, offsets, bound in (("q", query, offsets_q, max_q), ("k", key, offsets_k, max_k)):
        name = f"cu_seqlens_{side}"
        checked.append(_check_offsets(name, offsets, x.shape[0]))
        if isinstance(bound, bool) or not isinstance(bound, (int, np.integer)) or bound < -1:
            raise ValueError(f"max_seqlen_{side} must be a Python int, -1 = unknown, it was {_describe(bound)}.")
        is_host = isinstance(offsets, (np.ndarray, list, tuple))
        if is_host and bound >= 0 and np.max(np.diff(offsets)) > bound:
            raise ValueError(
                f"max_seqlen_{side} must bound every sequence, it was {bound} and the longest in {name} has "
                f"{np.max(np.diff(offsets))} tokens."
            )
    if checked[0].shape != checked[1].shape:
        raise ValueError(
            f"cu_seqlens_k must have as many sequences as cu_seqlens_q, their shapes were {list(checked[1].shape)} and "
            f"{list(checked[0].shape)}."
        )
    return checked[0], checked[1]


def _check_qkv(query, key, value):
    arrays = {"query": _floats("query", query), "key": _floats("key", key), "value": _floats("value", value)}
    query, key, value = arrays.values()
    shown = ", ".join(f"{name}: {_describe(x)}" for name, x in arrays.items())
    for name, x in arrays.items():
        if x.ndim < 3:
            raise ValueError(f"{name} must have shape [..., length, heads, head_dim], rank 3 or more ({shown}).")
        if x.dtype != query.dtype:
            raise TypeError(
                f"query, key and value must have one dtype, {name} is {x.dtype} and query {query.dtype}; cast one of "
                f"them ({shown})."
            )
        if x.ndim != query.ndim or x.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} must have query's batch dims {list(query.shape[:-3])}, it has {list(x.shape[:-3])} ({shown})."
            )
        if x.shape[-1] == 0:
            raise ValueError(f"{name} must have a head dim of at least 1, it has 0 ({shown}).")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have query's head dim {query.shape[-1]}, it has {key.shape[-1]} ({shown}).")
    for dim, axis in (("length", -3), ("number of KV heads", -2)):
        if value.shape[axis] != key.shape[axis]:
            raise ValueError(f"value must have key's {dim} {key.shape[axis]}, it has {value.shape[axis]} ({shown}).")
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"key has {kv_heads} KV heads and query {heads} heads: query's heads must be a multiple of key's ({shown})."
        )
    return query, key, value


def _check_soft_cap(cap) -> float | None:
    if cap is None:
        return None
    return _real(
        "logits_soft_cap", cap, "a finite number above 0", lambda x: math.isfinite(x) and x > 0, "pass None for no cap"
    )


def _check_rate(rate) -> float:
    return _real("dropout_rate", rate, "a number from 0 to 1", lambda x: 0 <= x <= 1, "it is a probability")


def _real(name, value, must, test, hint) -> float:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} is static: it must be {must}, it was a traced value; {hint}.")
    if isinstance(value, (jax.Array, np.ndarray)) and value.ndim == 0 and value.dtype.kind in "fiu":
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {must}, it was {_describe(value)}; {hint}.")
    if not test(float(value)):
        raise ValueError(f"{name} must be {must}, it was {value}; {hint}.")
    return float(value)


def _check_window(window, is_causal: bool):
    sides = (None, None) if window is None else window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"local_window_size must be an int or (left, right), it was {window!r}.")
    left, right = (_window_side(side, window) for side in sides)
    return (left, 0) if is_causal else (left, right)


def _window_side(side, window) -> int | None:
    if side is None:
        return None
    try:
        if isinstance(side, (bool, np.bool_)):
            raise TypeError
        side = operator.index(side)
    except TypeError:
        raise TypeError(
            f"local_window_size must be an int or (left, right) of ints or None, static; it was {_describe(window)}."
        ) from None
    if side < 0:
        raise ValueError(
            f"local_window_size must not be negative, it was {window!r}; None on a side leaves that side unbounded."
        )
    return min(side, 2**31 - 1)


def _check_mask(mask, full):
    if mask is None:
        return None
    mask = _array("mask", mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be bool (True = may attend), it was {_describe(mask)}; compare it with 0, or pass additive "
            "masks as bias."
        )
    return _broadcastable("mask", mask, full)


def _check_bias(bias, full):
    return None if bias is None else _broadcastable("bias", _floats("bias", bias), full)


def _broadcastable(name, x, full):
    num_batch, given = len(full) - 3, x.shape
    if x.ndim == 3 and num_batch:
        x = x.reshape((1,) * num_batch + x.shape)  # [N, T, S], as jax.nn takes it
    fits = x.ndim == len(full) and all(size in (1, want) for size, want in zip(x.shape, full, strict=False))
    if not fits:
        raise ValueError(
            f"{name} must be broadcastable to [{'..., ' if num_batch != 1 else 'B, '}N, T, S] = {list(full)}, every "
            f"dim equal or 1 and all dims present; its shape was {list(given)}."
        )
    return x


def _check_lengths(name, lengths, batch, limit: int):
    if lengths is None:
        return None
    array = _integers(name, lengths)
    if not batch and array.shape == (1,):
        array = array.reshape(())
    _expect_shape(name, array, tuple(batch), "query's batch dims")
    if isinstance(array, np.ndarray) and (np.any(array < 0) or np.any(array > limit)):
        raise ValueError(f"{name} must lie in [0, {limit}], the length of the array; it was {_shorten(array)}.")
    return _as_int32(array, 0, limit)


def _check_segment_ids(query_ids, kv_ids, batch, length, kv_length):
    if query_ids is None and kv_ids is None:
        return None, None
    if query_ids is None:
        raise ValueError("query_segment_ids must be given with key_value_segment_ids, it was None.")
    if kv_ids is None:
        if length != kv_length:
            raise ValueError(
                f"key_value_segment_ids must be given when key's length {kv_length} is not query's {length}, it was "
                "None."
            )
        kv_ids = query_ids
    checked = []
    for name, ids, size in (("query_segment_ids", query_ids, length), ("key_value_segment_ids", kv_ids, kv_length)):
        array = _integers(name, ids)
        _expect_shape(name, array, (*batch, size), "[batch dims, length]")
        checked.append(_as_int32(array, -(2**31), 2**31 - 1))
    return tuple(checked)


def _check_sinks(sinks, num_batch: int, heads: int):
    if sinks is None:
        return None
    sinks = _floats("sinks", sinks)
    _expect_shape("sinks", sinks, (heads,), "one logit a query head")
    return sinks.astype(jnp.float32).reshape((1,) * num_batch + (heads,))


def _check_block_mask(block_mask, full):
    if block_mask is None:
        return None, None
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a jaxflash.BlockMask, it was {_describe(block_mask)}.")
    sizes = []
    for name in ("block_q", "block_kv"):
        size = getattr(block_mask, name)
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"block_mask.{name} must be an int of at least 1, it was {size!r}.")
        sizes.append(int(size))
    blocks = _array("block_mask.blocks", block_mask.blocks)
    if blocks.dtype not in (jnp.bool_, jnp.int8):
        raise TypeError(f"block_mask.blocks must be bool or int8, it was {_describe(blocks)}.")
    *outer, length, kv_length = full
    wanted = (*outer, -(-length // sizes[0]), -(-kv_length // sizes[1]))
    blocks = _broadcastable("block_mask.blocks", blocks, wanted)
    return tuple(sizes), blocks if blocks.dtype == jnp.bool_ else blocks != 0


def _dropout_state(key, batch, heads: int):
    """The random state of every batch element, [*batch, 3], and the global index of every head, [1.., N]."""
    if key is None:
        raise ValueError("dropout_key must be given when dropout_rate > 0, it was None; pass a jax.random.key.")
    try:
        seed = jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"dropout_key must be one key (jax.random.key or jax.random.PRNGKey), it was {_describe(key)}."
        ) from error
    count = math.prod(batch)
    index = jnp.arange(count, dtype=jnp.uint32).reshape(*batch, 1)
    state = jnp.concatenate([jnp.broadcast_to(seed, (*batch, 2)), index], axis=-1)
    return state, jnp.arange(heads, dtype=jnp.uint32).reshape((1,) * len(batch) + (heads,))


def _array(name, x):
    """x as a JAX array, or as it is if it is one; NumPy arrays keep their dtype or are refused."""
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} must be a JAX or NumPy array, it was {_describe(x)}.")
    if x.dtype.kind not in "biuf" and x.dtype != jnp.bfloat16:
        raise TypeError(f"{name} must be an array of numbers or booleans, it was {_describe(x)}.")
    converted = jnp.asarray(x)
    if converted.dtype != x.dtype:
        raise TypeError(
            f"{name} is {x.dtype}, which JAX would silently turn into {converted.dtype} because jax_enable_x64 is off; "
            "cast it or enable x64."
        )
    return converted


def _floats(name, x):
    x = _array(name, x)
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, it was {_describe(x)}.")
    return x


def _integers(name, x):
    """An integer array: NumPy for host values, which can be checked, else the JAX array."""
    if isinstance(x, (list, tuple)):
        x = np.asarray(x)
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an int32 array, it was {_describe(x)}.")
    allowed = x.dtype.kind in "iu" if isinstance(x, np.ndarray) else x.dtype in _SMALL_INTS
    if not allowed:
        raise TypeError(f"{name} must be an int32 array, it was {_describe(x)}.")
    return x


def _as_int32(array, lowest: int, highest: int):
    """int32 values within [lowest, highest]; host values outside were refused before, traced ones are clamped."""
    if isinstance(array, np.ndarray):
        array = np.clip(array.astype(np.int64), lowest, highest)
        return jnp.asarray(array.astype(np.int32))
    return jnp.clip(array.astype(jnp.int32), lowest, highest)


def _expect_shape(name, x, shape, meaning):
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)} ({meaning}), its shape was {list(x.shape)}.")


def _describe(x) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (str, numbers.Number, tuple, list)) else type(x).__name__


def _shorten(array) -> str:
    return np.array2string(array, threshold=16)
