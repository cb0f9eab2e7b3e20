"""Reverse-mode differentiation of the kernels (`custom_vjp`), and clear errors for what they cannot do."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxflash._backends import reference
from jaxflash._primitive.batching import run_batched
from jaxflash._primitive.partition import run_reference, same_type_as, same_varying_axes
from jaxflash._types import BACKWARD_ONLY, AttentionSpec, KernelCall, KernelConfig, Operands

OUT_NAME = "jaxflash_out"
LSE_NAME = "jaxflash_lse"

_FORWARD_MODE = (
    "jaxflash's kernels can be differentiated in reverse mode only (grad, vjp, jacrev); for forward mode "
    "(jvp, jacfwd, hessian) use implementation='reference'."
)


def attend(spec: AttentionSpec, config: KernelConfig, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Runs one attention call: out [*batch, T, N, Hv] and lse [*batch, T, N], both differentiable."""
    try:
        return _attend_jitted(spec, config, operands)
    except TypeError as error:
        # JAX's own refusal, where it comes while tracing; `_reverse_only` covers the rest.
        if "forward-mode autodiff" in str(error):
            raise NotImplementedError(_FORWARD_MODE) from error
        raise


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that an eager call on sharded arrays is partitioned as well
def _attend_jitted(spec, config, operands):
    *batch, length, heads, _ = operands.query.shape
    value_head_dim = operands.value.shape[-1]
    if 0 in (*batch, length, heads):
        empty = jnp.zeros((*batch, length, heads, value_head_dim), operands.query.dtype)
        return empty, jnp.zeros((*batch, length, heads), jnp.float32)
    operands = same_varying_axes(operands)
    if config.implementation == "reference":
        return run_reference(functools.partial(reference.forward, spec), operands)
    floating = ("query", "key", "value", "bias", "sinks")
    guarded = {name: _reverse_only(x) for name in floating if (x := getattr(operands, name)) is not None}
    return _attend(spec, config, operands._replace(**guarded))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec, config, operands):
    return _forward(spec, config, operands)[:2]


def _forward_rule(spec, config, operands):
    bias_gradient = operands.bias is not None and operands.bias.perturbed
    operands = jax.tree.map(lambda x: x.value, operands)
    out, lse, lse_low = _forward(spec, config, operands)
    # Named, so that a checkpoint policy can save them and skip the second forward.
    out = checkpoint_name(out, OUT_NAME)
    lse, lse_low = checkpoint_name(lse, LSE_NAME), checkpoint_name(lse_low, LSE_NAME)
    return (out, lse), (_Wanted(bias_gradient), operands, out, lse, lse_low)


def _backward_rule(spec, config, residuals, cotangents):
    wanted, operands, out, lse, lse_low = residuals
    dout, dlse = cotangents
    dout = jnp.zeros_like(out) if isinstance(dout, SymbolicZero) else dout
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    dq, dk, dv, delta, dbias = _backward(spec, config, wanted.bias, operands, out, lse, lse_low, dout, dlse)
    gradients = {"query": dq, "key": dk, "value": dv, "bias": dbias}
    if operands.sinks is not None:
        gradients["sinks"] = _sinks_gradient(operands.sinks, lse, lse_low, delta)
    typed = {
        name: same_type_as(gradient, getattr(operands, name))
        for name, gradient in gradients.items()
        if gradient is not None
    }
    empty = Operands(*([None] * len(Operands._fields)))
    return (empty._replace(**typed),)


_attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which optional gradients the backward must compute; static data among the residuals."""

    bias: bool


def _sinks_gradient(sinks, lse, lse_low, delta):
    """A sink is a key with no value: P_sink = exp(sink - lse), dP_sink = 0, so dsink = -sum P_sink * delta."""
    visible = lse > -jnp.inf  # padding rows take no part, whatever their cotangent holds
    weight = jnp.exp(sinks[..., None, :] - jnp.where(visible, lse, jnp.inf) - lse_low)
    per_row = jnp.where(visible, -weight * delta, 0)
    gradient = jnp.sum(per_row, axis=-2)
    broadcast = tuple(i for i, size in enumerate(sinks.shape) if size != gradient.shape[i])
    return jnp.sum(gradient, axis=broadcast, keepdims=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward(spec, config, operands):
    operands = {name: x for name, x in operands._asdict().items() if x is not None}
    call = KernelCall("forward", spec, config, tuple(operands))
    out, lse, lse_low = run_batched(call, *operands.values())
    return same_type_as(out, operands["query"]), lse, lse_low


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _backward(spec, config, bias_gradient, operands, out, lse, lse_low, dout, dlse):
    own = dict(zip(BACKWARD_ONLY, (out, lse, lse_low, dout, dlse), strict=True))
    arrays = {**operands._replace(sinks=None)._asdict(), **own}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    call = KernelCall("backward", spec, config, tuple(arrays), bias_gradient)
    gradients = run_batched(call, *arrays.values())
    return gradients if bias_gradient else (*gradients, None)


def _refuse_second_order(*args):
    raise NotImplementedError(
        "jaxflash's kernels can be differentiated once, in reverse mode; for second derivatives "
        "(grad of grad, hessian) use implementation='reference'."
    )


_forward.defjvp(_refuse_second_order)
_backward.defjvp(_refuse_second_order)


# Forward mode. A custom_vjp cannot tell jvp from grad while it is traced; JAX's own error comes later and does not say
# what to do. This primitive is the identity on tangents: reverse mode transposes it away, forward mode has to run it.
_reverse_only_p = Primitive("jaxflash_reverse_mode_only")


@jax.custom_jvp
def _reverse_only(x):
    return x


@_reverse_only.defjvp
def _reverse_only_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return x, _reverse_only_p.bind(tangent)


def _refuse_forward_mode(*args, **kwargs):
    raise NotImplementedError(_FORWARD_MODE)


_reverse_only_p.def_impl(_refuse_forward_mode)
_reverse_only_p.def_abstract_eval(lambda aval: aval)
ad.deflinear2(_reverse_only_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_reverse_only_p] = lambda args, dims: (_reverse_only_p.bind(*args), dims[0])
mlir.register_lowering(_reverse_only_p, _refuse_forward_mode)
