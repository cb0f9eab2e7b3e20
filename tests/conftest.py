"""Test configuration: 8 virtual CPU devices, and options for the fuzz and GPU tests."""

import os

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


@pytest.fixture(params=["reference", "cpu"])
def implementation(request):
    """Each implementation that runs on a CPU; a missing compiled library is a failure, not a skip."""
    return request.param
