"""Calls and control flow: how the walk treats each equation that holds a jaxpr.

Calls are inlined. A loop body is entered through `scan.enter`, closed by `scan.next` (whose result is tied to the carry) and
left through `scan.exit`. `while` and `cond` have the same kinds of boundary. `lowering.rewrite.rewriter` meets the boundaries in
the same order, so both must change together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from spmdctx._compat import scan_counts
from spmdctx.ir.analysis.columns import Columns
from spmdctx.ir.graph import LITERAL, Mark, Role
from spmdctx.ir.primitives import BOUNDARY_OF, COND_EXIT, LOSS, MARKER, SCAN_ENTER, SCAN_EXIT, SCAN_NEXT, WHILE_ENTER, WHILE_NEXT
from spmdctx.ir.rule import OpRule
from spmdctx.rules.builder import RuleBuilder, identity
from spmdctx.rules.control_flow import CALLS, RECOMPUTED, call_body, call_operands
from spmdctx.trace.build import shard_maps as manual
from spmdctx.trace.build import user_pins
from spmdctx.trace.build.builder import Around, Builder, Env
from spmdctx.trace.build.program import LossOperand

Handler = Callable[[Builder, Any, Env, Around], None]

KEPT = frozenset(
    {
        *RECOMPUTED,
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call"),
        *("linear_call", "xla_metadata_call", "compute_on"),
    }
)
"""Calls that lowering keeps, since their kind decides how they are differentiated, batched, recomputed or compiled."""

_COMPILED_APART = frozenset({"linear_call", "xla_metadata_call", "compute_on"})
"""Kept calls that may stay calls in compiled programs."""

INLINED = frozenset(CALLS) - KEPT
"""Calls that lowering inlines into their caller."""

NEVER_FROM_LITERALS = frozenset(BOUNDARY_OF) | {"random_seed"}


def open_jaxpr(body: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a body's open jaxpr and its constants, whether the equation holds it open or closed."""
    return (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())


def _inside(around: Around, eqn: Any, runs: int = 1) -> Around:
    """Returns the surroundings of the equation's body, which each execution of the equation runs `runs` times."""
    prefix, own = around.prefix, str(eqn.source_info.name_stack)
    return Around(around.repeats * runs, f"{prefix}/{own}" if prefix and own else prefix or own)


def _bind(builder: Builder, body: Any, arguments: Sequence[Any], env: Env) -> tuple[Any, Env]:
    """Returns the body's jaxpr and an environment in which its inputs are the caller's values."""
    jaxpr, consts = open_jaxpr(body)
    inner: Env = {}
    for var, _ in zip(jaxpr.constvars, consts, strict=False):
        inner[var] = builder.add_value(var.aval, Role.CONSTANT)
    for var, atom in zip(jaxpr.invars, arguments, strict=True):
        value = builder.read(env, [atom])[0]
        inner[var] = value if value >= 0 else builder.add_value(var.aval)
    return jaxpr, inner


def _results(builder: Builder, jaxpr: Any, inner: Env) -> list[int]:
    """Returns the value ids of a body's results; a literal result becomes a value of its own."""
    ids = builder.read(inner, jaxpr.outvars)
    return [value if value >= 0 else builder.add_value(var.aval) for value, var in zip(ids, jaxpr.outvars, strict=True)]


def _call(builder: Builder, eqn: Any, env: Env, around: Around) -> None:
    name = eqn.primitive.name
    taken = [eqn.invars[index] for index in call_operands(name, eqn.params, len(eqn.invars))]
    body = call_body(name, eqn.params)
    jaxpr, inner = _bind(builder, body, taken, env)
    for var, sharding in zip(jaxpr.invars, eqn.params.get("in_shardings", ()), strict=False):
        inner[var] = user_pins.pin_of_call(builder, inner[var], sharding, "in_shardings", eqn.source_info, around)
    # Lowering keeps a call, too, that holds constants.
    with builder.body(is_inlined=_is_inlined(name, eqn.params)) if name in KEPT or open_jaxpr(body)[1] else nullcontext():
        builder.walk(jaxpr, inner, _inside(around, eqn))
    results = _results(builder, jaxpr, inner)
    for index, sharding in enumerate(eqn.params.get("out_shardings", ())):
        results[index] = user_pins.pin_of_call(builder, results[index], sharding, "out_shardings", eqn.source_info, around)
    env.update(zip(eqn.outvars, results, strict=True))


def _is_inlined(name: str, params: Mapping[str, Any]) -> bool:
    """Returns whether compilers inline a call that lowering keeps; a barrier is before what a backward pass computes again."""
    if name in RECOMPUTED:
        prevents = params.get("prevent_cse", True)
        return not (params.get("differentiated", True) and (any(prevents) if isinstance(prevents, tuple) else prevents))
    return name not in _COMPILED_APART


