"""Bodies among the parameters of equations: found open, closed and in tuples, and mapped without touching anything else."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import pytest

from spmdctx.rules.control_flow import bodies_of, is_body, opened, with_bodies

Pair = namedtuple("Pair", "first second")
BODY = jax.make_jaxpr(lambda x: x + 1)(1.0)
OTHER = jax.make_jaxpr(lambda x: x * 2)(1.0)
PARAMS = {
    "closed": {"jaxpr": BODY, "name": "f"},
    "open": {"jaxpr": BODY.jaxpr, "sizes": (1, 2)},
    "branches": {"branches": (BODY, OTHER.jaxpr), "index": None},
    "named": {"jaxprs": Pair(BODY, None), "lengths": Pair(1, 2)},
}


@pytest.mark.parametrize(("name", "count"), [("closed", 1), ("open", 1), ("branches", 2), ("named", 1)])
def test_bodies_are_found_where_an_equation_holds_them(name, count):
    found = bodies_of(PARAMS[name])
    assert len(found) == count
    assert all(is_body(body) and opened(body).eqns for body in found)


@pytest.mark.parametrize("name", PARAMS)
def test_bodies_that_stay_leave_the_parameters_the_objects_that_they_are(name):
    params = PARAMS[name]
    same = with_bodies(params, lambda body: body)
    assert same.keys() == params.keys()
    assert all(same[key] is params[key] for key in params)


@pytest.mark.parametrize("name", PARAMS)
def test_only_bodies_are_replaced_and_tuples_keep_their_types(name):
    params = PARAMS[name]
    made = with_bodies(params, lambda body: OTHER)
    assert all(body is OTHER for body in bodies_of(made))
    assert [type(made[key]) for key in params if not is_body(params[key])] == [
        type(params[key]) for key in params if not is_body(params[key])
    ]
    assert all(made[key] is params[key] for key in params if not bodies_of({key: params[key]}))


def test_a_function_with_a_program_of_its_own_is_no_body():
    assert not is_body(jax.jit(jnp.sin))


@pytest.mark.parametrize("params", [{}, {"axis": 0}, {"jaxpr": OTHER}])
def test_what_is_written_into_new_parameters_is_not_in_the_old_ones(params):
    known = dict(params)
    with_bodies(params, lambda body: body)["callback"] = print
    assert params == known
