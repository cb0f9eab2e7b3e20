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


@pytest.fixture(params=["reference", "cpu"])
def implementation(request):
    """Each implementation that runs on a CPU; a missing compiled library is a failure, not a skip."""
    return request.param
