"""The bill of an assignment, and the directives that a program follows besides its shardings."""

from spmdctx.cost.price.price import price as price
