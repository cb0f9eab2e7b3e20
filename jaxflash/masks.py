"""Which (query, key) pairs are visible, and which are dropped: the definitions every kernel reproduces.

Everything here is plain jnp over [..., T, S]; kernels evaluate the same rules tile by tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxflash._types import AttentionSpec, Operands

PHILOX_ROUNDS = 7  # Philox4x32-7 is the smallest that passes BigCrush (Salmon et al., SC'11, section 5)


def philox4x32(counter: tuple, key: tuple) -> tuple:
    """Philox4x32-7 over broadcastable uint32 arrays.

    Args:
      counter: Four uint32 arrays.
      key: Two uint32 arrays.

    Returns:
      Four uint32 arrays of random words.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = jnp.broadcast_arrays(*counter)
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply_wide(jnp.uint32(0xD2511F53), c0)
        high1, low1 = _multiply_wide(jnp.uint32(0xCD9E8D57), c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(0x9E3779B9), k1 + jnp.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def _multiply_wide(a, b):
    """High and low words of a 32 x 32 bit product, without 64-bit integers (x64 may be off)."""
    mask, half = jnp.uint32(0xFFFF), jnp.uint32(16)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    middle = a_high * b_low + ((a_low * b_low) >> half)
    carry = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (carry >> half), a * b


def dropout_keep(threshold: int, seed, batch, head, row, column) -> jax.Array:
    """Which elements dropout keeps: a function of (seed, batch, head, row, column) alone.

    Args:
      threshold: An element is dropped when its 16 random bits are below this: round(rate * 65536). Static.
      seed: Two uint32 arrays.
      batch, head, row, column: uint32 arrays; all arrays broadcast against each other. Column i of the last dim must
        be i (0, 1, 2, ...), since one random word serves two neighbouring columns.

    Returns:
      bool array of the broadcast shape.
    """
    size = column.shape[-1]
    groups = jnp.arange(-(-size // 8), dtype=jnp.uint32)
    words = jnp.stack(philox4x32((groups, row, head, batch), seed), axis=-1)
    halves = jnp.stack([words & jnp.uint32(0xFFFF), words >> jnp.uint32(16)], axis=-1)
    bits = halves.reshape(*halves.shape[:-3], -1)[..., :size]
    return bits >= jnp.uint32(threshold)


def positions(operands: Operands):
    """Coordinates that all masks are written in.

    Returns:
      row [..., T] and column [..., S], counted inside the sequence; the packed sequence of each row and key, or None;
      key length minus query length of each row's sequence, [..., T] or scalar; which rows and which keys are not
      padding, [..., T] and [..., S], or None where all are.
    """
    q, k = operands.query, operands.key
    row = jnp.arange(q.shape[-3], dtype=jnp.int32)
    column = jnp.arange(k.shape[-3], dtype=jnp.int32)
    row_valid = key_valid = sequence = None
    q_length = jnp.int32(q.shape[-3])
    kv_length = jnp.int32(k.shape[-3])
    if operands.query_lengths is not None:
        q_length = operands.query_lengths[..., None]
        row_valid = row < q_length
    if operands.kv_lengths is not None:
        kv_length = operands.kv_lengths[..., None]
        key_valid = column < kv_length
    if operands.query_segment_ids is not None:
        row_valid = _both(row_valid, operands.query_segment_ids >= 0)
        key_valid = _both(key_valid, operands.kv_segment_ids >= 0)
    if operands.query_offsets is not None:
        row, q_sequence, q_length, row_valid = _unpack(operands.query_offsets, row)
        column, kv_sequence, _, key_valid = _unpack(operands.kv_offsets, column)
        kv_offsets = clamp_offsets(operands.kv_offsets, k.shape[-3])
        kv_length = jnp.take_along_axis(jnp.diff(kv_offsets, axis=-1), q_sequence, axis=-1)
        sequence = (q_sequence, kv_sequence)
    return row, column, sequence, kv_length - q_length, row_valid, key_valid


def clamp_offsets(offsets, total: int):
    """cu_seqlens made monotone and kept within [0, total]."""
    return jnp.clip(jax.lax.cummax(offsets, axis=offsets.ndim - 1), 0, total)


def _unpack(offsets, index):
    """(position inside its sequence, its sequence, that sequence's length, belongs to one) of each packed token."""
    offsets = clamp_offsets(offsets, index.size)
    inside = index >= offsets[..., 1:, None]
    num_sequences = offsets.shape[-1] - 1
    sequence = jnp.minimum(jnp.sum(inside, axis=-2, dtype=jnp.int32), max(num_sequences - 1, 0))
    start = jnp.take_along_axis(offsets[..., :-1], sequence, axis=-1)
    length = jnp.take_along_axis(jnp.diff(offsets, axis=-1), sequence, axis=-1)
    position = index - start
    return position, sequence, length, (position >= 0) & (position < length)


def _both(a, b):
    return b if a is None else a & b


def visible_pairs(spec: AttentionSpec, operands: Operands):
    """Which pairs a query row may see, apart from a bias of -inf.

    Returns:
      (visible, row_valid, key_valid): bool arrays broadcastable to [*batch, N, T, S], [*batch, T] and [*batch, S];
      None where nothing is hidden.
    """
    row, column, sequence, offset, row_valid, key_valid = positions(operands)
    visible = None
    if spec.window != (None, None):
        bottom_right = spec.causal_alignment == "bottom_right"
        diagonal = row + offset if bottom_right else row
        distance = column[..., None, :] - diagonal[..., :, None]  # key index minus aligned diagonal
        left, right = spec.window
        if left is not None:
            visible = _both(visible, distance >= -min(left, _INT32_MAX))
        if right is not None:
            visible = _both(visible, distance <= min(right, _INT32_MAX))
    if sequence is not None:
        visible = _both(visible, sequence[0][..., :, None] == sequence[1][..., None, :])
    if operands.query_segment_ids is not None:
        same = operands.query_segment_ids[..., :, None] == operands.kv_segment_ids[..., None, :]
        visible = _both(visible, same)
    if row_valid is not None:
        visible = _both(visible, row_valid[..., :, None])
    if key_valid is not None:
        visible = _both(visible, key_valid[..., None, :])
    if visible is not None:
        visible = visible[..., None, :, :]
    if operands.block_mask is not None:
        visible = _both(visible, _expand_blocks(spec, operands))
    if operands.mask is not None:
        visible = _both(visible, operands.mask)
    return visible, row_valid, key_valid


_INT32_MAX = 2**31 - 1


def _expand_blocks(spec, operands):
    blocks = operands.block_mask
    for axis, block, size in (
        (-2, spec.mask_block[0], operands.query.shape[-3]),
        (-1, spec.mask_block[1], operands.key.shape[-3]),
    ):
        if blocks.shape[axis] > 1:
            blocks = jnp.take(blocks, jnp.arange(size) // block, axis=axis)
    return blocks


def operand_dropout_keep(spec: AttentionSpec, operands: Operands):
    """The keep mask of one attention call, [*batch, N, T, S] bool."""
    row, column, sequence, *_ = positions(operands)
    state = operands.dropout_batch[..., None, None]  # [..., 3, 1, 1]
    batch = state[..., 2, :, :]
    if sequence is not None:
        return _packed_dropout_keep(spec, operands, row, column, sequence[0], state)
    return dropout_keep(
        spec.dropout_threshold,
        (state[..., 0, :, :][..., None], state[..., 1, :, :][..., None]),
        batch[..., None],
        operands.dropout_heads[..., :, None, None],
        row.astype(jnp.uint32)[..., None, :, None],
        column.astype(jnp.uint32),
    )


def _packed_dropout_keep(spec, operands, row, column, row_sequence, state):
    """As `dropout_keep`, but columns count inside each sequence, so words are gathered by column."""
    size = column.shape[-1]
    by_column = dropout_keep(
        spec.dropout_threshold,
        (state[..., 0, :, :][..., None], state[..., 1, :, :][..., None]),
        state[..., 2, :, :][..., None] + row_sequence.astype(jnp.uint32)[..., None, :, None],
        operands.dropout_heads[..., :, None, None],
        row.astype(jnp.uint32)[..., None, :, None],
        jnp.arange(size, dtype=jnp.uint32),
    )
    index = jnp.clip(column, 0, max(size - 1, 0))[..., None, None, :]
    return jnp.take_along_axis(by_column, jnp.broadcast_to(index, by_column.shape), axis=-1)
