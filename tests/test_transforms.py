"""jit, grad, scan, remat, donation, AOT, export, and what is refused."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_close, assert_same_bits, normal, qkv

import jaxflash

OPTIONS = {"is_causal": True, "dropout_rate": 0.2, "dropout_key": jax.random.key(1)}


def _loss(q, k, v, implementation="cpu", **options):
    out = jaxflash.attention(q, k, v, implementation=implementation, **options)
    return jnp.sum(out * normal(*out.shape, seed=3))


def _num_calls(compiled, direction):
    return len(re.findall(rf'custom_call_target="jaxflash_\w+_{direction}_v1"', compiled.as_text()))


def test_jit_equals_eager(implementation):
    q, k, v = qkv()
    grad = jax.grad(_loss, (0, 1, 2))
    eager = grad(q, k, v, implementation, **OPTIONS)
    jitted = jax.jit(lambda q, k, v: grad(q, k, v, implementation, **OPTIONS))(q, k, v)
    (assert_same_bits if implementation == "cpu" else assert_close)(jitted, eager)


def test_value_and_grad_agrees_with_reference():
    q, k, v = qkv()
    ours, reference = (
        jax.value_and_grad(_loss, (0, 1, 2))(q, k, v, implementation, **OPTIONS)
        for implementation in ("cpu", "reference")
    )
    assert_close(ours, reference)


def test_only_the_bias_gradient_that_is_wanted_is_computed():
    """BC-44: asking for dbias changes no other gradient; BC-53 (JAX#34685): not asking computes none."""
    q, k, v = qkv()
    bias = normal(2, 6, 9, 11, seed=2)

    def loss(q, k, v, bias):
        return jnp.sum(jaxflash.attention(q, k, v, bias, implementation="cpu") ** 2)

    without = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v, bias).compile()
    with_bias = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, k, v, bias).compile()
    assert_same_bits(without(q, k, v, bias), with_bias(q, k, v, bias)[:3])

    def backward_results(compiled):
        (line,) = re.findall(r"= \((.*)\) custom-call.*jaxflash_cpu_backward_v1", compiled.as_text())
        return line

    assert "f32[0]" in backward_results(without)
    assert "f32[0]" not in backward_results(with_bias)


@pytest.mark.parametrize("shape", [(8, 16, 2048, 2048), (1, 1, 2048, 2048)])
def test_a_mask_costs_no_memory_in_the_gradient(kernel, shape):
    """BC-53 (JAX#34685, JAX#39512): no [B, N, T, S] buffer, which would be 1 GiB."""
    q = k = v = jax.ShapeDtypeStruct((8, 2048, 16, 64), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct(shape, bool)

    def loss(q, k, v, mask):
        out = jaxflash.attention(q, k, v, mask=mask, implementation=kernel)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v, mask).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 268e6  # twice the size of q, k, v and out


def test_lse_gradient_and_unused_outputs(implementation):
    """BC-49 (JAX#28408): lse unused, out unused, both used."""
    q, k, v = qkv()

    def attend(q):
        return jaxflash.attention(q, k, v, return_residual=True, implementation=implementation)

    def plain(q):
        return jnp.sum(jaxflash.attention(q, k, v, implementation=implementation) ** 2)

    only_out = jax.jit(jax.grad(lambda q: jnp.sum(attend(q)[0] ** 2)))(q)
    assert_close(only_out, jax.jit(jax.grad(plain))(q), rtol=1e-6, atol=1e-6)
    only_lse = jax.jit(jax.grad(lambda q: jnp.sum(jnp.sin(attend(q)[1]))))(q)
    both = jax.jit(jax.grad(lambda q: jnp.sum(attend(q)[0] ** 2) + jnp.sum(jnp.sin(attend(q)[1]))))(q)
    assert_close(both, only_out + only_lse)

    # d lse / dq = P k: compare with the plain formula.
    def scores(q):
        return jnp.einsum("btngh,bsnh->btngs", q.reshape(2, 9, 3, 2, 8), k, precision="highest") * 8**-0.5

    expected = jax.grad(lambda q: jnp.sum(jnp.sin(jax.nn.logsumexp(scores(q), axis=-1))))(q)
    assert_close(only_lse, expected)


def test_scan_over_layers(implementation):
    q, k, v = qkv(S=9, N=4, K=4, H=8, Hv=8)
    keys = jax.random.split(jax.random.key(0), 4)

    def layer(x, key):
        out = jaxflash.attention(x, x, x, dropout_rate=0.1, dropout_key=key, implementation=implementation)
        return x + out, None

    def scanned(x):
        return jnp.sum(jax.lax.scan(layer, x, keys)[0] ** 2)

    def unrolled(x):
        for i in range(len(keys)):
            x, _ = layer(x, keys[i])
        return jnp.sum(x**2)

    assert_close(jax.jit(jax.grad(scanned))(q), jax.jit(jax.grad(unrolled))(q), rtol=1e-4, atol=1e-4)


