"""Writes a step as JAX lowers it where the plan would not see it, and as several devices can run it.

While loops whose elements end one by one get one predicate, and run until no element goes on. vmap makes such loops, and so does the
sampling of gamma distributions. The plan then counts what every iteration communicates to know whether an element goes on, and the second
test that chooses between states.

A scan of no iterations gives its first state and empty stacks, which is all that XLA leaves of it.

A `device_put` to a NamedSharding is a sharding constraint, and a move to another memory where it names one.

Ordered calls of `jax.debug`, which JAX refuses on several devices, become ordered calls of `io_callback`, which it places on one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.experimental import io_callback
from jax.sharding import NamedSharding

from spmdctx._compat import gamma_sampler, ordered_effects, scan_counts
from spmdctx.rules.control_flow import opened, with_bodies
from spmdctx.trace.build.jaxprs.equations import renamed, structs_of, written

_OWN_PROGRAMS = frozenset({"shard_map", "pallas_call"})
"""Primitives whose bodies are one device's own programs."""

_DEBUGGING = ("debug_callback", "debug_print")


def as_lowered(jaxpr: jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
    """Returns the program so written; one in which nothing changes comes back as it is."""
    return _rewritten(jaxpr)


def _rewritten(body: Any) -> Any:
    jaxpr = opened(body)
    eqns = [own for eqn in jaxpr.eqns for own in _equations(eqn)]
    if len(eqns) == len(jaxpr.eqns) and all(own is eqn for own, eqn in zip(eqns, jaxpr.eqns, strict=True)):
        return body
    jaxpr = jaxpr.replace(eqns=eqns, effects=_effects(jaxpr.effects))
    return jexc.ClosedJaxpr(jaxpr, body.consts) if hasattr(body, "consts") else jaxpr


def _equations(eqn: Any) -> list[Any]:
    if eqn.primitive.name == "device_put" and any(map(_is_split, eqn.params["devices"])):
        return _constrained(eqn)
    if eqn.primitive.name == "scan" and not eqn.params["length"]:
        return _without_iterations(eqn)
    return [_equation(eqn)]


def _without_iterations(eqn: Any) -> list[Any]:
    """Returns copies of a loop's first state, and its empty stacks."""
    num_constants, num_carried = scan_counts(eqn.params)
    stacks = structs_of(eqn.outvars[num_carried:])

    def first(*state: Any) -> list[Any]:
        return [*map(jnp.copy, state), *(jax.lax.full(own.shape, 0, own.dtype) for own in stacks)]

    eqns, atoms = written(first, eqn.invars[num_constants : num_constants + num_carried], eqn.source_info)
    results = dict(zip(atoms, eqn.outvars, strict=True))
    return [own.replace(outvars=[results.get(var, var) for var in own.outvars]) for own in eqns]


def _is_split(place: Any) -> bool:
    """Returns whether a place of `device_put` is a sharding over several devices, whose axes are not in the types of values."""
    return isinstance(place, NamedSharding) and place.mesh.size > 1 and not place.mesh.explicit_axes


def _constrained(eqn: Any) -> list[Any]:
    """Returns the constraints that a `device_put` is where it names mesh axes, and the `device_put` that is left of it."""
    eqns, left = [], []
    for place, *own in zip(eqn.params["devices"], eqn.params["srcs"], eqn.params["copy_semantics"], eqn.invars, eqn.outvars, strict=True):
        source, copies, atom, var = own
        if _is_split(place):
            constrain = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(place.mesh, place.spec))
            (constraint,), (atom,) = written(constrain, [atom], eqn.source_info)
            # Without its sharding, a place only says which memory.
            place = getattr(var.aval, "memory_space", None)
            stays = place == getattr(own[2].aval, "memory_space", None)
            eqns.append(constraint.replace(outvars=[var]) if stays else constraint)
            if stays:
                continue
        left.append((place, source, copies, atom, var))
    if left:
        devices, srcs, semantics, invars, outvars = map(list, zip(*left, strict=True))
        params = {"devices": tuple(devices), "srcs": tuple(srcs), "copy_semantics": tuple(semantics)}
        eqns.append(eqn.replace(invars=invars, outvars=outvars, params={**eqn.params, **params}))
    return eqns


