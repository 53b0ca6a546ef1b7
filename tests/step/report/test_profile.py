"""Where the devices' time of traced calls went, beside the plan."""

import glob
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.profiler import ProfileData

import spmdctx
from spmdctx.audit.hlo import read_module
from spmdctx.errors import PlanError
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.step.report import trace
from spmdctx.step.report.rows import Named, RowKind
from spmdctx.step.report.trace import Event, spent

WIDTH, ROWS = 256, 512
# JAX 0.12 warns of its own type when a trace is read.
pytestmark = [
    pytest.mark.filterwarnings("ignore::spmdctx.ContextWarning"),
    pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning"),
]


def loss(w, x):
    hidden = jnp.tanh(x @ w["up"])
    return jnp.mean((hidden @ w["down"]) ** 2)


def train(w, x):
    gradients = jax.grad(loss)(w, x)
    return jax.tree.map(lambda own, gradient: own - 0.1 * gradient, w, gradients)


def arguments(width=WIDTH):
    return {"up": jnp.ones((width, width)), "down": jnp.ones((width, width))}, jnp.ones((ROWS, width))


def profiled(folder, calls=3, fn=train, **options):
    step = spmdctx.parallel(fn, **{"parallel_mode": "semi_auto_parallel", "device_num": 4, **options})
    w, x = arguments()
    w = step(w, x)
    with step.profile(folder) as profile:
        began = time.perf_counter()
        for _ in range(calls):
            w = step(w, x)
        jax.block_until_ready(w)
        wall_s = time.perf_counter() - began
    return step, profile, wall_s


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    return folder, *profiled(folder)


def test_a_call_that_compiles_is_not_in_the_trace(tmp_path):
    step = spmdctx.parallel(train, parallel_mode="semi_auto_parallel", device_num=4)
    with pytest.raises(PlanError, match=r"twice or more"), step.profile(tmp_path / "one"):
        step(*arguments())
    step.clear_cache()
    w, x = arguments()
    with step.profile(tmp_path / "trace") as profile:
        for _ in range(3):
            w = step(w, x)
    assert (profile.num_calls, profile.notes) == (2, ())
    # All of it is in the trace, although nothing has waited for the calls.
    assert {row.count for row in profile.rows if row.kind is RowKind.COLLECTIVE} == {1}
    with step.profile(tmp_path / "other") as profile:
        step(*arguments())
        step(*arguments(128))
    assert profile.num_calls == 1
    assert "compiled the step" in profile.notes[0]


def union_ns(intervals):
    """The length of a union of intervals, counted in another way than the report's."""
    ordered, total, end = np.array(sorted(intervals)), 0.0, -np.inf
    for start, stop in ordered:
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def test_the_rows_add_up_to_the_time_in_which_a_device_was_busy(seen):
    folder, _, profile, wall_s = seen
    (path,) = glob.glob(f"{folder}/plugins/profile/*/*.xplane.pb")
    intervals = {}
    for plane in ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and stats["hlo_module"] != "jit_spmdctx_waits" and event.duration_ns:
                    intervals.setdefault(stats["device_ordinal"], []).append((event.start_ns, event.start_ns + event.duration_ns))
    busy_s = sum(map(union_ns, intervals.values())) / 1e9 / len(intervals) / 3
    assert sum(row.measured_s for row in profile.rows) == pytest.approx(profile.busy_s)
    assert profile.busy_s == pytest.approx(busy_s)
    assert profile.busy_s <= wall_s / 3 * 1.5
    assert (profile.num_calls, profile.num_devices) == (3, 4)


def test_source_lines_and_collectives_stand_beside_the_plan(seen):
    _, step, profile, _ = seen
    plan = step.plan(*arguments())
    compute = [row for row in profile.rows if row.kind is RowKind.COMPUTE]
    lines = [row.what for row in compute if row.planned_s and row.measured_s]
    assert any("(loss)" in what and "backward" not in what for what in lines)
    assert any("(loss), backward" in what for what in lines)
    planned = sum(row.planned_s or 0.0 for row in profile.rows if row.kind is not RowKind.COLLECTIVE)
    assert planned == pytest.approx(plan.cost.compute_s, rel=2e-3)
    (sums,) = [row for row in profile.rows if row.kind is RowKind.COLLECTIVE]
    assert sums.what == "all_reduce over data"
    assert sums.planned_s == pytest.approx(sum(row.time_s * row.repeats for row in plan.collectives))
    assert sums.measured_s > 0
    assert sums.ratio == pytest.approx(sums.planned_s / (sums.measured_s + sums.behind_s))


