"""The records that cross layers, and the table of what every array's dimensions mean.

Plain data, no logic beyond rejecting impossible values. `AttentionSpec` says *what* is computed, `KernelConfig`
*how*, `Operands` holds the arrays in canonical form, `KernelCall` names one kernel invocation.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

Implementation = Literal["fa3", "fa2", "fa1", "cpu", "reference"]
CausalAlignment = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is being computed: every static option, in canonical form. Hashable; prints as a constructor call."""

    softmax_scale: float
    window: Window = (None, None)  # causal is folded in as right = 0
    causal_alignment: CausalAlignment = "top_left"
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    mask_block: tuple[int, int] | None = None  # (block_q, block_kv) of the block mask

    @property
    def dropout_threshold(self) -> int:
        """An element is dropped when its 16 random bits are below this."""
        return round(self.dropout_rate * 65536)

    @property
    def dropout_scale(self) -> float:
        """What a kept probability is multiplied by; 0 when everything is dropped."""
        return 0.0 if self.dropout_rate == 1.0 else 1.0 / (1.0 - self.dropout_rate)


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How it is computed. Hashable; prints as a constructor call."""

    implementation: Implementation
    deterministic: bool = False


class Operands(NamedTuple):
    """The arrays of one attention call, canonical: see `OPERAND_DIMS` for their dimensions.

    Every array has as many leading batch dims as `query`. Those of query, key and value are equal; those of the
    others are each equal to query's or 1 (broadcast, never materialised). The same holds for N, T and S of bias and
    mask. None stands for an option that was not given.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None  # float16, bfloat16 or float32, independent of query's dtype
    mask: Any = None  # bool
    block_mask: Any = None  # bool
    query_lengths: Any = None  # int32
    kv_lengths: Any = None  # int32
    query_segment_ids: Any = None  # int32, negative = padding
    kv_segment_ids: Any = None  # int32, negative = padding
    query_offsets: Any = None  # int32, cu_seqlens of a packed batch
    kv_offsets: Any = None  # int32
    sinks: Any = None  # float32
    dropout_batch: Any = None  # uint32: seed word 0, seed word 1, global batch index
    dropout_heads: Any = None  # uint32: global head index

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a result or cotangent ("out", "lse", "dk", ...)."""
        if name == "dbias":
            return tuple(self.bias.shape)
        sizes = dict(zip(("T", "N", "H"), self.query.shape[-3:], strict=True))
        sizes |= dict(zip(("S", "K", "Hv"), self.value.shape[-3:], strict=True))
        return (*self.query.shape[:-3], *(sizes[dim] for dim in OPERAND_DIMS[name]))


# What the backward takes besides the operands: the forward's results and their cotangents; dlse may be absent.
BACKWARD_ONLY = ("out", "lse", "lse_low", "dout", "dlse")

# Dimensions after the batch dims. T, S: query and key length; N, K: query and KV heads; H, Hv: head dims.
# Tb, Sb: blocks of the block mask; E: sequences + 1; W: words. A dim named N, T or S may be 1 in bias, mask, sinks.
OPERAND_DIMS: dict[str, tuple[str, ...]] = {
    "query": ("T", "N", "H"),
    "key": ("S", "K", "H"),
    "value": ("S", "K", "Hv"),
    "bias": ("N", "T", "S"),
    "mask": ("N", "T", "S"),
    "block_mask": ("N", "Tb", "Sb"),
    "query_lengths": (),
    "kv_lengths": (),
    "query_segment_ids": ("T",),
    "kv_segment_ids": ("S",),
    "query_offsets": ("E",),
    "kv_offsets": ("E",),
    "sinks": ("N",),
    "dropout_batch": ("W",),
    "dropout_heads": ("N",),
    "out": ("T", "N", "Hv"),
    "lse": ("T", "N"),
    "lse_low": ("T", "N"),  # what float32 lse cannot hold: logsumexp = lse + lse_low
    "delta": ("T", "N"),  # sum(dout * out) - dlse, float32
    "dout": ("T", "N", "Hv"),
    "dlse": ("T", "N"),
    "dq": ("T", "N", "H"),
    "dk": ("S", "K", "H"),
    "dv": ("S", "K", "Hv"),
    "dbias": ("N", "T", "S"),
}


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One kernel invocation: direction, options, and the names of the arrays it takes, in order."""

    direction: Literal["forward", "backward"]
    spec: AttentionSpec
    config: KernelConfig
    operand_names: tuple[str, ...]
    bias_gradient: bool = False

    @property
    def result_names(self) -> tuple[str, ...]:
        if self.direction == "forward":
            return ("out", "lse", "lse_low")
        bias = ("dbias",) if self.bias_gradient else ()
        return ("dq", "dk", "dv", "delta", *bias)

    def operands(self, arrays) -> tuple[Operands, dict[str, Any]]:
        """Splits the arrays into the attention operands and what only the backward takes."""
        named = dict(zip(self.operand_names, arrays, strict=True))
        extra = {name: named.pop(name) for name in BACKWARD_ONLY if name in named}
        return Operands(**named), extra


@dataclasses.dataclass(frozen=True)
class Problem:
    """What an implementation is asked whether it can run: shapes, dtypes and options, no arrays."""

    spec: AttentionSpec
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtypes: tuple[tuple[str, np.dtype], ...]
    platform: str
    deterministic: bool = False
    compute_capability: tuple[int, int] | None = None  # of an NVIDIA GPU

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        operands: Operands,
        platform: str,
        deterministic: bool,
        compute_capability: tuple[int, int] | None = None,
    ) -> Problem:
        given = [(name, x) for name, x in operands._asdict().items() if x is not None]
        return cls(
            spec,
            tuple((name, tuple(x.shape)) for name, x in given),
            tuple((name, np.dtype(x.dtype)) for name, x in given),
            platform,
            deterministic,
            compute_capability,
        )

    def dtype(self, name: str) -> np.dtype | None:
        return dict(self.dtypes).get(name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A block-sparse pattern: which (query block, key block) pairs are computed at all.

    Attributes:
      blocks: bool or int8 array broadcastable to [B, N, ceil(T / block_q), ceil(S / block_kv)]; a zero block is never
        loaded. Traced. Other masks apply inside the blocks that are kept.
      block_q: Query rows a block covers. Static.
      block_kv: Keys a block covers. Static.
    """

    blocks: Any
    block_q: int = dataclasses.field(metadata={"static": True})
    block_kv: int = dataclasses.field(metadata={"static": True})
