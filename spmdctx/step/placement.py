"""Places data as a plan wants it: state that is initialized already split, and batches of one process or of the whole job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.extend.core as jexc
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdctx.data.blocks import Piece, assemble
from spmdctx.data.lazy import is_read_by_blocks, reader
from spmdctx.data.targets import Leaf, Targets
from spmdctx.errors import PlanError, PlanMismatchError, StrategyError
from spmdctx.ir.graph import Role
from spmdctx.ir.mesh import replicated
from spmdctx.pipeline.run.routes import without_shards
from spmdctx.plan.mismatch import differences_text, leaf_differences
from spmdctx.plan.plan import Plan
from spmdctx.step.agreement import spans_processes
from spmdctx.step.direct.donation import check_alive
from spmdctx.step.entry import Entry
from spmdctx.step.processes import on_all
from spmdctx.step.state_call import after_known, with_batch
from spmdctx.trace.build.jaxprs.equations import struct_of
from spmdctx.trace.capture.arguments import NO_STATIC, Call, Static, split_static
from spmdctx.trace.capture.capture import Captured, capture_call, flattening_of, leaf_paths
from spmdctx.trace.capture.structure import Read
from spmdctx.trace.capture.target import Target, target_of
from spmdctx.trace.flax_modules import nnx
from spmdctx.trace.scope.mesh import auto_axes
from spmdctx.trace.specs import make_mesh, named_sharding


def abstract_call(entry: Entry, static: Static) -> Call:
    """Returns the user's call for which an entry was made, with shapes and dtypes for arrays; nnx objects appear as states."""
    args, kwargs = entry.structure.inputs([struct_of(aval) for aval in entry.captured.in_avals])
    return static.join(args, kwargs)


def arguments_tree(entry: Entry, leaves: Sequence[Any], num_leading: int) -> tuple[Any, ...]:
    """Returns one tree for each dynamic argument of the user's call with `leaves` in it; keyword arguments follow as one dict."""
    args, kwargs = entry.structure.inputs(list(leaves))
    return (*args[num_leading:], kwargs) if kwargs else tuple(args[num_leading:])


