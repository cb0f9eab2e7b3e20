"""Sharding of the kernels: over batch dims and query heads, with no communication but sums of gradients.

A mesh axis can be Auto (the partitioner decides: `custom_partitioning` with a Shardy rule), Explicit (types carry the
sharding: reshard and `shard_map`) or manual (inside shard_map or pmap: the call is already local). In all three the
layout follows query's batch and head dims; everything else is replicated, so an operand that arrives sharded along
T, S or a head dim is gathered. KV heads are sharded with the query heads where the axis divides them; where each
device's query heads lie in one KV group instead, every device takes its own KV head out of the replicated array, and
dk and dv are summed over the axis.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxflash._backends import ffi
from jaxflash._types import OPERAND_DIMS, KernelCall, Operands

Axes = tuple[str, ...]

_BACKENDS = {"fa3": ffi.run, "fa2": ffi.run, "fa1": ffi.run, "cpu": ffi.run}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes over which each batch dim, the query heads and the KV heads are split."""

    batch: tuple[Axes, ...]
    heads: Axes
    kv_heads: Axes
    full_batch: tuple[int, ...]  # global sizes: an operand's dim of another size is broadcast and never split
    full_heads: int

    @property
    def picks_kv_head(self) -> bool:
        """Each device reads one KV head out of all of them."""
        return self.heads != self.kv_heads

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        num_batch = len(self.batch)
        split = [
            axes if size == full else ()
            for axes, size, full in zip(self.batch, shape[:num_batch], self.full_batch, strict=True)
        ]
        for dim, size in zip(OPERAND_DIMS[name], shape[num_batch:], strict=True):
            is_heads = dim == "N" and size == self.full_heads
            split.append(self.heads if is_heads else self.kv_heads if dim == "K" else ())
        return PartitionSpec(*(axes if axes else None for axes in split))

    def bias_axes(self, call: KernelCall, arrays) -> Axes:
        """The axes that split what the bias (global shape) is broadcast over: its gradient is summed over them."""
        if not call.bias_gradient:
            return ()
        shape = arrays[call.operand_names.index("bias")].shape
        split = zip((*self.batch, self.heads), shape[:-2], (*self.full_batch, self.full_heads), strict=True)
        return tuple(itertools.chain(*(axes for axes, size, full in split if size == 1 < full)))

    def specs(self, names, arrays) -> tuple[PartitionSpec, ...]:
        return tuple(self.spec(name, tuple(x.shape)) for name, x in zip(names, arrays, strict=True))


def run_partitioned(call: KernelCall, *arrays):
    """Runs a kernel call, split over the mesh its operands live on."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.explicit_axes:
        return _run_explicit(call, mesh, arrays)
    if not mesh.empty and mesh.manual_axes:
        return _BACKENDS[call.config.implementation](call, *arrays)
    return _auto(call)(arrays)


def choose_layout(mesh, query_axes: tuple[Axes, ...], query_shape, key_shape) -> Layout:
    """The layout closest to query's sharding that needs no communication inside the kernel.

    Args:
      mesh: The mesh, for its axis sizes.
      query_axes: The mesh axes of each dim of query.
      query_shape: [*batch, T, N, H], global.
      key_shape: [*batch, S, K, H], global.
    """
    *batch_axes, _, head_axes, _ = query_axes
    *batch, _, heads, _ = query_shape
    kv_heads = key_shape[-2]
    batch_axes = tuple(
        axes if size % _size(mesh, axes) == 0 else () for axes, size in zip(batch_axes, batch, strict=True)
    )
    shards = _size(mesh, head_axes)
    if heads % shards == 0 and kv_heads % shards == 0:
        kv_head_axes = head_axes
    elif heads % shards == 0 and shards % kv_heads == 0:
        kv_head_axes = ()
    else:
        head_axes = kv_head_axes = ()
    return Layout(batch_axes, head_axes, kv_head_axes, tuple(batch), heads)


def _size(mesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _run_local(call: KernelCall, mesh, layout: Layout, bias_axes: Axes, arrays):
    """The kernel on one device's shards, with the sums over mesh axes that its replicated results need."""
    named = dict(zip(call.operand_names, arrays, strict=True))
    kv_heads = named["key"].shape[-2]
    if layout.picks_kv_head:
        shard = jax.lax.axis_index(layout.heads)
        kv_head = shard * kv_heads // _size(mesh, layout.heads)
        for name in ("key", "value"):
            named[name] = jax.lax.dynamic_slice_in_dim(named[name], kv_head, 1, axis=-2)
    results = _BACKENDS[call.config.implementation](call, *named.values())
    results = dict(zip(call.result_names, results, strict=True))
    if layout.picks_kv_head and call.direction == "backward":
        for name in ("dk", "dv"):
            shape = (*results[name].shape[:-2], kv_heads, results[name].shape[-1])
            all_heads = jax.lax.dynamic_update_slice_in_dim(
                _zeros_like(shape, results[name]), results[name], kv_head, axis=-2
            )
            results[name] = jax.lax.psum(all_heads, layout.heads)
    if bias_axes:
        results["dbias"] = jax.lax.psum(results["dbias"], bias_axes)
    return tuple(results.values())


