"""The options that type checkers and editors know are those of the table, with types that its checks accept."""

import typing

import pytest

import spmdctx
from spmdctx.context import typed
from spmdctx.context.options import ALGO_OPTIONS, OPTIONS, PARALLEL_MODES, SEARCH_MODES
from spmdctx.errors import SpmdctxError
from spmdctx.machine.presets import PRESETS
from spmdctx.step import options as step_options

TYPES = typing.get_type_hints(typed.ContextOptions) | typing.get_type_hints(typed.AlgoOptions)
KINDS = {"int": int, "bool": bool, "float": float, "str": str}
EVERY = (*OPTIONS, *ALGO_OPTIONS)
SAMPLES = {int: [2, "2"], bool: [True, 3], float: [0.5, "0.5"], str: ["file", 3]}


def names_of(hint):
    """The names that a Literal allows."""
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def by_name(options):
    return [pytest.param(option, id=option.name) for option in options]


def test_the_typed_options_are_those_of_the_table_in_its_order():
    assert list(typed.ContextOptions.__annotations__) == [option.name for option in OPTIONS]
    assert list(typed.AlgoOptions.__annotations__) == [option.name for option in ALGO_OPTIONS]


def test_the_typed_options_of_parallel_are_those_that_it_takes():
    own = set(typing.get_type_hints(step_options.ParallelOptions)) - set(typed.ContextOptions.__annotations__)
    assert own == {*step_options._OF_PARALLEL, *step_options._ARGUMENTS}
    assert set(typing.get_args(step_options.MachineName)) == set(PRESETS)


@pytest.mark.parametrize("option", by_name(EVERY))
def test_the_type_is_that_of_the_table(option):
    hint = TYPES[option.name]
    if option.choices:
        assert names_of(hint) == option.choices
    elif option.kind == "dict":
        assert set(typing.get_type_hints(hint)) == set(option.default._fields)
    elif option.kind == "str or tuple":
        assert set(names_of(typing.get_args(hint)[0])) == {"data_parallel", "full_batch"}
    elif names_of(hint):
        assert names_of(hint) == (option.default,)
    elif option.kind == "list":
        assert typing.get_args(hint) == (int,)
    else:
        assert hint is KINDS[option.kind]


@pytest.mark.parametrize("option", by_name(option for option in EVERY if TYPES[option.name] in SAMPLES))
def test_the_check_accepts_what_has_the_type_and_refuses_another(option):
    right, wrong = SAMPLES[TYPES[option.name]]
    option.check(option.name, right)
    with pytest.raises((TypeError, SpmdctxError)):
        option.check(option.name, wrong)


@pytest.mark.parametrize("option", by_name(option for option in EVERY if names_of(TYPES[option.name])))
def test_the_check_accepts_each_name_and_no_other(option):
    for name in names_of(TYPES[option.name]):
        option.check(option.name, name)
    with pytest.raises((TypeError, SpmdctxError)):
        option.check(option.name, "something else")


@pytest.mark.parametrize(
    ("option", "key", "names"),
    [
        pytest.param(option, key, names_of(hint), id=key)
        for option in OPTIONS
        if option.kind == "dict"
        for key, hint in typing.get_type_hints(TYPES[option.name]).items()
        if names_of(hint)
    ],
)
def test_the_names_inside_dictionaries_are_accepted_and_no_other(option, key, names):
    for name in names:
        option.check(option.name, {key: name})
    with pytest.raises((TypeError, SpmdctxError)):
        option.check(option.name, {key: "something else"})


@pytest.mark.parametrize(("mode", "config"), [("auto", None), ("size", 64), ("index", [2, 4])])
def test_the_modes_of_fusion_are_accepted(mode, config):
    assert mode in names_of(typing.get_type_hints(typed.FusionDict)["mode"])
    value = {"openstate": True, "allreduce": {"mode": mode, "config": config}}
    next(option for option in OPTIONS if option.name == "comm_fusion").check("comm_fusion", value)


@pytest.mark.parametrize("function", [spmdctx.parallel, spmdctx.plan, spmdctx.ParallelStep.with_options])
def test_what_takes_options_of_a_step_says_so(function):
    assert "Unpack[ParallelOptions]" in function.__annotations__["options"]


@pytest.mark.parametrize("function", [spmdctx.set_auto_parallel_context, spmdctx.auto_parallel_context])
def test_what_takes_options_of_the_context_says_so(function):
    assert "Unpack[ContextOptions]" in function.__annotations__["options"]


def test_the_modes_are_those_of_the_table():
    assert typing.get_args(typed.ParallelMode) == PARALLEL_MODES
    assert typing.get_args(typed.SearchMode) == SEARCH_MODES
