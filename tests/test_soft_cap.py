"""The quotient of polynomials that fa3's forward takes for tanh, evaluated as the kernel does it."""

import re
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent.parent / "csrc" / "device" / "soft_cap.cuh"


def coefficients(name: str) -> list[float]:
    (text,) = re.findall(rf"{name}\[\] = {{(.*?)}}", SOURCE.read_text(), re.DOTALL)
    return [float(number.rstrip("f")) for number in text.split(",")]


def polynomial(name: str, x: np.ndarray) -> np.ndarray:
    """By Horner's rule; each step is rounded once, as an fma is."""
    *lower, value = coefficients(name)
    for coefficient in reversed(lower):
        value = np.float32(np.float64(value) * x + np.float32(coefficient))
    return value


def test_tanh_quotient_has_the_error_it_claims():
    y = np.concatenate([np.linspace(1e-3, 12, 3_000_001), np.logspace(-6, 0, 1_000_000)]).astype(np.float32)
    clamped = np.minimum(y, np.float32(8.6))
    square = clamped * clamped
    quotient = clamped * polynomial("kAbove", square) * (1 / polynomial("kBelow", square))
    expected = np.tanh(y.astype(np.float64))
    of_reciprocal = 2.0**-24  # more than in a rounded division: rcp.approx is within 1 ulp
    assert np.max(np.abs(quotient - expected) / expected) + of_reciprocal < 4.5e-7