def _zeros_like(shape, x):
    """Zeros of another shape that vary over the same manual axes as x."""
    return jnp.broadcast_to(jax.lax.slice_in_dim(x, 0, 1, axis=-2) * 0, shape)


# --- Explicit axes --------------------------------------------------------------------------------------------------


def _run_explicit(call, mesh, arrays):
    axes = _axes_of_spec(jax.typeof(arrays[0]).sharding.spec, arrays[0].ndim)
    layout = choose_layout(mesh, axes, arrays[0].shape, arrays[1].shape)
    in_specs = layout.specs(call.operand_names, arrays)
    operands, _ = call.operands(arrays)
    out_specs = tuple(layout.spec(name, operands.shape_of(name)) for name in call.result_names)
    # shard_map asserts that its operands are laid out as asked; it never moves them.
    arrays = [jax.sharding.reshard(x, spec) for x, spec in zip(arrays, in_specs, strict=True)]
    local = functools.partial(_run_local, call, mesh, layout, layout.bias_axes(call, arrays))
    return jax.shard_map(
        lambda *shards: local(shards), in_specs=in_specs, out_specs=out_specs, axis_names=set(mesh.explicit_axes)
    )(*arrays)


def _axes_of_spec(spec, ndim: int) -> tuple[Axes, ...]:
    entries = tuple(spec) + (None,) * (ndim - len(spec))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


# --- Auto axes ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _auto(call: KernelCall):
    """The kernel call as a function that the partitioner splits; takes one tuple of arrays."""

    @custom_partitioning
    def run(arrays):
        return tuple(_BACKENDS[call.config.implementation](call, *arrays))

    def partition(mesh, arg_shapes, result_shapes):
        (args,) = arg_shapes
        query, key = args[0], args[1]
        axes = _axes_of_sharding(mesh, query.sharding, tuple(query.shape))
        layout = choose_layout(mesh, axes, tuple(query.shape), tuple(key.shape))
        local = functools.partial(_run_local, call, mesh, layout, layout.bias_axes(call, args))
        in_shardings = tuple(NamedSharding(mesh, spec) for spec in layout.specs(call.operand_names, args))
        out_shardings = tuple(NamedSharding(mesh, spec) for spec in layout.specs(call.result_names, result_shapes))
        return mesh, local, out_shardings, (in_shardings,)

    run.def_partition(
        partition=partition,
        decode_shardings=False,  # Shardy may split an axis in a way that a PartitionSpec cannot say
        sharding_rule=functools.partial(_sharding_rule, call),
    )
    return run