class Init:
    """An initialiser whose result is the state of a step."""

    def __init__(self, init_fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        target = target_of(init_fn)
        self._call: Call = ((*target.leading, *args), {})
        with _no_eager_sharding():
            self._captured: Captured = capture_call(target, self._call, NO_STATIC)
        avals = self._captured.jaxpr.out_avals
        self._abstract = [struct_of(aval) for aval in avals]
        self._result = self._finish(self._abstract)

    def arguments(self, target: Target, batch: Any, known: Call | None) -> Call:
        """Returns the abstract arguments of the step: its state as the initialiser makes it, then the batch.

        Args:
            target: the step.
            batch: its other arguments, or None.
            known: an earlier call, whose first arguments the state replaces if no batch is given.

        Raises:
            PlanError: no batch is given and none is known, or state and batch do not make up the step's arguments.
        """
        states = [(self._result,)]
        if type(self._result) is tuple:
            states.append(self._result)
        if batch is not None:
            batches = [(batch,), tuple(batch)] if type(batch) in (tuple, list) else [(batch,)]
            return with_batch(target, [(state, rest) for rest in batches for state in states], known)
        if known is None:
            raise PlanError(
                "init needs a batch to plan for: no call was planned yet.",
                fix="pass batch=, arrays or jax.ShapeDtypeStruct, or load a saved plan with strategy_ckpt_load_file",
            )
        return after_known(target, states, known)

    def run(self, entry: Entry, call: Call) -> Any:
        """Makes the state, with each leaf split as the step takes it; leaves that the step does not take are replicated."""
        entry.environment.check_running()
        entry.agreed  # noqa: B018  before anything runs
        taken = zip(flattening_of(call).leaves, entry.program.in_shardings, strict=True)
        return self._place({id(leaf.value): sharding for leaf, sharding in taken}, entry.program.mesh)

    def run_as_saved(self, plan: Plan, target: Target, devices: Sequence[Any], where: str) -> Any:
        """Makes the state as a saved plan splits the step's first arguments.

        Raises:
            PlanMismatchError: the plan has no leaf of that path, shape and dtype.
        """
        saved = {tensor.path: tensor for tensor in plan.inputs}
        found: list[str] = []
        for state in [(self._result,), *([self._result] if type(self._result) is tuple else [])]:
            own = [*target.leading, *state]
            for place in sorted(target.static.positions):
                if place <= len(own):
                    own.insert(place, None)  # no path has the value of a static argument
            call, static = split_static(target.static, tuple(own), {})
            leaves = flattening_of(call).leaves
            here = [
                (path, tuple(leaf.value.shape), str(leaf.value.dtype))
                for path, leaf in zip(leaf_paths(target, call, static), leaves, strict=True)
            ]
            known = [saved[path] for path, _, _ in here if path in saved]
            found = list(leaf_differences([(leaf.path, leaf.shape, leaf.dtype) for leaf in known], here))
            if not found:
                mesh = make_mesh(plan.logical_mesh, devices)
                pairs = zip(leaves, here, strict=True)
                return self._place({id(leaf.value): named_sharding(mesh, saved[path].sharding) for leaf, (path, _, _) in pairs}, mesh)
        raise PlanMismatchError(
            f"What init makes is not what the saved plan of {target.name} takes.", where=where, got=differences_text(found[:4])
        )

    def _place(self, targets: Mapping[int, NamedSharding], mesh: Mesh) -> Any:
        shardings = [targets.get(id(leaf), named_sharding(mesh, replicated(len(leaf.shape)))) for leaf in self._abstract]
        leaves = self._read().leaves
        check_alive(self._captured, leaves)
        with auto_axes():
            return self._finish(self._made(leaves, shardings, spans_processes(mesh.devices.flat)))

    def _made(self, leaves: Sequence[Any], shardings: Sequence[NamedSharding], spread: bool) -> list[Any]:
        """Returns the state's leaves; each group of devices, of which a pipeline has several, makes its own.

        Of a group of other processes this one gets arrays without a part of its own.
        """
        closed, found, given = self._captured.jaxpr, list[Any](shardings), leaves
        groups: dict[Any, list[int]] = {}
        for index, sharding in enumerate(shardings):
            groups.setdefault(frozenset(sharding.device_set), []).append(index)
        for own in groups.values():
            if spread:
                if not shardings[own[0]].addressable_devices:
                    found = [without_shards(closed.out_avals[index], one) if index in own else one for index, one in enumerate(found)]
                    continue
                leaves = [on_all(leaf, NamedSharding(shardings[own[0]].mesh, PartitionSpec())) for leaf in given]
            jaxpr = closed.jaxpr.replace(
                outvars=[closed.jaxpr.outvars[index] for index in own],
                debug_info=closed.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
            )
            run = jax.jit(jexc.jaxpr_as_fun(jexc.ClosedJaxpr(jaxpr, closed.consts)), out_shardings=[shardings[index] for index in own])
            for index, made in zip(own, run(*leaves), strict=True):
                found[index] = made
        return found

    def _read(self) -> Read:
        read = self._captured.structure.read(self._call)
        assert read is not None, "a structure reads the call it was made from"
        return read

    def _finish(self, leaves: Sequence[Any]) -> Any:
        with _no_eager_sharding():
            return self._captured.structure.finish(self._read().handle, leaves)


def _no_eager_sharding() -> AbstractContextManager[Any]:
    """Keeps nnx from placing annotated variables on the current mesh, since the plan places them."""
    scope: AbstractContextManager[Any] = nnx.use_eager_sharding(False)
    return scope


def batch_targets(entry: Entry | None, *, whole: bool) -> Targets:
    """Returns the targets of a planned step's batch arguments in order; these are the arguments with batch leaves.

    Args:
        entry: the planned step.
        whole: whether each process has the whole batch.

    Raises:
        PlanError: nothing is planned.
    """
    if entry is None:
        raise PlanError("The batch cannot be placed: nothing was planned yet.", fix="call step.plan, step.init or the step first")
    inputs, shardings = entry.captured.inputs, entry.program.in_shardings
    # NumPy has no type for random keys.
    dtypes = [np.dtype(object if leaf.dtype.startswith("key<") else leaf.dtype) for leaf in inputs]
    leaves = [Leaf(leaf.path, own, leaf.shape, dtype) for leaf, own, dtype in zip(inputs, shardings, dtypes, strict=True)]
    roles, names = entry.structure.inputs([leaf.role for leaf in inputs])
    places, named = entry.structure.inputs(leaves)
    pairs = [*zip(roles, places, strict=True), *((names[name], named[name]) for name in names)]
    arguments = tuple(own for role, own in pairs if Role.BATCH in jax.tree.leaves(role))
    return Targets(arguments, tuple(jax.tree.leaves(arguments)), whole)


def shard_batch(batch: Any, targets: Targets) -> Any:
    """Places one batch argument of the step, or a tuple of all of them.

    Raises:
        PlanError: the plan has no such batch.
        StrategyError: a dimension does not divide.
    """
    found = targets.match(batch)
    placed = [_place(value, leaf, whole=targets.whole) for value, leaf in zip(found.values, found.leaves, strict=True)]
    return jax.tree.unflatten(found.structure, placed)


def _place(value: Any, leaf: Leaf, *, whole: bool) -> Any:
    sharding = leaf.sharding
    try:
        if is_read_by_blocks(value):
            sharding.shard_shape(value.shape)
            return assemble([Piece(value.shape, sharding, reader(value, None))])[0]
        if jax.process_count() == 1:
            sharding.shard_shape(np.shape(value))
            return jax.device_put(value, sharding)
        if whole:
            array = np.asarray(value)
            sharding.shard_shape(array.shape)
            return assemble([Piece(array.shape, sharding, reader(array, None))])[0]
        return jax.make_array_from_process_local_data(sharding, np.asarray(value))
    except StrategyError:
        raise
    except (ValueError, IndexError) as error:
        # IndexError: the leaf has fewer dimensions than the plan splits.
        raise StrategyError(
            f"Batch leaf '{leaf.path}' cannot be split as planned.", got=f"shape {np.shape(value)}", need=str(sharding)
        ) from error