def test_the_products_take_most_of_the_measured_compute(seen):
    _, _, profile, _ = seen
    compute = sum(row.measured_s for row in profile.rows if row.kind is RowKind.COMPUTE)
    assert compute > 0.8 * sum(row.measured_s for row in profile.rows if row.kind is not RowKind.COLLECTIVE)


def test_the_report_reads_as_a_table_and_as_plain_data(seen):
    _, _, profile, _ = seen
    text = str(profile)
    assert text.startswith("train, 3 calls traced: a device is busy for ")
    assert "planned / measured" in text
    data = json.loads(json.dumps(profile.to_dict()))
    assert data["schema"] == "spmdctx.profile/1"
    assert sum(row["measured_s"] for row in data["rows"]) == pytest.approx(data["busy_s"])


def test_what_else_ran_has_a_row_of_its_own(tmp_path):
    step = spmdctx.parallel(train, parallel_mode="semi_auto_parallel", device_num=4)
    w, x = arguments()
    w = step(w, x)

    @jax.jit
    def elsewhere(x):
        return jnp.sin(x) @ x.T

    elsewhere(x)
    with step.profile(tmp_path) as profile:
        jax.block_until_ready((step(w, x), elsewhere(x)))
    (row,) = [row for row in profile.rows if "elsewhere" in row.what]
    assert (row.what, row.kind, row.planned_s) == ("other programs (jit_elsewhere)", RowKind.OTHER, None)
    assert row.measured_s > 0


def test_a_local_loss_has_rows_too(tmp_path):
    def local(w, x):
        gradients = spmdctx.value_and_grad(loss)(w, x)[1]
        return jax.tree.map(lambda own, gradient: own - 0.1 * gradient, w, gradients)

    _, profile, _ = profiled(tmp_path, fn=local, parallel_mode="data_parallel")
    assert any(row.planned_s and row.measured_s and "(loss)" in row.what for row in profile.rows)


def test_a_searched_step_with_an_optimizer_has_rows(tmp_path):
    tx = optax.adam(1e-3)
    w, x = arguments()

    def step(state, x):
        w, own = state
        updates, own = tx.update(jax.grad(loss)(w, x), own)
        return optax.apply_updates(w, updates), own

    made = spmdctx.parallel(step, parallel_mode="auto_parallel")
    state = made((w, tx.init(w)), x)
    with made.profile(tmp_path) as profile:
        jax.block_until_ready(made(state, x))
    assert profile.busy_s > 0
    assert sum(row.measured_s for row in profile.rows) == pytest.approx(profile.busy_s)


def test_without_a_call_there_is_nothing_to_say(tmp_path):
    step, _, _ = profiled(tmp_path / "one", calls=1)
    with pytest.raises(PlanError, match="No call of the step was traced"), step.profile(tmp_path / "two"):
        pass


def test_an_error_inside_stays_the_error(tmp_path):
    step = spmdctx.parallel(train, parallel_mode="semi_auto_parallel")
    with pytest.raises(ZeroDivisionError), step.profile(tmp_path):
        1 / 0  # noqa: B018  the error is all it is for
    with step.profile(tmp_path) as profile:
        step(*arguments())
        step(*arguments())
    assert profile.num_calls == 1


def test_a_backend_that_names_no_op_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("spmdctx.step.report.profile.read_events", lambda path: [])
    _, profile, _ = profiled(tmp_path, calls=1)
    assert profile.notes == ("The trace names no op of CPU devices, so that no time can be given.",)
    assert profile.busy_s == 0
    assert any(row.planned_s for row in profile.rows)


def events(*rows):
    return [Event("0", op, "jit_f", start, end) for op, start, end in rows]


