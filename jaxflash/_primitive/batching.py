"""vmap of the kernels: one more leading batch dim (`custom_vmap`).

Nothing is folded into an existing dim, because folding a sharded dim gathers it.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxflash._primitive.partition import run_partitioned
from jaxflash._types import BACKWARD_ONLY, KernelCall

# These have every batch dim in full; all other operands may keep size 1 there, and are then never materialised.
_FULL = ("query", "key", "value", *BACKWARD_ONLY)


def run_batched(call: KernelCall, *arrays):
    """Runs a kernel call under any nesting of vmap; returns the arrays that `call.result_names` names."""
    return _batched(call)(*arrays)


@functools.lru_cache(maxsize=4096)
def _batched(call: KernelCall):
    @custom_vmap
    def run(*arrays):
        return run_partitioned(call, *arrays)

    @run.def_vmap
    def rule(size, is_batched, *arrays):
        full = (*_FULL, "bias") if call.bias_gradient else _FULL
        leading = [
            x if batched else jnp.broadcast_to(x, (size, *x.shape)) if name in full else x[None]
            for name, x, batched in zip(call.operand_names, arrays, is_batched, strict=True)
        ]
        return tuple(run(*leading)), (True,) * len(call.result_names)

    return run