SAVE_NAMES = jax.checkpoint_policies.save_only_these_names("jaxflash_out", "jaxflash_lse")
SAVE_ONE_NAME = jax.checkpoint_policies.save_only_these_names("jaxflash_lse")


@pytest.mark.parametrize(
    ("policy", "forward_calls"),
    [
        (None, 1),
        (SAVE_NAMES, 1),
        (SAVE_ONE_NAME, 2),
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.dots_saveable, 2),
    ],
    ids=["no_remat", "save_out_and_lse", "save_lse_alone", "nothing_saveable", "dots_saveable"],
)
@pytest.mark.parametrize("scanned", [False, True], ids=["one_layer", "scan"])
def test_remat_runs_no_more_kernels_than_the_policy_says(kernel, policy, forward_calls, scanned):
    """BC-52 (JAX#21303, JAX#26374): one forward and one backward call when out and lse are saved."""
    if scanned and kernel != "cpu":
        pytest.skip("XLA unrolls loops on GPUs, so that calls in the text are not calls that run")
    x = qkv(S=9, N=4, K=4, H=8, Hv=8)[0]

    def layer(x, key):
        out = jaxflash.attention(x, x, x, dropout_rate=0.1, dropout_key=key, implementation=kernel)
        return jnp.tanh(out)

    rematerialized = layer if policy is None else jax.checkpoint(layer, policy=policy)

    def loss(layer):
        def run(x):
            if scanned:
                return jnp.sum(jax.lax.scan(lambda x, key: (layer(x, key), None), x, keys)[0])
            return jnp.sum(layer(x, keys[0]))

        return run

    keys = jax.random.split(jax.random.key(0), 3)
    compiled = jax.jit(jax.grad(loss(rematerialized))).lower(x).compile()
    calls = _num_calls(compiled, "forward"), _num_calls(compiled, "backward")
    if not scanned and forward_calls == 2:
        # XLA may find that the recomputation equals the first run and drop it; the program asks for two.
        jaxpr = str(jax.make_jaxpr(jax.grad(loss(rematerialized)))(x))
        assert jaxpr.count("custom_vmap_call[") == 3
        assert calls in ((1, 1), (2, 1))
    else:
        assert calls == (forward_calls, 1)
    assert_close(compiled(x), jax.jit(jax.grad(loss(layer)))(x))


def test_donation(implementation):
    q, k, v = qkv(Hv=8)
    attend = jax.jit(lambda q, k, v: jaxflash.attention(q, k, v, implementation=implementation), donate_argnums=0)
    expected = jaxflash.attention(q, k, v, implementation=implementation)
    donated = jnp.array(q)
    assert_close(attend(donated, k, v), expected, rtol=1e-6, atol=1e-6)
    assert donated.is_deleted()


def test_ahead_of_time(implementation):
    q, k, v = qkv()
    attend = jax.jit(lambda q, k, v: jaxflash.attention(q, k, v, implementation=implementation))
    compiled = attend.lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))).compile()
    assert_close(compiled(q, k, v), attend(q, k, v), rtol=1e-6, atol=1e-6)


def test_layouts_and_cotangents_that_are_not_contiguous(implementation):
    """BC-50 and BC-51: operands and cotangents that XLA would rather hold transposed or broadcast."""
    q, k, v = qkv(Hv=8)
    fused = normal(2, 9, 6, 3 * 8, seed=1)

    def attend(barrier):
        hold = jax.lax.optimization_barrier if barrier else lambda x: x

        def loss(fused, k_by_head, v):
            q = hold(fused[..., 8:16])
            k = hold(jnp.transpose(k_by_head, (0, 2, 1, 3)))
            out = jaxflash.attention(q, k, v, implementation=implementation)
            return jnp.sum(hold(jnp.transpose(out, (0, 2, 1, 3)))[:, ::2]) + jnp.sum(out)

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    arguments = (fused, jnp.transpose(k, (0, 2, 1, 3)), v)
    assert_close(attend(False)(*arguments), attend(True)(*arguments), rtol=1e-6, atol=1e-6)


EXPORTED = """
import sys, jax, numpy as np
import jaxflash
forward, gradient = (jax.export.deserialize(open(path, "rb").read()) for path in sys.argv[1:3])
saved = np.load(sys.argv[3])
q, k, v = saved["q"], saved["k"], saved["v"]
np.testing.assert_array_equal(forward.call(q, k, v), saved["out"])
for name, x in zip(("dq", "dk", "dv"), gradient.call(q, k, v)):
    np.testing.assert_array_equal(x, saved[name])
print("same bits")
"""


def test_export_round_trip_in_a_new_process(tmp_path):
    """BC-72: serialise forward and gradient, load them elsewhere, same bits."""
    q, k, v = qkv()
    forward = jax.jit(lambda q, k, v: jaxflash.attention(q, k, v, implementation="cpu", **OPTIONS))
    gradient = jax.jit(lambda q, k, v: jax.grad(_loss, (0, 1, 2))(q, k, v, **OPTIONS))
    paths = []
    for name, function in (("forward", forward), ("gradient", gradient)):
        exported = jax.export.export(function, disabled_checks=jaxflash.export_checks())(q, k, v)
        paths.append(tmp_path / name)
        paths[-1].write_bytes(exported.serialize())
    grads = dict(zip(("dq", "dk", "dv"), gradient(q, k, v), strict=True))
    np.savez(tmp_path / "arrays.npz", q=q, k=k, v=v, out=forward(q, k, v), **grads)
    run = subprocess.run(
        [sys.executable, "-c", EXPORTED, *map(str, paths), str(tmp_path / "arrays.npz")], capture_output=True, text=True
    )
    assert run.stdout.strip() == "same bits", run.stderr


