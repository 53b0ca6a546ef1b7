"""`lower`, `trace`, `eval_shape` and `out_shardings`, as the functions of `jax.jit` have them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from spmdctx.step.direct.tracebacks import ShortTracebacks

if TYPE_CHECKING:
    from spmdctx.step.entry import Entry


class JitMethods:
    """What can be asked of a step, as of a function of `jax.jit`; arguments are real or abstract (`jax.ShapeDtypeStruct`)."""

    @abstractmethod
    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, Sequence[Any]]:
        """Returns the entry of these arguments, called from a method that the user has called, and their leaves."""

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step's program with JAX; `.compile()` compiles it once for this, the audit and the calls.

        The program takes the step's own positional arguments. If the step has nnx objects or keyword arguments, it takes their
        flat leaves.

        A step on a pipeline answers with a `LoweredPipeline`: a mapping with one `jax.stages.Lowered` for each stage and kind of task.
        """
        with ShortTracebacks():
            entry, leaves = self._ready(args, kwargs)
            return entry.lower(leaves)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces the step's program with JAX: `.jaxpr` has the plan's constraints, `.out_info` the results, and `.lower()` lowers it.

        The program takes what that of `lower` takes.

        Raises:
            UnsupportedError: a step on a pipeline, which has several programs.
        """
        with ShortTracebacks():
            entry, leaves = self._ready(args, kwargs)
            return entry.trace(leaves)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the step's result with a `jax.ShapeDtypeStruct` for each array; `out_shardings` tells how these are split."""
        with ShortTracebacks():
            entry, _ = self._ready(args, kwargs)
            avals = entry.captured.jaxpr.out_avals
            return entry.structure.outputs([jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type) for one in avals])

    def out_shardings(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a NamedSharding for each leaf of the step's result."""
        with ShortTracebacks():
            entry, _ = self._ready(args, kwargs)
            return entry.structure.outputs(entry.program.out_shardings)