def _equation(eqn: Any) -> Any:
    if eqn.primitive.name in _OWN_PROGRAMS:
        return eqn
    if eqn.primitive.name == "random_gamma":
        eqn = _sampled(eqn)
    if eqn.primitive.name in _DEBUGGING and ordered_effects()[0] in eqn.effects:
        return _called_in_order(eqn)
    params = with_bodies(eqn.params, _rewritten)
    if any(params[name] is not param for name, param in eqn.params.items()):
        eqn = eqn.replace(params=params, effects=_effects(eqn.effects))
    is_batched = eqn.primitive.name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape
    return _with_scalar_predicate(eqn) if is_batched else eqn


def _effects(effects: Iterable[Any]) -> set[Any]:
    debugging, calling = ordered_effects()
    return {calling if effect == debugging else effect for effect in effects}


def _called_in_order(eqn: Any) -> Any:
    """Returns the ordered `io_callback` that does what an ordered call of `jax.debug` does."""

    def call(*arrays: Any) -> None:
        eqn.primitive.bind(*arrays, **eqn.params)

    (made,) = jax.make_jaxpr(lambda *own: io_callback(call, None, *own, ordered=True))(*structs_of(eqn.invars)).jaxpr.eqns
    return made.replace(invars=eqn.invars, source_info=eqn.source_info)


def _sampled(eqn: Any) -> Any:
    """Returns the call of the function by which JAX draws from a gamma distribution."""
    (call,) = jax.make_jaxpr(jax.jit(gamma_sampler(eqn.params)))(*structs_of(eqn.invars)).jaxpr.eqns
    return _at(call, eqn.source_info).replace(invars=eqn.invars, outvars=eqn.outvars)


def _at(eqn: Any, info: Any) -> Any:
    """Returns an equation with all those in it at another source line."""

    def moved(body: Any) -> Any:
        jaxpr = opened(body)
        own = jaxpr.replace(eqns=[_at(one, info) for one in jaxpr.eqns])
        return jexc.ClosedJaxpr(own, body.consts) if hasattr(body, "consts") else own

    own = eqn.source_info.replace(traceback=info.traceback)
    return eqn.replace(source_info=own, params=with_bodies(eqn.params, moved))


def _with_scalar_predicate(eqn: Any) -> Any:
    """Lets a loop run while any element goes on; elements that do not keep their state."""
    params = eqn.params
    test, body, num_test = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
    (goes_on,) = test.jaxpr.outvars
    joined, (any_goes_on,) = written(lambda own: jax.lax.reduce_or(own, range(own.ndim)), [goes_on], eqn.source_info)
    new_test = test.jaxpr.replace(eqns=[*test.jaxpr.eqns, *joined], outvars=[any_goes_on])

    constants, state = test.jaxpr.invars[:num_test], body.jaxpr.invars[params["body_nconsts"] :]
    as_state = dict(zip(test.jaxpr.invars[num_test:], state, strict=True))
    again = [own.replace(invars=[renamed(atom, as_state) for atom in own.invars]) for own in test.jaxpr.eqns]
    chosen, outputs = written(_next_state, [renamed(goes_on, as_state), *state, *body.jaxpr.outvars], eqn.source_info)
    new_body = body.jaxpr.replace(
        constvars=[*test.jaxpr.constvars, *body.jaxpr.constvars],
        invars=[*constants, *body.jaxpr.invars],
        eqns=[*again, *body.jaxpr.eqns, *chosen],
        outvars=outputs,
        effects=test.jaxpr.effects | body.jaxpr.effects,
    )
    return eqn.replace(
        invars=[*eqn.invars[:num_test], *eqn.invars],
        params={
            **params,
            "cond_jaxpr": jexc.ClosedJaxpr(new_test, test.consts),
            "body_jaxpr": jexc.ClosedJaxpr(new_body, [*test.consts, *body.consts]),
            "body_nconsts": num_test + params["body_nconsts"],
        },
    )


def _next_state(goes_on: Any, *states: Any) -> list[Any]:
    size = len(states) // 2
    dims = range(goes_on.ndim)
    return [
        jax.lax.select(jax.lax.broadcast_in_dim(goes_on, after.shape, dims), after, before)
        for before, after in zip(states[:size], states[size:], strict=True)
    ]