def _boundary(builder: Builder, kind: str, operands: Sequence[int], var: Any, rule: OpRule, eqn: Any, around: Around) -> int:
    """One boundary op; returns its result."""
    result = builder.add_value(var.aval)
    builder.add_op(kind, tuple(operands), (result,), rule, eqn.source_info, around)
    return result


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _decided(shape: tuple[int, ...], num_operands: int, predicate: Any) -> OpRule:
    """Returns the rule of tensors among which a predicate, the last operand, chooses.

    vmap gives a loop's predicate leading dimensions.
    """
    rule = identity(shape, num_operands=num_operands)
    return replace(rule, operands=(*rule.operands, rule.results[0][: len(_shape(predicate))]))


def _stacked(shape: tuple[int, ...], *, entering: bool) -> OpRule:
    """Relates a scanned array, whose leading dimension is never split, to one iteration's slice."""
    builder = RuleBuilder()
    steps = builder.factor(shape[0], blocked=True)
    rest = builder.factors(shape[1:])
    outer, inner = [steps, *rest], rest
    return builder.build([outer], [inner]) if entering else builder.build([inner], [outer])


def _scan(builder: Builder, eqn: Any, env: Env, around: Around) -> None:
    params = eqn.params
    num_consts, num_carry = scan_counts(params)
    jaxpr, _ = open_jaxpr(params["jaxpr"])
    inner: Env = {}
    for index, (var, atom) in enumerate(zip(jaxpr.invars, eqn.invars, strict=True)):
        scanned = index >= num_consts + num_carry
        rule = _stacked(_shape(atom), entering=True) if scanned else identity(_shape(var))
        inner[var] = _boundary(builder, SCAN_ENTER, builder.read(env, [atom]), var, rule, eqn, around)
    inside = _inside(around, eqn, int(params["length"]))
    each_turn = around._replace(repeats=inside.repeats)
    with builder.body():
        builder.walk(jaxpr, inner, inside)
    results = _results(builder, jaxpr, inner)
    carries = jaxpr.invars[num_consts : num_consts + num_carry]
    for index, (value, var) in enumerate(zip(results, eqn.outvars, strict=True)):
        if index < num_carry:
            env[var] = _boundary(builder, SCAN_NEXT, [value], var, identity(_shape(var)), eqn, each_turn)
            builder.ties.append((inner[carries[index]], env[var]))
        else:
            env[var] = _boundary(builder, SCAN_EXIT, [value], var, _stacked(_shape(var), entering=False), eqn, around)


def _while(builder: Builder, eqn: Any, env: Env, around: Around) -> None:
    params = eqn.params
    cond, _ = open_jaxpr(params["cond_jaxpr"])
    body, _ = open_jaxpr(params["body_jaxpr"])
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = eqn.invars[:num_cond], eqn.invars[num_cond : num_cond + num_body]
    carried = eqn.invars[num_cond + num_body :]
    in_cond: Env = {}
    in_body: Env = {}
    for var, atom in zip(cond.invars, cond_consts, strict=False):
        in_cond[var] = _boundary(builder, WHILE_ENTER, builder.read(env, [atom]), var, identity(_shape(var)), eqn, around)
    for var, atom in zip(body.invars, body_consts, strict=False):
        in_body[var] = _boundary(builder, WHILE_ENTER, builder.read(env, [atom]), var, identity(_shape(var)), eqn, around)
    for var, cond_var, atom in zip(body.invars[num_body:], cond.invars[num_cond:], carried, strict=True):
        in_body[var] = _boundary(builder, WHILE_ENTER, builder.read(env, [atom]), var, identity(_shape(var)), eqn, around)
        in_cond[cond_var] = in_body[var]
    inside = _inside(around, eqn, _trip_count(builder, eqn, cond, body, carried))
    each_turn = around._replace(repeats=inside.repeats)
    for jaxpr, inner in ((cond, in_cond), (body, in_body)):
        with builder.body():
            builder.walk(jaxpr, inner, inside)
    results = _results(builder, body, in_body)
    (goes_on,) = builder.read(in_cond, cond.outvars)
    for var, start, value in zip(eqn.outvars, body.invars[num_body:], results, strict=True):
        env[var] = _boundary(builder, WHILE_NEXT, [value, goes_on], var, _decided(_shape(var), 1, cond.outvars[0]), eqn, each_turn)
        builder.ties.append((in_body[start], env[var]))