def _sharding_rule(call: KernelCall, mesh, value_types, result_types):
    """Batch dims and heads propagate; T, S and head dims are replicated; broadcast dims get a factor of their own."""
    del mesh
    shapes = [tuple(t.shape) for t in value_types]
    batch = shapes[0][:-3]
    heads, kv_heads = shapes[0][-2], shapes[1][-2]
    fresh = (f"u{i}" for i in itertools.count())
    letters = {"T": "t", "S": "s", "H": "h", "Hv": "v", "N": "n", "K": "n" if kv_heads == heads else "k"}
    sizes = {"N": heads, "T": shapes[0][-3], "S": shapes[1][-3]}
    replicated = []

    def factors(name, shape):
        names = [
            f"b{i}" if size == full else next(fresh) for i, (size, full) in enumerate(zip(shape, batch, strict=False))
        ]
        for dim, size in zip(OPERAND_DIMS[name], shape[len(batch) :], strict=True):
            known = dim in letters and size == sizes.get(dim, size)
            names.append(letters[dim] if known else next(fresh))
        replicated.extend(f for f in names if f in ("t", "s", "h", "v") and f not in replicated)
        return " ".join(names)

    operands = [factors(name, shape) for name, shape in zip(call.operand_names, shapes, strict=True)]
    results = [factors(name, tuple(t.shape)) for name, t in zip(call.result_names, result_types, strict=True)]
    rule = f"{', '.join(operands)} -> {', '.join(results)}"
    return rule, {"need_replication_factors": tuple(replicated)}


def _axes_of_sharding(mesh, sharding, shape: tuple[int, ...]) -> tuple[Axes, ...]:
    """The mesh axes of each dim, from public API only; () everywhere if no PartitionSpec expresses the sharding."""
    if isinstance(sharding, NamedSharding):
        return _axes_of_spec(sharding.spec, len(shape))
    nowhere = ((),) * len(shape)
    try:
        shard = sharding.shard_shape(shape)
    except ValueError:  # does not divide evenly
        return nowhere
    splits = [size // part if part else 1 for size, part in zip(shape, shard, strict=True)]
    for axes in _splittings(mesh, splits, mesh.axis_names):
        if sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*(a or None for a in axes))), len(shape)):
            return axes
    return nowhere


def _splittings(mesh, splits, free):
    """All ways to give each dim mesh axes whose sizes multiply to its number of parts."""
    if not splits:
        yield ()
        return
    choices = (
        [()]
        if splits[0] == 1
        else [
            axes
            for count in range(1, len(free) + 1)
            for axes in itertools.permutations(free, count)
            if _size(mesh, axes) == splits[0]
        ]
    )
    for axes in choices:
        for rest in _splittings(mesh, splits[1:], tuple(a for a in free if a not in axes)):
            yield (axes, *rest)


# --- Types ----------------------------------------------------------------------------------------------------------


def run_reference(function, operands: Operands):
    """Runs a plain jnp function of the operands; Explicit axes are left to the partitioner inside it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.explicit_axes:
        return function(operands)
    query = jax.typeof(operands.query).sharding.spec
    axes = _axes_of_spec(query, operands.query.ndim)
    out_spec = PartitionSpec(*(a or None for a in (*axes[:-1], ())))
    lse_spec = PartitionSpec(*(a or None for a in axes[:-1]))
    return jax.sharding.auto_axes(function, out_sharding=(out_spec, lse_spec))(operands)


def same_type_as(x, like):
    """x with the explicit sharding of `like`; a cotangent must have its primal's exact type."""
    sharding = jax.typeof(like).sharding
    if sharding.mesh.explicit_axes and jax.typeof(x).sharding != sharding:
        return jax.sharding.reshard(x, sharding.spec)
    return x


def same_varying_axes(operands: Operands) -> Operands:
    """Makes every operand vary over the same manual axes; the transpose of the cast sums the gradients."""
    arrays = [x for x in operands if x is not None]
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))

    def cast(x):
        missing = tuple(varying - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, operands)
