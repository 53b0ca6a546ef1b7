"""Prices an assignment: every collective that it implies, with its cause; compute and peak memory. Knows no search."""

from spmdctx.cost.price.price import price as price