def _trip_count(builder: Builder, eqn: Any, cond: Any, body: Any, carried: Sequence[Any]) -> int:
    """Returns the trip count of a counting loop (`i < literal`, `i + literal`, literal start).

    Returns 1 and adds a note if the count cannot be known.
    """
    carries = list(cond.invars[len(cond.invars) - len(carried) :])
    if len(cond.eqns) == 1 and cond.eqns[0].primitive.name == "lt" and cond.eqns[0].invars[0] in carries:
        counter, limit = cond.eqns[0].invars
        place = carries.index(counter)
        start, step = carried[place], _step(body, body.invars[len(body.invars) - len(carried) + place], body.outvars[place])
        if step and hasattr(limit, "val") and hasattr(start, "val"):
            return max(-(-(int(limit.val) - int(start.val)) // step), 0)
    builder.notes.append("A while loop's trip count is not known before it runs: its collectives are counted once.")
    return 1


def _step(body: Any, before: Any, after: Any) -> int:
    """Returns how much a loop body adds to its counter in each iteration, or 0 if that is not a positive literal."""
    for eqn in body.eqns:
        if eqn.primitive.name == "add" and after is eqn.outvars[0]:
            steps = [atom.val for atom in eqn.invars if hasattr(atom, "val")]
            return max(int(steps[0]), 0) if len(steps) == 1 and before in eqn.invars else 0
    return 0


def _cond(builder: Builder, eqn: Any, env: Env, around: Around) -> None:
    predicate = builder.read(env, eqn.invars[:1])
    per_branch = []
    for branch in eqn.params["branches"]:
        jaxpr, inner = _bind(builder, branch, eqn.invars[1:], env)
        with builder.body():
            builder.walk(jaxpr, inner, _inside(around, eqn))
        per_branch.append(_results(builder, jaxpr, inner))
    for index, var in enumerate(eqn.outvars):
        operands = [results[index] for results in per_branch]
        rule = _decided(_shape(var), len(operands), eqn.invars[0])
        env[var] = _boundary(builder, COND_EXIT, [*operands, *predicate], var, rule, eqn, around)


def _constraint(builder: Builder, eqn: Any, env: Env, around: Around) -> None:
    sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
    value = builder.read(env, eqn.invars)[0]
    if value < 0:  # the derivative of tanh, for example, reshards a literal 1.0
        value = builder.add_value(eqn.invars[0].aval)
    env[eqn.outvars[0]] = user_pins.constrained(builder, value, sharding, eqn.source_info, around)


def _marker(builder: Builder, eqn: Any, env: Env, around: Around) -> None:
    params, var = eqn.params, eqn.outvars[0]
    result = _boundary(builder, MARKER, builder.read(env, eqn.invars), var, identity(_shape(var)), eqn, around)
    env[var] = result
    builder.marks.append(
        Mark(builder.num_ops - 1, result, params["region"], params["side"], params["index"], params["strategy"], params["label"])
    )


def _loss_operand(builder: Builder, eqn: Any, env: Env, around: Around) -> None:
    """Noted down and left out: a program with such markers is looked at, and never planned."""
    value = env[eqn.outvars[0]] = builder.read(env, eqn.invars)[0]
    builder.loss_operands.append(LossOperand(**eqn.params, value=value))


def _joined(builder: Builder, eqn: Any, env: Env, around: Around) -> None:
    """A collective inside of a shard_map, counted by itself: what it gives is what it takes, of another device."""
    for var, value in zip(eqn.outvars, builder.read(env, eqn.invars), strict=True):
        env[var] = value if value >= 0 else builder.add_value(var.aval)


def _shard_map(builder: Builder, eqn: Any, env: Env, around: Around) -> None:
    operands = builder.read(env, eqn.invars)
    results = tuple(builder.add_value(var.aval) for var in eqn.outvars)
    env.update(zip(eqn.outvars, results, strict=True))
    op = builder.add_op("shard_map", operands, results, manual.rule_of(eqn), eqn.source_info, around)
    builder.manual[op] = partial(manual.region_of, eqn, op, builder.program_of(eqn.params["jaxpr"]), around.repeats)


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys([*INLINED, *KEPT], _call),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "sharding_constraint": _constraint,
    "reshard": _constraint,
    MARKER: _marker,
    LOSS: _loss_operand,
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), _joined),
    "shard_map": _shard_map,
}


def values_from_literals(columns: Columns) -> frozenset[int]:
    """Returns the values computed from literals alone, without an input, constant array or random key."""
    from_literals = {LITERAL}
    never = columns.which(NEVER_FROM_LITERALS.__contains__).tolist()
    for operands, results, depends in zip(columns.operands, columns.results, never, strict=True):
        if not depends and from_literals.issuperset(operands):
            from_literals.update(results)
    return frozenset(from_literals - {LITERAL})
