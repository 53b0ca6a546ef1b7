"""What a search proved, as a bound of the plan's own price."""

import pytest

from spmdctx.search.dynamic.certificate import Certificate, gap_of


@pytest.mark.parametrize(
    ("certificate", "bound_s", "says"),
    [
        (Certificate(0.9, 1.0), 0.9, ""),
        (Certificate(0.9, 0.95), 0.9, ""),
        (Certificate(1.02, 1.02), 1.0, "2.0% more"),
        (Certificate(1.01, 1.02), 0.99, "2.0% more"),
        (Certificate(1.0002, 1.0005), 0.9997, ""),
        (Certificate(0.9), 0.9, ""),
    ],
)
def test_a_bound_is_lowered_by_what_the_search_counted_too_much_for_the_plan(certificate, bound_s, says):
    lowered_s, note = certificate.of_price(1.0)
    assert lowered_s == pytest.approx(bound_s, abs=1e-12)
    assert says in note
    assert bool(note) == bool(says)


def test_no_bound_is_negative():
    assert Certificate(1.0, 9.0).of_price(1.0)[0] == 0.0


def test_a_gap_is_zero_where_only_the_order_of_additions_differs():
    assert gap_of(1.0 + 1e-12, 1.0) == 0.0
    assert gap_of(1.1, 1.0) == pytest.approx(0.1)
    assert gap_of(0.0, 0.0) == 0.0
