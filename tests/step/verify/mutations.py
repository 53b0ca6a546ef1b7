"""Faults that are written into lowered programs."""

import jax
import jax.extend.core as jexc
import jax.numpy as jnp


def mutated(jaxpr, primitive, change, number=0):
    """Returns the program with `change(eqn)` in place of an equation: of those of a primitive, the one of a number from the start."""
    return _Mutation(primitive, change, number).program(jaxpr)


class _Mutation:
    def __init__(self, primitive, change, number):
        self.primitive, self.change, self.left, self.done = primitive, change, number, False

    def program(self, jaxpr):
        changed = self.closed(jaxpr)
        assert self.done, f"no {self.primitive} to change in\n{jaxpr}"
        return changed

    def closed(self, jaxpr):
        if hasattr(jaxpr, "consts"):
            return jexc.ClosedJaxpr(self.closed(jaxpr.jaxpr), jaxpr.consts)
        return jaxpr.replace(eqns=[new for eqn in jaxpr.eqns for new in self.equations(eqn)])

    def equations(self, eqn):
        if eqn.primitive.name == self.primitive and not self.done:
            self.left -= 1
            if self.left < 0:
                self.done = True
                return self.change(eqn)
        inner = {name: self.closed(value) for name, value in eqn.params.items() if hasattr(value, "eqns")}
        return [eqn.replace(params={**eqn.params, **inner})]


def dropped(eqn):
    """Results that are the operands."""
    return [
        jexc.new_jaxpr_eqn([atom], [var], jexc.primitives.copy_p, {}, set(), eqn.source_info)
        for atom, var in zip(eqn.invars, eqn.outvars, strict=True)
    ]


def twice(eqn):
    """The equation again on its results."""
    between = [jexc.Var(var.aval) for var in eqn.outvars]
    return [eqn.replace(outvars=between), eqn.replace(invars=between)]


def with_params(**changes):
    """Other parameters; each change is a function of the old one."""
    return lambda eqn: [eqn.replace(params={**eqn.params, **{name: change(eqn.params[name]) for name, change in changes.items()}})]


def after(fn):
    """`fn` of the only result."""

    def change(eqn):
        (var,) = eqn.outvars
        between = jexc.Var(var.aval)
        closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))
        names = {closed.jaxpr.invars[0]: between, closed.jaxpr.outvars[0]: var}
        inner = [
            one.replace(
                invars=[atom if isinstance(atom, jexc.Literal) else names.setdefault(atom, jexc.Var(atom.aval)) for atom in one.invars],
                outvars=[names.setdefault(out, jexc.Var(out.aval)) for out in one.outvars],
            )
            for one in closed.jaxpr.eqns
        ]
        assert not closed.consts
        return [eqn.replace(outvars=[between]), *inner]

    return change


def without_first_shard(x):
    """The value without what the first of eight devices holds."""
    rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(rows < x.shape[0] // 8, jnp.zeros_like(x), x)


def rolled(x):
    """The value whose shards went to the next devices."""
    return jnp.roll(x, x.shape[0] // 8, axis=0)
