"""Every report gives itself as plain data of one form, and can be pickled."""

import ast
import copy
import dataclasses
import importlib
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmdctx
from spmdctx.errors import SpmdctxError
from spmdctx.server.loads import ServerLoad
from spmdctx.server.plan import served_plan
from spmdctx.wording.reports import Report, plain, stamped
from tests.tree import MODULES, PACKAGE, tree_of


def shows_itself(node):
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    return bool(methods & {"_repr_html_", "__rich__", "to_dict"}) or node.name.endswith(("Report", "Audit", "Explanation", "Diff"))


# What others are made of: rows of a report, and a layout, which is no report.
PARTS = {"Report", "Layout", "TensorExplanation", "OpExplanation", "ProgramAudit"}
REPORTS = sorted(
    (".".join(("spmdctx", *path.relative_to(PACKAGE).with_suffix("").parts)), node.name)
    for path in MODULES
    for node in tree_of(path).body
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in PARTS and shows_itself(node)
)


@pytest.mark.parametrize(("module", "name"), REPORTS)
def test_a_class_that_shows_itself_gives_itself_as_data(module, name):
    kind = getattr(importlib.import_module(module), name)
    assert callable(kind.to_dict)
    assert callable(kind.to_json)


def test_the_search_for_reports_finds_them():
    assert {name for _, name in REPORTS} == {type(one).__name__ for one in made().values()} - {"SpmdctxError"}


def loss(params, batch):
    hidden = batch
    for weight in params:
        hidden = jnp.tanh(hidden @ weight)
    return (hidden**2).mean()


def step(params, batch):
    value, gradients = spmdctx.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda own, change: own - change, params, gradients), value


_MADE = {}
FOLDER = []


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    FOLDER.append(tmp_path_factory.mktemp("traces"))


def profiled(split, *args):
    with split.profile(FOLDER[-1]) as found:
        split(*args)
    return found


def made():
    """One report of each class, of a step of two products."""
    if _MADE:
        return _MADE
    params, batch = [np.full((16, 16), 0.1, np.float32)] * 2, np.ones((16, 16), np.float32)
    split = spmdctx.parallel(step, parallel_mode="auto_parallel", device_num=4)
    for _ in range(2):
        split(params, batch)
    cut = spmdctx.parallel(step, parallel_mode="semi_auto_parallel", device_num=4, pipeline_stages=2, grad_accumulation_step=4)
    plan, pipeline = split.plan(params, batch), cut.plan(params, batch)
    load = ServerLoad(("w",), 1, 2, 3, 4)
    _MADE.update(
        plan=plan,
        explanation=plan.explain("params"),
        explained_ops=plan.explain("dot_general"),
        diff=plan.diff(spmdctx.plan(step, params, batch, parallel_mode="data_parallel", device_num=4)),
        pareto=plan.pareto(num_devices=[2], memory_bytes=[1 << 20]),
        audit=split.audit(params, batch),
        verify=split.verify(params, batch),
        report=split.report(),
        profile=profiled(split, params, batch),
        served=served_plan(plan, (load,), 4, 2),
        pipeline=pipeline,
        timeline=pipeline.timeline(),
        stage=pipeline.explain("stage 1"),
        pipeline_diff=pipeline.diff(plan),
        pipeline_audit=cut.audit(params, batch),
    )
    return _MADE


NAMES = (
    *("plan", "explanation", "explained_ops", "diff", "pareto", "audit", "verify", "report", "profile"),
    *("served", "pipeline", "timeline", "stage", "pipeline_diff", "pipeline_audit"),
)
PLANS = ("plan", "served", "pipeline")


@pytest.mark.parametrize("name", NAMES)
def test_data_come_back_from_json_as_they_were(name):
    found = made()[name]
    data = found.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    kind, _, version = data["schema"].removeprefix("spmdctx.").partition("/")
    assert kind.isidentifier()
    assert version == "1"
    if name not in PLANS:  # theirs is the file
        assert json.loads(found.to_json()) == data


def test_each_class_has_a_schema_of_its_own():
    schemas = {type(one): one.to_dict()["schema"] for one in made().values()}
    assert len(set(schemas.values())) == len(schemas)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy, copy.copy], ids=["pickle", "deep", "copy"])
def test_a_report_is_equal_after_it_was_pickled_or_copied(name, again):
    found = made()[name]
    back = again(found)
    assert type(back) is type(found)
    assert back.to_dict() == found.to_dict()
    assert str(back) == str(found)
    if name in PLANS:
        assert back.to_json() == found.to_json()
        assert back == found


def test_a_pickled_plan_keeps_its_timing_and_profile_and_says_that_it_has_no_step():
    plan = made()["plan"]
    back = pickle.loads(pickle.dumps(plan))
    assert (back.timing, tuple(back.memory_profile)) == (plan.timing, tuple(plan.memory_profile))
    with pytest.raises(SpmdctxError, match="does not hold the step"):
        back.pareto()
    assert copy.deepcopy(plan).replan is plan.replan


def test_plain_data_are_what_json_holds():
    @dataclasses.dataclass
    class Row:
        sizes: tuple[int, ...]
        share: float

    data = plain({1: Row((2, 3), float("inf")), "array": np.arange(2), "number": np.float32(0.5), "type": jnp.dtype("int32")})
    assert data == {"1": {"sizes": [2, 3], "share": "inf"}, "array": [0, 1], "number": 0.5, "type": "int32"}
    assert stamped("thing", {"a": 1}) == {"schema": "spmdctx.thing/1", "a": 1}
    assert issubclass(spmdctx.AuditReport, Report)
