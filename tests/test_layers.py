"""The arrows of docs/design.md in csrc/: includes point down only. pyproject.toml has the import contract."""

import re
from pathlib import Path

import pytest

from jaxflash._backends import ffi

ROOT = Path(__file__).parent.parent

# Lowest first; a file may include its own folder and those below.
KERNELS = ["kernels/cpu", "kernels/fa1_sm80", "kernels/fa2_sm80", "kernels/fa3_sm90"]
CSRC_LAYERS = ["base", "ptx", "mma", "device", *KERNELS, "launch", "ffi", "."]
CSRC_TOP_FILES = {"params.h": "base", "module.cc": "."}  # params.h is plain data that every layer may read


def test_only_the_backend_imports_the_extension():
    """The import contract in pyproject.toml does not see compiled modules."""
    importers = [
        path for path in (ROOT / "jaxflash").rglob("*.py") if re.search(r"import jaxflash\._C\b", path.read_text())
    ]
    assert [path.name for path in importers] == ["ffi.py"]


def test_only_public_jax():
    """The import contract does not see submodules of other packages."""
    private = [p.name for p in (ROOT / "jaxflash").rglob("*.py") if re.search(r"jax(lib)?\._src", p.read_text())]
    assert private == []


def _csrc_layer(path: Path) -> str:
    relative = path.relative_to(ROOT / "csrc").as_posix()
    if relative in CSRC_TOP_FILES:
        return CSRC_TOP_FILES[relative]
    return next(layer for layer in CSRC_LAYERS if relative.startswith(layer + "/"))


SOURCES = sorted(
    p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cc", ".cuh", ".cu", ".in"} and p.is_file()
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_includes_point_down(path):
    own = CSRC_LAYERS.index(_csrc_layer(path))
    for include in re.findall(r'^\s*#include "([^"]+)"', path.read_text(), re.MULTILINE):
        if include.startswith("xla/ffi/"):
            assert _csrc_layer(path) in ("ffi", "."), f"{path.name} includes {include}; only ffi/ knows XLA"
            continue
        target = ROOT / "csrc" / include
        assert target.exists(), f"{path} includes {include}, which is not written relative to csrc/"
        assert CSRC_LAYERS.index(_csrc_layer(target)) <= own, f"{path.name} includes {include}, which is above it"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_commented_out_code(path):
    dead = re.findall(r"^\s*//.*;\s*$", path.read_text(), re.MULTILINE)
    assert dead == []


def test_every_handler_may_be_captured_in_a_command_buffer():
    text = "".join(path.read_text() for path in (ROOT / "csrc" / "ffi").iterdir())
    definitions = re.findall(r"XLA_FFI_DEFINE_HANDLER_SYMBOL\((\w+),(.*?)\}?\);?\n(?=\n|JF|XLA)", text, re.DOTALL)
    of_macro = re.findall(r"^JF_CUDA_HANDLER\((\w+),", text, re.MULTILINE)
    names = {name for name, _ in definitions} | set(of_macro)
    assert set(ffi.targets()) <= names  # without CUDA, its handlers are not built
    for name, definition in definitions:
        assert "{xla::ffi::Traits::kCmdBufferCompatible" in definition, name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_handlers_neither_allocate_arrays_nor_wait(path):
    """All memory in proportion to the problem is XLA's; a handler that waits could starve the pool it runs on."""
    forbidden = r"\b(malloc|calloc|new float|aligned_alloc|cudaMalloc\w*|cudaStreamSynchronize|cudaDeviceSynchronize)\b"
    forbidden += r"|\.wait\(|\.join\(|condition_variable|sleep_for"
    assert re.findall(forbidden, path.read_text()) == []
