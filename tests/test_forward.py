"""Outputs and lse without differentiation, on every case, against the float64 reference."""

import cases
import pytest

# The reference runs the same code forward as in test_backward.py, which compares out and lse too.
TRIPLES = [triple for triple in cases.triples(every_dtype=("cpu",)) if triple[0] != "reference"]


@pytest.mark.parametrize("triple", TRIPLES, ids=cases.triple_id)
def test_out_and_lse(triple):
    implementation, case, dtype = triple
    cases.check(implementation, cases.build(case, dtype), gradients=False)
