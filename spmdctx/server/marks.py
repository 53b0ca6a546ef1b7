"""Marks of parameters that servers hold: by patterns of their paths, or by the modules and variables of Flax that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from spmdctx.context.layers import current_context, mark_for_servers
from spmdctx.errors import ContextError, listed, message, shown
from spmdctx.pipeline.cut.line import needed, variables
from spmdctx.server.program.capture import ServedStep
from spmdctx.trace.capture.layerwise import matches_path
from spmdctx.trace.capture.structure import SERVED
from spmdctx.trace.flax_modules import linen, nnx


def set_param_ps(module_or_patterns: Any, init_in_server: bool = False) -> None:
    """Has servers hold parameters, with their optimizer state. Where nothing is marked, servers hold all.

    Args:
        module_or_patterns: path patterns such as "*/table/embedding"; a module of nnx, whose parameters get a mark that optimizers made
            later take over; a variable of nnx; or a module of linen, by its name, one without a name for all parameters.
        init_in_server: whether servers make the first values themselves.

    Raises:
        ContextError: the context has no parameter server.
        TypeError: what is marked is none of these, or `init_in_server` is no bool.
    """
    if not isinstance(init_in_server, bool):
        raise TypeError(message("init_in_server must be a bool.", got=shown(init_in_server)))
    if not current_context().servers.enable_ps:
        raise ContextError(
            "set_param_ps marks parameters for servers, and there is no parameter server.",
            got="enable_ps=False",
            fix="call spmdctx.set_ps_context(enable_ps=True) first",
        )
    if isinstance(module_or_patterns, nnx.Module | nnx.Variable) and not isinstance(module_or_patterns, linen.Module):
        variables = [module_or_patterns] if isinstance(module_or_patterns, nnx.Variable) else _parameters(module_or_patterns)
        for variable in variables:
            variable.set_metadata(**{SERVED: "made" if init_in_server else "held"})
        return
    mark_for_servers(_patterns(module_or_patterns), init_in_server=init_in_server)


class Marks(NamedTuple):
    """The parameters of a step that have no mark, by the number of the input, if others have one; and notes on marks."""

    unmarked: frozenset[int]
    notes: tuple[str, ...]


def marks_of(step: ServedStep, patterns: Sequence[str]) -> Marks:
    """Returns which parameters of a step stay with workers, since others are marked and they are not."""
    inputs = step.captured.inputs
    unmatched = [pattern for pattern in patterns if not any(matches_path(leaf.path, pattern) for leaf in inputs)]
    notes = [f"set_param_ps pattern {pattern!r} matches no argument." for pattern in unmatched]
    if len(unmatched) > 1:
        notes = [f"{len(unmatched)} patterns of set_param_ps match no argument. They are {listed([repr(one) for one in unmatched])}."]
    trained = _trained(step)
    left = [number for number in trained if not (inputs[number].served or any(matches_path(inputs[number].path, own) for own in patterns))]
    if len(left) == len(trained):
        notes, left = [*notes, "set_param_ps marks no parameter: servers hold all of them."], []
    return Marks(frozenset(left), tuple(notes))


def _trained(step: ServedStep) -> list[int]:
    """Returns the inputs that the loss is differentiated by and that are state, by number."""
    around = step.around
    number_of = {var: number for number, var in enumerate(around.jaxpr.jaxpr.invars)}
    found: set[int] = set()
    for leaf in step.loss.primal_of.values():
        read = [around.loss.invars[leaf]]
        read += [var for eqn in needed(around.before, variables(read)) for var in variables(eqn.invars)]
        found.update(number_of[var] for var in variables(read) if var in number_of)
    return sorted(found & {leaf.carried_from for leaf in step.captured.outputs if leaf.carried_from is not None})


def _parameters(module: nnx.Module) -> list[nnx.Variable[Any]]:
    return [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Param)]


def _patterns(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, linen.Module):
        path = "/".join(given.path) if given.scope is not None else given.name or ""
        return (f"{path}/*",) if path else ("*",)
    if isinstance(given, Sequence) and given and all(isinstance(entry, str) for entry in given):
        return tuple(given)
    raise TypeError(message("set_param_ps takes path patterns, modules or variables of Flax.", got=shown(given)))
