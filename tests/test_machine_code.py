"""Machine code of fa3: what overlaps in the source still does after ptxas.

ptxas moves the wait for a product above work that does not need its result, and that work then runs after the product
instead of beside it (docs/kernels/fa3_sm90.md). Needs nvcc.
"""

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT / "csrc" / "kernels" / "fa3_sm90"

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def instructions(template: str, kernel: str, folder: Path, **values: str) -> list[list[str]]:
    """Opcodes and operands, in order, of the instance's kernels of that name, for sm_90a."""
    text = (TEMPLATES / template).read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    source, cubin = folder / "instance.cu", folder / "instance.cubin"
    source.write_text(text)
    command = ["nvcc", "-std=c++17", "-O3", "-I", ROOT / "csrc", "-arch=sm_90a", "-cubin", source, "-o", cubin]
    subprocess.run(command, check=True, capture_output=True)
    files = importlib.metadata.files("nvidia-cuda-nvdisasm")
    nvdisasm = next(file.locate() for file in files if file.name == "nvdisasm")
    code = subprocess.run([nvdisasm, cubin], check=True, capture_output=True, text=True).stdout
    sections = re.findall(rf"\.section\s+\.text\.\S*{kernel}\S*,(.*?)(?=\.section|\Z)", code, re.DOTALL)
    return [re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([^;]+?)\s*;", section) for section in sections]


def between_waits(code: list[str]) -> list[list[str]]:
    """For each wait that leaves one product in flight: what comes before the next wait for all."""
    stretches, pending = [], None
    for instruction in code:
        if instruction.startswith("WARPGROUP.DEPBAR"):
            if pending is not None:
                stretches.append(pending)
            pending = [] if instruction.endswith("0x1") else None
        elif pending is not None:
            pending.append(instruction)
    return stretches


def exponentials_before_waits(code: list[str]) -> list[int]:
    return [sum(x.startswith("MUFU.EX2") for x in stretch) for stretch in between_waits(code)]


@pytest.fixture(scope="module", params=[(64, 128), (128, 128), (256, 80)], ids=lambda sizes: f"head dim {sizes[0]}")
def plain_forward(request, tmp_path_factory):
    """Keys of a block, and the code."""
    head_dim, keys = request.param
    size = str(head_dim)
    values = {"ELEMENT": "__nv_bfloat16", "HEAD_DIM": size, "HEAD_DIM_V": size, "FEATURES": "kPlain"}
    (code,) = instructions("instantiate.cu.in", "forward_kernel", tmp_path_factory.mktemp("forward"), **values)
    return keys, code


def test_softmax_runs_beside_the_product_of_the_block_before(plain_forward):
    keys, code = plain_forward
    counts = exponentials_before_waits(code)
    assert len(counts) == 2, "a step with masks and one without"
    assert min(counts) >= keys // 2, "all of 64 rows of scores in 128 threads"


def test_softmax_reads_few_registers(plain_forward):
    """One without masks. A third register in each scaling, or few reused operands, cost 7 % of the speed (H200)."""
    keys, code = plain_forward
    _, step = between_waits(code)
    scalings = [x for x in step if x.startswith("FFMA")]
    assert len(scalings) >= keys // 2
    registers = [len(re.findall(r"\bR\d+", x.split(",", 1)[1])) for x in scalings]
    assert sum(count > 2 for count in registers) <= 2, "the scale is a parameter or in a uniform register"
    assert sum(".reuse" in x for x in step) >= keys // 3


@pytest.mark.parametrize(("head_dim", "queries"), [(64, 128), (128, 64)])
def test_probabilities_of_the_backward_are_formed_beside_dp(tmp_path, head_dim, queries):
    kernels = instructions(
        "instantiate_backward.cu.in",
        "15backward_kernel",
        tmp_path,
        ELEMENT="__nv_bfloat16",
        CONFIG=f"BackwardConfig{head_dim}",
        FEATURES="kPlain",
    )
    assert len(kernels) == 2, "dQ added in any order and in turn"
    for code in kernels:
        steps = [count for count in exponentials_before_waits(code) if count >= queries // 2]
        assert len(steps) == 2, "the plain step and the masked one; extreme steps overlap nothing"
