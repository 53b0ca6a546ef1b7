"""Names of primitives that the noise knows: all are JAX's, or this package's own."""

from __future__ import annotations

import pytest

from spmdctx.ir.primitives import LOSS, MARKER
from spmdctx.step.verify.noise import primitives
from tests.rules.test_coverage import known_primitives


@pytest.mark.parametrize("name", ["EXACT", "SUMMING", "WIDENED", "PRODUCTS", "ADDING", "REPORTS"])
def test_every_name_is_that_of_a_primitive(name):
    assert getattr(primitives, name) <= {*known_primitives(), LOSS, MARKER}
