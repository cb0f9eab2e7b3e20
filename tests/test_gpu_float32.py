"""float32 on the GPU: as close to float64 as products on tensor cores must come, whatever the options."""

import cases
import jax
import numpy as np
import oracle
import pytest
from arrays import assert_same_bits
from test_gpu import adapted, check_seeds

pytestmark = pytest.mark.gpu

BAR = 1e-5  # ||x - ref|| / ||ref||, float64 from the same inputs
SEEDS = 200
SEEDS_PER_TEST = 25
CLOSE = {
    "64": {"H": 64},
    "128-causal": {"H": 128, "is_causal": True},
    "256-causal": {"H": 256, "is_causal": True},
    "256": {"H": 256, "T": 200, "S": 333},
    "odd-unequal-heads": {"H": 33, "Hv": 129, "causal_alignment": "bottom_right", "is_causal": True},
    "bias": {"H": 80, "bias": (1, 4, 640, 640)},
    "bias-broadcast": {"H": 128, "bias": (2, 1, 1, 640), "logits_soft_cap": 20.0},
    "bias-256": {"H": 256, "bias": (2, 4, 640, 1)},
    "mean-of-values": {"H": 64, "shift": 3.0},
    "long-rows": {"H": 64, "T": 64, "S": 16_384, "shift": 3.0},
    "long-columns": {"H": 64, "T": 16_384, "S": 64, "dout_shift": 3.0},
    "large-logits": {"H": 64, "size": 2.0},
    "dropout": {"H": 64, "dropout_key": jax.random.key(5), "dropout_rate": 0.2},
}


def relative_error(got, right) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - right) / np.linalg.norm(right))


def close_problem(H, Hv=None, T=640, S=640, size=1.0, shift=0.0, dout_shift=0.0, bias=None, **options) -> cases.Problem:
    """size: factor on q and k, so that logits are of order size^2; shifts: added to every value and cotangent."""
    arrays = cases.qkv(1, 2, T, S, 4, 2, H, Hv)
    arrays |= {name: np.float32(size) * arrays[name] for name in ("query", "key")}
    arrays["value"] += np.float32(shift)
    if bias is not None:
        arrays["bias"] = cases.normal(9, *bias)
    if "dropout_key" in options:
        arrays["dropout_key"] = options.pop("dropout_key")
    problem = cases.problem(arrays, seed=3, **options)
    problem.dout += np.float32(dout_shift)
    return problem


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])
@pytest.mark.parametrize("sizes", CLOSE.values(), ids=CLOSE)
def test_close_to_float64(sizes, deterministic):
    problem = close_problem(**sizes)
    baseline, right = cases.expected(problem)
    got = cases.forward_and_gradients("fa2", problem, deterministic=deterministic)
    errors = {name: relative_error(x, right.named()[name]) for name, x in got.items()}
    assert not {name: error for name, error in errors.items() if not error <= BAR}, errors
    oracle.assert_no_worse_than(got, baseline, right)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_table(case):
    cases.check("fa2", cases.build(adapted("fa2", case), "float32"))


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_random_problems(first):
    check_seeds("fa2", range(first, first + SEEDS_PER_TEST), ("float32",))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_repeats_bit_for_bit(head_dim):
    problem = cases.problem(cases.qkv(7, 2, 333, 517, 4, 2, head_dim), is_causal=True)
    first = cases.forward_and_gradients("fa2", problem, deterministic=True)
    for _ in range(3):
        again = cases.forward_and_gradients("fa2", problem, deterministic=True)
        assert_same_bits(jax.tree.leaves(again), jax.tree.leaves(first))


@pytest.mark.parametrize("size", [1e-12, 1e9])
def test_any_magnitude(size):
    """The split into two TF32 numbers has float32's range: values of any size keep the relative error."""
    problem = close_problem(H=64, T=100, S=100)
    problem.arrays["value"] = problem.arrays["value"] * np.float32(size)
    _, right = cases.expected(problem, gradients=False)
    assert relative_error(cases.forward("fa2", problem)["out"], right.out) <= BAR
