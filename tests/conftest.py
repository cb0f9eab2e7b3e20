"""Test configuration: 8 virtual CPU devices, and options for the fuzz and GPU tests."""

import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the suite's time, and most programs run once.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=None, help="number of fuzz configurations (default: CI's)")
    parser.addoption("--seed", type=int, default=0, help="first seed of the fuzz tests")
    parser.addoption("--require-gpu", action="store_true", help="a test that needs a GPU fails without one")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: runs kernels on an NVIDIA GPU (set JAX_PLATFORMS=cuda,cpu)")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None or jax.default_backend() == "gpu":
        return
    reason = f"needs an NVIDIA GPU, JAX runs on {jax.default_backend()!r} (JAX_PLATFORMS={os.environ['JAX_PLATFORMS']})"
    (pytest.fail if item.config.getoption("--require-gpu") else pytest.skip)(reason)


# What runs on a GPU alone. A call that such an implementation refuses is skipped with its reason, never passed; what
# each of them must run is in tests/test_gpu.py.
GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("fa3", "fa2", "fa1")]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except NotImplementedError as error:
        refusal = re.match(r"implementation='(fa\d)' does not run this call\. (.*?)(; |\. These)", str(error))
        if refusal is None or pyfuncitem.get_closest_marker("gpu") is None:
            raise
        pytest.skip(refusal[2])


@pytest.fixture(params=["reference", "cpu", *GPU])
def implementation(request):
    """Each implementation; a missing compiled library is a failure, not a skip."""
    return request.param


@pytest.fixture(params=["cpu", *GPU], scope="session")
def kernel(request):
    """Each compiled implementation, for what the reference compiles too slowly or does not promise."""
    return request.param
