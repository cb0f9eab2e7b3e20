"""Documentation that can go stale: argument lists, README code, the support matrix."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxflash

ROOT = Path(__file__).parent.parent
FUNCTIONS = [jaxflash.attention, jaxflash.flash_mha, jaxflash.flash_mha_varlen]


def _documented_arguments(function) -> list[str]:
    text = inspect.getdoc(function)  # without the indentation that Python up to 3.12 keeps
    section = re.search(r"\nArgs:\n(.*?)\n\n", text, re.DOTALL)[1]
    return re.findall(r"^  (\w+):", section, re.MULTILINE)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_argument_is_documented_in_order(function):
    assert _documented_arguments(function) == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_docstrings_have_every_section(function):
    for section in ("Args:", "Returns:", "Raises:", "Source:"):
        assert section in function.__doc__
    assert "ifferentiable" in function.__doc__


def test_attention_takes_every_argument_of_jax_nn():
    """The drop-in promise, on the installed JAX."""
    import jax

    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(jaxflash.attention).parameters
    for name, parameter in theirs.items():
        assert name in ours, f"jax.nn.dot_product_attention takes {name}"
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default


def test_readme_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["out"].shape == namespace["query"].shape
    assert namespace["layer"](namespace["query"].reshape(2, 1024, 512)[:, :16], decode=False).shape == (2, 16, 512)


def test_support_matrix_is_up_to_date():
    run = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "support_matrix.py"), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_import_is_light():
    """No Flax, and under half a second on top of JAX."""
    code = """
import sys, time
import jax, jax.numpy, jax.export
start = time.perf_counter()
import jaxflash
print(time.perf_counter() - start, "flax" in sys.modules)
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    seconds, flax = min(run.stdout.split() for run in runs)
    assert float(seconds) < 0.5
    assert flax == "False"


def test_relative_links_exist():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for name in re.findall(r"`((?:docs|tests|csrc|jaxflash|benchmarks|examples)/[\w./]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
