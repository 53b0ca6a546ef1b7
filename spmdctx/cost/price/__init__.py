"""The bill of an assignment (collectives, seconds, memory), and the directives that lowering writes besides shardings."""

from spmdctx.cost.price.price import price as price