@pytest.mark.parametrize(
    ("rows", "own"),
    [
        ([("a", 0, 10), ("b", 10, 30)], {"a": 10, "b": 20}),
        ([("loop", 0, 100), ("a", 10, 20), ("b", 30, 60)], {"loop": 60, "a": 10, "b": 30}),
        ([("sum", 0, 50), ("a", 20, 40)], {"sum": 30, "a": 20}),
        ([("a", 0, 50), ("sum", 20, 80)], {"a": 50, "sum": 30}),
        ([("a", 0, 50), ("a", 20, 40)], {"a": 50}),
    ],
    ids=["apart", "nested", "behind", "partly behind", "twice"],
)
def test_time_that_several_ops_share_counts_once(rows, own):
    ranks = {"loop": 0, "sum": 1}
    found = spent(events(*rows), lambda event: ranks.get(event.op, 2))
    assert {op: round(one.own_s * 1e9) for (_, op), one in found.items()} == own
    whole = {op: sum(end - start for name, start, end in rows if name == op) for op in own}
    assert {op: round((one.own_s + one.behind_s) * 1e9) for (_, op), one in found.items()} == whole


def test_devices_do_not_share_time():
    found = spent([Event("0", "a", "m", 0, 10), Event("1", "a", "m", 0, 10)], lambda event: 2)
    assert found["m", "a"].own_s == pytest.approx(20e-9)


HLO = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %all-reduce-start.1 = f32[8]{0} all-reduce-start(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
  %copy.2 = f32[8]{0} copy(%p)
  ROOT %dot.3 = f32[8]{0} dot(%p, %copy.2), metadata={op_name="jit(f)/transpose(jvp())/dot_general" source_file="/a/model.py" source_line=7}
}
"""


@pytest.mark.parametrize(
    ("module", "op", "row"),
    [
        ("jit_f", "all-reduce-start.1", (RowKind.COLLECTIVE, "all_reduce over model")),
        ("jit_f", "dot.3", (RowKind.COMPUTE, "model.py:7, backward")),
        ("jit_f", "copy.2", (RowKind.OTHER, "copy of the compiler's own, without a source line")),
        ("jit_f", "gone.4", (RowKind.OTHER, "ops that the program's text does not have")),
        ("jit_f", "", (RowKind.OTHER, "what the backend gives no name of an op")),
        ("jit_g", "dot.3", (RowKind.OTHER, "other programs (jit_g)")),
        ("", "dot.3", (RowKind.COMPUTE, "model.py:7, backward")),
    ],
)
def test_every_op_has_a_row(module, op, row):
    named = Named(read_module(HLO), "jit_f", LogicalMesh.of({"data": 2, "model": 2}))
    assert named.row(module, op) == row


class _Line:
    def __init__(self, name, *events):
        self.name, self.events = name, events


class _Event:
    def __init__(self, name, start_ns, duration_ns, **stats):
        self.name, self.start_ns, self.duration_ns, self.stats = name, start_ns, duration_ns, stats.items()


class _Plane:
    def __init__(self, name, *lines):
        self.name, self.lines = name, lines


PLANES = {
    "tpu": [
        _Plane(
            "/device:TPU:0",
            _Line("XLA Modules", _Event("jit_f(123)", 0, 100)),
            _Line("XLA Ops", _Event("%fusion.1 = f32[8]{0} fusion(%p)", 0, 40), _Event("%dot.3 = f32[8]{0} dot()", 40, 60)),
        ),
        _Plane("/host:CPU", _Line("python", _Event("step", 0, 500))),
    ],
    "gpu": [
        _Plane(
            "/device:GPU:0",
            _Line("Stream #1(Compute)", _Event("gemm_kernel", 0, 60, hlo_op="dot.3", hlo_module="jit_f", correlation_id=1)),
            _Line("Stream #2(Memcpy)", _Event("MemcpyD2D", 60, 40, correlation_id=2)),
            _Line("Launch Stats", _Event("occupancy", 0, 60)),
        )
    ],
}


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        ("tpu", [("/device:TPU:0", "fusion.1", ""), ("/device:TPU:0", "dot.3", "")]),
        ("gpu", [("/device:GPU:0", "dot.3", "jit_f"), ("/device:GPU:0", "", "")]),
    ],
)
def test_traces_of_accelerators_are_read(backend, found, monkeypatch):
    """Made by hand, after traces of such devices."""
    monkeypatch.setattr(trace.ProfileData, "from_file", lambda path: type("Data", (), {"planes": PLANES[backend]}), raising=False)
    assert [event[:3] for event in trace.read_events("any")] == found