def test_export_without_our_checks_is_refused_by_jax():
    q, k, v = qkv()
    attend = jax.jit(lambda q, k, v: jaxflash.attention(q, k, v, implementation="cpu"))
    with pytest.raises(ValueError, match="jaxflash_cpu_forward"):
        jax.export.export(attend)(q, k, v).serialize()


def test_export_with_symbolic_batch(implementation):
    q, k, v = qkv(B=4)
    (batch,) = jax.export.symbolic_shape("b")
    attend = jax.jit(lambda q, k, v: jaxflash.attention(q, k, v, is_causal=True, implementation=implementation))
    types = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, v)]
    exported = jax.export.export(attend, disabled_checks=jaxflash.export_checks())(*types)
    assert_close(exported.call(q, k, v), attend(q, k, v), rtol=1e-6, atol=1e-6)


FORWARD_MODE = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp_in_jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "jacfwd_in_jit": lambda f, x: jax.jit(jax.jacfwd(f))(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "grad_of_grad": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x),
    "jvp_of_grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    "jvp_of_vmap": lambda f, x: jax.jvp(jax.vmap(f), (jnp.stack([x, x]),), (jnp.stack([x, x]),)),
}


@pytest.mark.parametrize("mode", FORWARD_MODE)
def test_forward_mode_and_second_order_say_what_to_use(mode):
    q, k, v = qkv(B=1, T=2, S=3, N=2, K=1, H=2, Hv=2)
    with pytest.raises(NotImplementedError, match="use implementation='reference'"):
        FORWARD_MODE[mode](lambda q: _loss(q, k, v, "cpu"), q)
    finite = FORWARD_MODE[mode](lambda q: _loss(q, k, v, "reference"), q)
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(finite))


def test_reference_second_derivative_matches_finite_differences():
    q, k, v = qkv(B=1, T=2, S=3, N=2, K=1, H=2, Hv=2)
    with jax.enable_x64(True):
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        loss = lambda q: _loss(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), "reference")  # noqa: E731
        direction = np.random.default_rng(0).standard_normal(q.shape)
        gradient = jax.grad(loss)
        step = 1e-5
        expected = (gradient(jnp.asarray(q + step * direction)) - gradient(jnp.asarray(q - step * direction))) / (
            2 * step
        )
        _, actual = jax.jvp(gradient, (jnp.asarray(q),), (jnp.asarray(direction),))
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-8)


def test_same_dropout_under_every_transformation(kernel):
    """BC-58: one key gives one mask, other keys give other masks, in jit, scan and eager alike."""
    q, k, v = qkv()
    keys = jax.random.split(jax.random.key(5), 4)

    def attend(key):
        return jaxflash.attention(q, k, v, dropout_rate=0.5, dropout_key=key, implementation=kernel)

    eager = jnp.stack([attend(key) for key in keys])
    _, scanned = jax.lax.scan(lambda carry, key: (carry, attend(key)), 0, keys)
    assert_same_bits(scanned, eager)
    assert_same_bits(jax.vmap(attend)(keys), eager)
    assert_same_bits(jax.jit(attend)(keys[2]), eager[2])
    assert len({np.asarray(x).tobytes() for x in eager}) == len(keys)


def test_raw_and_typed_keys_agree(kernel):
    q, k, v = qkv()
    typed = jax.random.key(5)
    options = {"dropout_rate": 0.5, "implementation": kernel}
    assert_same_bits(
        jaxflash.attention(q, k, v, dropout_key=typed, **options),
        jaxflash.attention(q, k, v, dropout_key=jax.random.key_data(typed), **options),
    )


def test_threads_calling_at_once():
    """BC-64: first calls of many shapes from many threads, in a fresh process."""
    code = """
import threading, jax, numpy as np, jaxflash
rng = np.random.default_rng(0)
problems = [[rng.standard_normal((1, 5 + i, 2, 3 + i)).astype(np.float32) for _ in range(3)] for i in range(8)]
results = [[] for _ in problems]
start = threading.Barrier(len(problems))
def work(i):
    start.wait()
    for _ in range(25):
        results[i].append(np.asarray(jaxflash.attention(*problems[i], implementation="cpu")))
threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
[t.start() for t in threads]; [t.join(60) for t in threads]
for problem, outs in zip(problems, results):
    assert len(outs) == 25
    expected = jaxflash.attention(*problem, implementation="reference")
    for out in outs:
        np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_allclose(outs[0], expected, rtol=2e-5, atol=2e-5)
print("all right")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "all right", run.stderr
