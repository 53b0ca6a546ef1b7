"""Builds the equations of one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc

from spmdctx.ir.graph import Op, item_bytes
from spmdctx.ir.projection import partial_axes
from spmdctx.ir.sharding import TensorSharding
from spmdctx.lowering.rewrite.buckets import Sum, separate_buckets
from spmdctx.lowering.rewrite.equations import barrier_of, repetition
from spmdctx.lowering.rewrite.precision import cast
from spmdctx.lowering.rewrite.values import ShardedProgram, Values
from spmdctx.machine.reshard import reshard_steps
from spmdctx.machine.xla.partitioner.repetition import whole
from spmdctx.trace.build.jaxprs.equations import struct_of
from spmdctx.trace.specs import named_sharding
from spmdctx.wording.warned import warn_user


class Constraints:
    """Makes the equations that constrain variables, at the source line that is being rewritten (`source_info`)."""

    def __init__(self, sharded: ShardedProgram) -> None:
        self._sharded = sharded
        self._templates: dict[Any, Any] = {}
        self.source_info: Any = None

    def equation(self, source: Any, target: Any, sharding: TensorSharding) -> Any:
        """Returns an equation that constrains `source` to `sharding` and calls the result `target`."""
        aval = source.aval
        key = (aval.shape, aval.dtype, aval.weak_type, sharding)
        template = self._templates.get(key)
        if template is None:
            named = named_sharding(self._sharded.jax_mesh, sharding)
            template = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, named))(struct_of(aval)).jaxpr.eqns[0]
            self._templates[key] = template
        return template.replace(invars=[source], outvars=[target], source_info=self.source_info)

    def steps(self, value: int, source: TensorSharding, target: TensorSharding) -> list[TensorSharding]:
        """Returns the shardings that a value passes through between two shardings."""
        if source == target:
            return []
        known, sharded = self._sharded.program.graph.values[value], self._sharded
        steps = reshard_steps(known.shape, item_bytes(known.dtype), source, target, sharded.mesh, sharded.directives.all_to_all)
        return [step.sharding for step in steps]


class Block:
    """The equations of one body under construction, and the reshards already written in it.

    A body that is dissolved into `outer` writes there, and shares no reshards with it.
    """

    def __init__(self, constraints: Constraints, sharded: ShardedProgram, values: Values, outer: Block | None = None) -> None:
        self.eqns: list[Any] = [] if outer is None else outer.eqns
        self._sums: dict[int, Any] = {} if outer is None else outer._sums
        self._reduced: dict[int, Any] = {} if outer is None else outer._reduced
        self.wide: dict[Any, Any] = {}
        self._constraints, self._sharded, self._values = constraints, sharded, values
        self._done: dict[tuple[Any, TensorSharding], Any] = {}
        # The equations that compute values inside their readers' fusions, and the slices of such values.
        self.recipes: dict[int, tuple[Op, Any, list[Any]]] = {}
        self.slices: dict[tuple[int, TensorSharding], Any] = {}
        self._repeated: dict[tuple[Any, tuple[int, ...]], Any] = {}

    def narrowed(self, var: Any, dtype: Any) -> Any:
        """Returns a float32 variable cast to a type; readers that can take it as it is find it in `wide`."""
        if var.aval.dtype == dtype:
            return var
        self.eqns.append(cast(var, dtype, self.eqns[-1].source_info))
        narrow = self.eqns[-1].outvars[0]
        self.wide[narrow] = var
        return narrow

    def note(self, op: Op, eqn: Any, results: Sequence[Any]) -> None:
        """Remembers what an op makes if it belongs to a bucket."""
        axes = self._sharded.assignment.ops[op.id].axes
        for value, var in zip(op.results, results, strict=True):
            record = self._values[value]
            if record.is_partial:
                continue
            if record.is_grouped and partial_axes(op.rule, axes):
                self._sums[value] = eqn
            if record.is_grouped or record.is_carrier:
                self._reduced[value] = var

    def note_total(self, value: int, eqn: Any, var: Any) -> None:
        """Remembers the total of a loop."""
        if self._values.bucket(value) is not None:
            self._sums[value], self._reduced[value] = eqn, var

    def write(self, made: tuple[list[Any], Any]) -> Any:
        """Appends equations; returns the variable of their result."""
        self.eqns += made[0]
        return made[1]

    def finish(self, outputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the equations and results of the body, its buckets kept apart by barriers."""
        sums = []
        for value, eqn in self._sums.items():
            reduced = self._reduced.get(self._values.carriers.get(value, value), self._reduced[value])
            sums.append(Sum(self._values.bucket(value) or 0, eqn, reduced))
        if not sums:
            return self.eqns, outputs
        separated = separate_buckets(self.eqns, outputs, sums)
        for bucket in separated.joined:
            text = f"Buckets {bucket} and {bucket + 1} of gradients are reduced together: one is computed from the other."
            warn_user(text)
        return separated.eqns, separated.outputs

    def constrain(self, var: Any, sharding: TensorSharding) -> Any:
        """Returns `var` constrained to `sharding`; the constraint is written once."""
        if isinstance(var, jexc.Literal) or not sharding or not _is_tensor(var):
            return var
        known = self._done.get((var, sharding))
        if known is None:
            known = self._done[var, sharding] = jexc.Var(var.aval)
            # A second constraint on the result would make a chain: the partitioner gives the end of a chain to all readers of its start.
            self._done[known, sharding] = known
            self.eqns.append(self._constraints.equation(var, known, sharding))
        return known

    def part(self, var: Any) -> Any:
        """Returns `var` behind a barrier: it is made before anything is computed from it."""
        behind = jexc.Var(var.aval)
        return self.write(([barrier_of([var], [behind], self.eqns[-1].source_info)], behind))

    def repeat(self, var: Any, made: TensorSharding, eqn: Any) -> Any:
        """Returns `var` repeated to the shape of an equation's result: whole at first, and then split as `made`, like the result."""
        shape = eqn.outvars[0].aval.shape
        known = self._repeated.get((var, shape))
        if known is None:
            written = repetition(var, shape, eqn.source_info)
            known = self._repeated[var, shape] = self.write(([written], written.outvars[0]))
        return self.constrain(self.constrain(known, whole(made, var.aval.shape, shape)), made)

    def reshard(self, var: Any, value: int, source: TensorSharding, target: TensorSharding) -> Any:
        """Returns `var` taken from one sharding to the other, with one constraint per step."""
        for sharding in self._constraints.steps(value, source, target):
            var = self.constrain(var, sharding)
        return var


def _is_tensor(var: Any) -> bool:
    return bool(getattr(var.aval, "shape", ())) and hasattr(var.aval, "weak_type")
