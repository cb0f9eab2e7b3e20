"""Attention in plain jnp: the definition. Differentiable any number of times, in both modes; O(T S) memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxflash import masks
from jaxflash._types import AttentionSpec, Operands, Problem


def supports(problem: Problem) -> str | None:
    """The reference runs everything that `_validate` accepts."""
    del problem
    return None


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Computes out [*batch, T, N, Hv] in query's dtype and lse [*batch, T, N], accumulating in float32 or wider."""
    visible, row_valid, key_valid = masks.visible_pairs(spec, operands)
    query = _zero_padding(operands.query, row_valid)
    key = _zero_padding(operands.key, key_valid)
    value = _zero_padding(operands.value, key_valid)

    logits, visible = compute_logits(spec, query, key, operands.bias, visible)
    row_max = jnp.max(logits, axis=-1, initial=-jnp.inf)
    sinks = None if operands.sinks is None else operands.sinks[..., :, None].astype(logits.dtype)
    if sinks is not None:
        row_max = jnp.maximum(row_max, sinks)
    row_max = jax.lax.stop_gradient(jnp.where(row_max == -jnp.inf, 0, row_max))
    # Two selects, so that a masked pair contributes neither a value nor a NaN gradient.
    safe = logits if visible is None else jnp.where(visible, logits, row_max[..., None])
    weights = jnp.exp(safe - row_max[..., None])
    weights = weights if visible is None else jnp.where(visible, weights, 0)
    row_sum = jnp.sum(weights, axis=-1)
    if sinks is not None:
        row_sum = row_sum + jnp.exp(sinks - row_max)
    empty = row_sum == 0
    if row_valid is not None:
        empty = empty | ~row_valid[..., None, :]
    row_sum = jnp.where(empty, 1, row_sum)
    lse = jnp.where(empty, -jnp.inf, row_max + jnp.log(row_sum))

    probabilities = weights / row_sum[..., None]
    if spec.dropout_threshold > 0:
        keep = masks.operand_dropout_keep(spec, operands)
        probabilities = jnp.where(keep, probabilities * spec.dropout_scale, 0)
    group_size = _group_size(operands)
    grouped = probabilities.reshape(*value.shape[:-3], value.shape[-2], group_size, *probabilities.shape[-2:])
    out = _einsum("...kgts,...skh->...tkgh", grouped, value.astype(grouped.dtype))
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    # A select, so that the cotangent of an empty row is not even looked at.
    out = jnp.where(jnp.swapaxes(empty, -1, -2)[..., None], 0, out)
    return out.astype(query.dtype), jnp.swapaxes(lse, -1, -2)


def compute_logits(spec: AttentionSpec, query, key, bias, visible):
    """Scaled, soft-capped, biased logits, -inf where hidden, [*batch, N, T, S]; and the mask with bias folded in."""
    accumulator = jnp.promote_types(query.dtype, jnp.float32)
    *batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[-2]
    grouped = query.astype(accumulator).reshape(*batch, length, kv_heads, heads // kv_heads, head_dim)
    logits = _einsum("...tkgh,...skh->...kgts", grouped, key.astype(accumulator)) * spec.softmax_scale
    logits = logits.reshape(*batch, heads, length, key.shape[-3])
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    if bias is not None:
        bias = bias.astype(accumulator)
        hidden = bias == -jnp.inf
        visible = ~hidden if visible is None else visible & ~hidden
        logits = logits + jnp.where(hidden, 0, bias)
        lowest = jnp.finfo(accumulator).min  # the most negative finite bias stays finite when a logit is added
        logits = jnp.where(logits == -jnp.inf, lowest, logits)
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    return logits, visible


def _group_size(operands: Operands) -> int:
    return operands.query.shape[-2] // operands.key.shape[-2]


def _zero_padding(x, valid):
    return x if valid is None else jnp.where(valid[..., None, None], x, 0)


def _einsum(subscripts, *arrays):
    return jnp.einsum(subscripts, *arrays, precision="highest")
