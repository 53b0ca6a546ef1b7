"""XLA reduces in place, gathers inside of products, and scatters some products later."""

from __future__ import annotations

MOST_HIDING = 3
"""Products that a gather is fused with at most."""

PRODUCTS_WAITED = 12
"""Products that others need, behind which a gradient waits for its reduce_scatter."""
