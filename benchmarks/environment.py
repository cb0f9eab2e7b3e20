"""The facts without which a measured number means nothing: machine, versions, commit, date."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import jax
import jaxlib

import jaxflash
from jaxflash._backends import ffi


def describe() -> dict[str, object]:
    """What is recorded beside every result, ready for JSON."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
        "cpu_model": cpu_model(),
        "cores": core_count(),
        "load_average": round(os.getloadavg()[0], 2),  # other work beside a measurement spoils it
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "jaxflash": jaxflash.__version__,
            **cuda_versions(),
        },
        "git_commit": git_commit(),
    }


def cuda_versions() -> dict[str, str]:
    """Of the driver and of what jaxflash's CUDA kernels were built with; empty without a GPU."""
    if jax.default_backend() != "gpu":
        return {}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {"driver": driver, "jaxflash_cuda": ffi.build_info()["cuda"]}


def device_slug(environment: dict) -> str:
    """The device's name for a file name: the accelerator's kind, or the processor's model."""
    device = environment["device"]
    name = environment["cpu_model"] if device["platform"] == "cpu" else device["kind"]
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")


def cpu_model() -> str:
    """The processor's name as the operating system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def core_count() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git_commit() -> str | None:
    """The commit of the checkout that this file lies in, "-dirty" appended if files differ from it; None outside."""

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
