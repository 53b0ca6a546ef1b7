"""The fast path for steps over pytrees: one `jax.jit` over the user's own arguments, which checks them in C++.

`jax.jit` inspects the structure, shapes, types and shardings of its arguments anyway. If they are not those that the step was
planned for, it traces again or finds that a sharding does not fit. Both end the fast path, and the caller takes the slow one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from spmdctx._compat import x64_is_on
from spmdctx.trace.scope.mesh import has_explicit_axes, has_explicit_type, has_mesh_type

if TYPE_CHECKING:
    from spmdctx.lowering.compile import CompiledProgram
    from spmdctx.trace.capture.pytrees import PureStructure

Signature = tuple[tuple[tuple[int, ...], Any, bool], ...]


class OtherArgumentsError(Exception):
    """The arguments are not those that the program was planned for."""


def signature(avals: Sequence[Any]) -> Signature:
    """Returns the shapes, dtypes and weak types on which a compiled program depends; shardings are left out."""
    return tuple([(tuple(aval.shape), aval.dtype, aval.weak_type) for aval in avals])


def direct_call(
    program: CompiledProgram,
    structure: PureStructure,
    avals: Sequence[Any],
    donated: Sequence[bool],
    comes_back: Collection[int],
    compiler_options: Mapping[str, Any],
) -> jax.stages.Wrapped | None:
    """Returns the program as a jitted function of the step's positional arguments, or None if the step takes keywords.

    The function raises OtherArgumentsError, or jax's ValueError, for arguments that are not `avals` placed as planned. Leaves
    that are results of the last call, `comes_back`, must be on the mesh. Otherwise the program would be compiled for this call alone.
    """
    positional, keywords = structure.in_form.tree.children()
    if keywords.num_leaves:
        return None
    expected, wide = signature(avals), x64_is_on()
    flat = program.jitted.__wrapped__  # type: ignore[attr-defined]  # a jitted function has it; its type does not say so

    def step(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, {}))
        given = signature([jax.typeof(leaf) for leaf in leaves])  # tracers; with disable_jit, what the user gave
        if any(not has_mesh_type(leaves[index]) for index in comes_back if index < len(leaves)):
            raise OtherArgumentsError
        is_explicit = has_explicit_axes() or any(map(has_explicit_type, leaves))
        if is_explicit or tree != structure.in_form.tree or given != expected or x64_is_on() != wide:
            raise OtherArgumentsError
        return structure.out_form.tree.unflatten(flat(*leaves))

    step.__name__ = step.__qualname__ = flat.__name__
    return jax.jit(
        step,
        in_shardings=structure.inputs(program.in_shardings)[0],
        out_shardings=structure.outputs(program.out_shardings),
        donate_argnums=_donated_positions(positional, donated),
        compiler_options=dict(compiler_options) or None,
    )


def _donated_positions(positional: Any, donated: Sequence[bool]) -> tuple[int, ...]:
    positions, start = [], 0
    for position, argument in enumerate(positional.children()):
        if any(donated[start : start + argument.num_leaves]):
            positions.append(position)
        start += argument.num_leaves
    return tuple(positions)
