"""The CPU kernel is compiled for several instruction sets; each must be right, whichever this machine would choose."""

import subprocess
import sys

import pytest

FUZZ = "import sys, pytest; from jaxflash import _C; print(_C.cpu_isa()); sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.skipif("not __import__('platform').machine() in ('x86_64', 'AMD64')", reason="other machines have one")
@pytest.mark.parametrize("isa", ["x86-64", "x86-64-v3"])
def test_lesser_instruction_set(isa, monkeypatch):
    monkeypatch.setenv("JAXFLASH_CPU_ISA", isa)
    run = subprocess.run(
        [sys.executable, "-c", FUZZ, "-q", "tests/test_fuzz.py", "--fuzz", "60", "--seed", "9000", "-k", "cpu"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.splitlines()[0] == isa
