"""One op to judge: the function that makes it, its arguments, and where it is known to differ from Shardy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from spmdctx.ir.rule import OpRule
from tests.rules.numeric_oracle import check
from tests.rules.shardy_oracle import disagreements


@dataclass(frozen=True)
class Case:
    """`args` are arrays, or shapes that are filled with normal floats.

    `op` is the one StableHLO op, with the `operands` and `results` of it that our equation has. `explained` are the sentences in
    which we and Shardy differ, and `also` the collectives that XLA needs beside all-reduces.
    """

    primitive: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    op: str = ""
    operands: tuple[int, ...] | None = None
    results: tuple[int, ...] | None = None
    explained: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    label: str = ""
    platform: str = "cpu"
    tolerance: float = 1e-5

    def __str__(self) -> str:
        return self.label or self.primitive

    def values(self) -> list[Any]:
        """The arguments as arrays, the same in every run."""
        generator = np.random.default_rng(0)
        return [jnp.asarray(generator.normal(size=arg), jnp.float32) if isinstance(arg, tuple) else arg for arg in self.args]

    def disagreements(self) -> list[str]:
        """What only one of Shardy's rule and ours splits."""
        own = {"primitive": self.primitive, "op": self.op, "operands": self.operands, "results": self.results, "platform": self.platform}
        return disagreements(self.function, *self.values(), **own)

    def check(self) -> OpRule:
        """Runs the op under every legal sharding; returns the rule."""
        return check(self.function, *self.values(), primitive=self.primitive, also=self.also, tolerance=self.tolerance)
