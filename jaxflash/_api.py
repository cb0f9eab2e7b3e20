"""The public functions: signature, documentation, and five calls each."""

from __future__ import annotations

import jax

from jaxflash import _device, _dispatch, _validate
from jaxflash._backends import ffi
from jaxflash._primitive.autodiff import attend
from jaxflash._types import BlockMask, CausalAlignment, Implementation, Problem


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "top_left",
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    block_mask: BlockMask | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact softmax attention without materialising the [T, S] score matrix.

    Takes the arguments of `jax.nn.dot_product_attention`. Computes, per batch b and query head n, which reads KV head
    n // (N // K),

        logits = soft_cap(scale * query @ key.T) + bias            -inf where masked
        out = dropout(softmax(logits)) @ value                     lse = logsumexp(logits, axis=-1)

    A query row that sees no key has out 0, lse -inf and gradient 0. What lies in padding (beyond a length, in a
    negative segment) is never observed, NaN included.

    Args:
      query: [B, T, N, H]; also [T, N, H], or more batch dims. float16, bfloat16 or float32 (float64 on "reference"
        under x64). N must be a multiple of K.
      key: [B, S, K, H], query's dtype and batch dims.
      value: [B, S, K, Hv], query's dtype and batch dims. Hv may differ from H.
      bias: Added to the logits. Any floating dtype; broadcastable to [B, N, T, S]: every dim equal or 1 ([N, T, S] is
        taken too). Never materialised; its gradient, computed only if asked for, is summed over the broadcast dims.
        -inf means masked; the most negative finite value only outweighs everything else.
      mask: bool, True = may attend. Broadcastable like bias.
      scale: Dimensionless factor on query @ key.T. Default 1 / sqrt(H). Static.
      is_causal: Query t sees keys s <= t, along the diagonal that `causal_alignment` says. Static.
      causal_alignment: Where the diagonal lies when T != S. "top_left" (JAX's, the default): key t is aligned with
        query t. "bottom_right" (FlashAttention's): the last valid key is aligned with the last valid query, after
        `query_seq_lengths` and `key_value_seq_lengths`. Static.
      query_seq_lengths: int32 [B], valid queries of each batch element; the rest is padding. NumPy arrays and lists
        outside [0, T] are refused, traced values are clamped.
      key_value_seq_lengths: int32 [B], as query_seq_lengths, for keys.
      query_segment_ids: int32 [B, T]; a query sees the keys of its own segment. Negative = padding.
      key_value_segment_ids: int32 [B, S]. Default: query_segment_ids, if T == S.
      local_window_size: (left, right): query t sees keys from t - left to t + right, both included, around the aligned
        diagonal; None leaves a side unbounded, an int means (int, int). With is_causal, right is 0. Static.
      logits_soft_cap: cap * tanh(logits / cap), before bias. Static.
      sinks: [N] extra logits that take part in the softmax's denominator, with no value. lse includes them.
        Differentiable.
      block_mask: A `BlockMask`; blocks that are zero are never loaded.
      dropout_rate: Probability of dropping an element of the softmax, in steps of 2**-16; kept elements are scaled by
        1 / (1 - rate). Static.
      dropout_key: A `jax.random.key`. Whether an element is dropped depends on (key, batch index, head, row, column)
        alone: the same forward, backward, under remat, vmap and jit sharding, and on every implementation.
      deterministic: Gradients must be the same to the bit from run to run. Static.
      return_residual: Also return lse. Static.
      implementation: None takes the fastest that supports the call forward and backward; a name is used or refused,
        never replaced. Static.

    Returns:
      out [B, T, N, Hv] in query's dtype, accumulated in float32. With return_residual also lse [B, T, N], float32,
      natural log, -inf for rows that see no key. Both are differentiable in query, key, value, bias and sinks.
      "reference" is differentiable any number of times in both modes, the kernels once in reverse mode.

    Raises:
      TypeError, ValueError: an argument that no implementation could accept, before anything runs.
      NotImplementedError: the named implementation, or every one, refuses; the message lists each reason.

    Sharding: batch dims and heads may be sharded, over any mesh; T, S, H and Hv are gathered (docs/design.md).
    Source: FlashAttention-2, arXiv:2307.08691, Algorithm 1 (forward) and 2 (backward).
    """
    _validate.check_flag("return_residual", return_residual)
    spec, operands, problem = _problem(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        block_mask=block_mask,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic=deterministic,
    )
    out, lse = attend(spec, _dispatch.choose(problem, _check_implementation(implementation)), operands)
    return (out, lse) if return_residual else out


def why(*args, implementation: Implementation | None = None, return_residual: bool = False, **kwargs):
    """Which implementation a call of `attention` would take, and why the others refuse.

    Takes the arguments of `attention` (`jax.ShapeDtypeStruct`s serve for arrays) and runs nothing.

    Returns:
      `Explanation` with `chosen` and `reasons`; printing it shows one line an implementation.

    Raises:
      TypeError, ValueError: as `attention`.
    """
    del return_residual
    problems = []
    arrays, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None)
    is_array = [isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) for x in arrays]

    def record(traced):
        traced = iter(traced)
        merged = [next(traced) if given else x for given, x in zip(is_array, arrays, strict=True)]
        merged_args, merged_kwargs = jax.tree.unflatten(structure, merged)
        problems.append(_problem(*merged_args, **merged_kwargs)[2])

    jax.eval_shape(record, [x for given, x in zip(is_array, arrays, strict=True) if given])
    return _dispatch.explain(problems[0], _check_implementation(implementation))


def flash_mha(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    sinks: jax.Array | None = None,
    **options,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`attention` under the name and conventions of the flash-attn ports: bottom-right causal alignment.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      softmax_scale: Default 1 / sqrt(H). Static.
      is_causal: The last query sees all keys. Static.
      window_size: (left, right); -1 leaves a side unbounded. Static.
      sinks: [N].
      options: Any other keyword of `attention`.

    Returns:
      As `attention`. Differentiable likewise.

    Raises:
      As `attention`.

    Source: the calling convention of flash_attn_jax 0.6 and dew-flash-attn 0.3.
    """
    return attention(
        query,
        key,
        value,
        scale=_validate.check_scale("softmax_scale", softmax_scale),
        is_causal=is_causal,
        local_window_size=_window_of_ports(window_size),
        sinks=sinks,
        **{"causal_alignment": "bottom_right", **options},
    )


def flash_mha_varlen(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array | None = None,
    *,
    max_seqlen_q: int = -1,
    max_seqlen_k: int = -1,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: CausalAlignment = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention over sequences packed one after the other, each seeing only itself.

    Equals `attention` on each sequence alone; dropout's batch index is the sequence's number.

    Args:
      query: [total_q, N, H].
      key: [total_k, K, H].
      value: [total_k, K, Hv].
      cu_seqlens_q: int32 [num_sequences + 1]: sequence i holds tokens cu_seqlens_q[i] to cu_seqlens_q[i + 1]. Starts
        at 0; tokens from cu_seqlens_q[-1] on are padding (out 0, lse -inf, gradient 0, never observed). NumPy arrays
        and lists that fall or pass the end are refused, traced values are clamped.
      cu_seqlens_k: Likewise for keys, as many sequences. Default cu_seqlens_q.
      max_seqlen_q: A bound on the length of a sequence, -1 = unknown. Not needed; checked where cu_seqlens_q is a
        NumPy array or list. Static.
      max_seqlen_k: Likewise for keys. Static.
      softmax_scale: Default 1 / sqrt(H). Static.
      is_causal: Causal inside each sequence. Static.
      causal_alignment: As in `attention`, inside each sequence. Static.
      window_size: (left, right) inside each sequence; -1 leaves a side unbounded. Static.
      logits_soft_cap: As in `attention`. Static.
      sinks: [N], as in `attention`.
      dropout_rate: As in `attention`. Static.
      dropout_key: As in `attention`.
      deterministic: As in `attention`. Static.
      return_residual: Also return lse [total_q, N]. Static.
      implementation: As in `attention`. Static.

    Returns:
      out [total_q, N, Hv], and lse with return_residual. Differentiable as in `attention`.

    Raises:
      As `attention`.

    Source: the calling convention of flash_attn_jax 0.6 and flash_attn3_jax 0.2.
    """
    _validate.check_flag("return_residual", return_residual)
    cu_seqlens = _validate.check_cu_seqlens(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    spec, operands, problem = _problem(
        query,
        key,
        value,
        scale=_validate.check_scale("softmax_scale", softmax_scale),
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        local_window_size=_window_of_ports(window_size),
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic=deterministic,
        cu_seqlens=cu_seqlens,
    )
    out, lse = attend(spec, _dispatch.choose(problem, _check_implementation(implementation)), operands)
    return (out, lse) if return_residual else out


def export_checks() -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """What `jax.export.export(..., disabled_checks=...)` needs to serialise programs that call jaxflash's kernels.

    JAX asks for it for every custom call that is not its own. The targets carry a version in their names, and a
    program exported with one version of jaxflash runs with any other that registers the same names.
    """
    return tuple(jax.export.DisabledSafetyCheck.custom_call(name) for name in ffi.targets())


def _problem(*args, deterministic=False, **kwargs):
    deterministic = _validate.check_flag("deterministic", deterministic)
    spec, operands = _validate.canonicalize(*args, **kwargs)
    platform = _device.platform_of(operands.query, operands.key, operands.value)
    capability = _device.compute_capability_of(platform)
    return spec, operands, Problem.of(spec, operands, platform, deterministic, capability)


def _check_implementation(implementation):
    if implementation is None:
        return None
    return _validate.check_choice("implementation", implementation, _dispatch.implementations())


def _window_of_ports(window_size):
    """(left, right) with None for -1; other negative values are left for the validator to refuse."""
    if not isinstance(window_size, (tuple, list)):
        return window_size
    return tuple(None if side == -1 and not isinstance(side, bool) else side for side in window_size)
