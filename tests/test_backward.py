"""Outputs and gradients, through out and through lse, on every case, against the float64 reference."""

import cases
import pytest


@pytest.mark.parametrize("triple", cases.triples(every_dtype=("cpu",)), ids=cases.triple_id)
def test_gradients(triple):
    implementation, case, dtype = triple
    cases.check(implementation, cases.build(case, dtype))
