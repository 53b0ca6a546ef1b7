"""Tables that servers make: handles that stand for them, and for optimizer state of their size, in the first call of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np

from spmdctx.context.layers import current_context
from spmdctx.errors import UnsupportedError
from spmdctx.pipeline.cut.inline import inlined
from spmdctx.pipeline.cut.line import needed, variables
from spmdctx.server import WORKER
from spmdctx.server.program.capture import ServedStep
from spmdctx.server.program.recipe import Recipe, made_rows, recipe_of
from spmdctx.server.program.rows import is_uniform, plainly_run, run_rows
from spmdctx.server.program.spec import ServerSpec
from spmdctx.server.remote import RemoteArray


class ServerTable(RemoteArray):
    """A table that no process has made yet: its servers do.

    Attributes:
        recipe: how.
    """

    def __init__(self, recipe: Recipe) -> None:
        aval = jax.typeof(jax.ShapeDtypeStruct(recipe.shape, jnp.dtype(recipe.dtype)))
        super().__init__(aval, "a table", None, lambda: jnp.asarray(made_rows(recipe)))
        self.recipe = recipe


def server_table(shape: Sequence[int], dtype: Any = jnp.float32, *, init: Callable[..., Any], key: Any) -> Any:
    """Makes a table of rows, for parameters that may be larger than a worker's memory.

    With servers it is a handle: each server makes its own rows, and workers get those that a batch reads. Without servers it is the
    same array, as jax.Array. Optimizer state of its size comes from `server_init`.

    Args:
        shape: (rows, ...) of the table.
        dtype: of its elements.
        init: `init(key, shape, dtype)` gives some of its rows, such as those of jax.nn.initializers that do not depend on the number
            of rows; it is called for blocks of 16384 rows.
        key: a key of jax.random.
    """
    recipe = recipe_of(tuple(shape), dtype, init, key)
    servers = current_context().servers
    has_servers = servers.enable_ps or (WORKER in os.environ and "enable_ps" not in servers.explicit)
    return ServerTable(recipe) if has_servers else jnp.asarray(made_rows(recipe))


def server_init(fn: Callable[..., Any], *args: Any) -> Any:
    """Returns `fn(*args)`, such as `server_init(optimizer.init, params)`, in which no array with the rows of a table is made here.

    What has as many rows as a table of `server_table` among the arguments is a handle, too: its rows are all alike, or it is the table
    itself.

    Args:
        fn: a function of trees of arrays.
        args: its arguments.

    Raises:
        UnsupportedError: a result depends on rows of a table.
    """
    leaves, tree = jax.tree.flatten(args)
    tables = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, ServerTable)}
    if not tables:
        return fn(*args)
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if index in tables else leaf for index, leaf in enumerate(leaves)]

    def run(*own: Any) -> Any:
        return fn(*jax.tree.unflatten(tree, own))

    closed, form = jax.make_jaxpr(run, return_shape=True)(*structs)
    flat = inlined(closed)
    made = _Results(flat, leaves, tables)
    paths = [jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(form)]
    return jax.tree.unflatten(jax.tree.structure(form), [made.of(atom, path) for atom, path in zip(flat.jaxpr.outvars, paths, strict=True)])


class _Results:
    def __init__(self, flat: jexc.ClosedJaxpr, leaves: Sequence[Any], tables: dict[int, ServerTable]) -> None:
        self._body = flat.jaxpr
        self._values = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        self._values |= {var: leaf for index, (var, leaf) in enumerate(zip(flat.jaxpr.invars, leaves, strict=True)) if index not in tables}
        self._tables = {flat.jaxpr.invars[index]: leaf for index, leaf in tables.items()}
        self._counts = {leaf.shape[0] for leaf in tables.values()}
        self._uniform: dict[Any, Any] = {}
        for eqn in flat.jaxpr.eqns:
            if is_uniform(eqn, self._uniform):
                self._uniform.update(dict.fromkeys(eqn.outvars, eqn))

    def of(self, atom: Any, path: str) -> Any:
        """Returns a result: its value, or a handle."""
        if isinstance(atom, jexc.Literal):
            return jnp.asarray(atom.val, atom.aval.dtype)
        if atom in self._tables:
            return self._tables[atom]
        eqns = needed(self._body.eqns, [atom])
        read = {var for eqn in eqns for var in variables(eqn.invars)}
        if not read.isdisjoint(self._tables):
            raise UnsupportedError(
                "A result depends on rows of a table that servers make.",
                where=path,
                need="the table itself, or an array whose rows are all alike",
                fix="make it by server_table, too",
            )
        values = dict(self._values)
        if atom in self._uniform and atom.aval.shape[:1] and atom.aval.shape[0] in self._counts:
            run_rows(self._body, eqns, values, dict.fromkeys(self._uniform, 1))
            return ServerTable(Recipe(tuple(atom.aval.shape), str(atom.aval.dtype), row=np.asarray(values[atom])))
        for eqn in eqns:
            values.update(zip(eqn.outvars, plainly_run(self._body, eqn, values), strict=True))
        return values[atom]


def with_recipes(specs: Sequence[ServerSpec], step: ServedStep, leaves: Sequence[Any]) -> list[ServerSpec]:
    """Returns what servers are told, with how they make the tables among the first arguments of a step.

    Raises:
        UnsupportedError: the step reads more of one than rows, or it is no state.
    """
    recipes = {number: leaf.recipe for number, leaf in enumerate(leaves) if isinstance(leaf, ServerTable)}
    held = frozenset[int]() if step.tables is None else step.tables.held
    stays = () if step.local is None else step.local.held
    # Workers make what has equal rows themselves.
    for number in sorted(
        number for number, recipe in recipes.items() if number not in held and (number not in stays or recipe.row is None)
    ):
        notes = ["it has no mark of set_param_ps, and stays with workers"] if number in stays else step.tables.notes if step.tables else ()
        raise UnsupportedError(
            "Servers cannot hold an array of server_table by rows.",
            where=step.captured.inputs[number].path,
            got=" ".join(notes) or "an array that is not read by ids",
            fix="mark it" if number in stays else "make the array here",
        )
    return [
        spec._replace(
            tables=tuple(
                table._replace(recipes={slot: recipes[int(slot[3:])] for slot in table.held if int(slot[3:]) in recipes})
                for table in spec.tables
            )
        )
        for spec in specs
    ]
