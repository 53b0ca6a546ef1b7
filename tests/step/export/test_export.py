"""Modules that `plan.export("jax")` writes: the same compiled collectives and numbers, without spmdctx."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmdctx
from spmdctx.errors import ContextError, PlanError, UnsupportedError
from tests.audit.compile_only import need_gpu, need_tpu
from tests.step.export.exported import collectives, compared, loaded
from tests.zoo import case


def weights(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)


def descending(loss):
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda old, new: old - 0.1 * new, params, grads), value

    return step


def chain(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def scanned(params, x):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jnp.mean(lax.scan(layer, x, params["w"])[0] ** 2)


def branching(params, x):
    x = x @ params["w"][0]
    x = lax.cond(x.sum() > 0, lambda x: x @ params["w"][1], lambda x: jnp.sin(x) @ params["w"][2], x)
    return jnp.mean(lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ params["w"][3]), x) ** 2)


def recurrent(params, x):
    """Each iteration adds to the gradients of the weights, which are reduced once behind the loop."""
    state, _ = lax.scan(lambda state, row: (jnp.tanh(state @ params["w"] + row @ params["u"]), None), x, jnp.stack([x, 2 * x, x]))
    return jnp.mean(state**2)


def ranked(params, x):
    return jnp.mean(lax.top_k(x @ params["w"][0], 4)[0] * jnp.sort(x, -1)[:, :4])


PARAMS, X = {"w": weights(4, 64, 64)}, weights(32, 64)
CHAIN = {f"w{place}": weights(64, 64, seed=place) for place in range(3)}
IGNORED = pytest.mark.filterwarnings("ignore:Buckets of gradients have no effect")
QUICK = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"}


@pytest.mark.parametrize(("name", "flavor"), [("mlp", "pytree"), ("gnn", "linen"), ("tied", "nnx")])
def test_a_model_of_the_zoo_compiles_and_computes_the_same(tmp_path, name, flavor):
    own, others, is_same = compared(
        case(name, flavor), tmp_path / "m.py", jax.devices(), "cpu", runs=True, search_mode="sharding_propagation"
    )
    assert own == others
    assert sum(own.values())
    assert is_same


@pytest.mark.parametrize(("make", "topology"), [(need_tpu, "tpu-v5e"), (need_gpu, "h100")])
def test_it_compiles_the_same_for_tpu_and_gpu(tmp_path, make, topology):
    own, others, _ = compared(case("mlp", "linen"), tmp_path / "m.py", make(), topology, runs=False, search_mode="sharding_propagation")
    assert own == others
    assert sum(own.values())


@pytest.mark.parametrize(
    ("loss", "params", "options"),
    [
        pytest.param(scanned, PARAMS, {}, id="scan-remat"),
        pytest.param(branching, PARAMS, {}, id="branches"),
        pytest.param(ranked, PARAMS, {}, id="blocks"),
        pytest.param(recurrent, {"w": weights(64, 64), "u": weights(64, 64)}, {}, id="loop-sums"),
        pytest.param(chain, CHAIN, {"parallel_mode": "data_parallel", "all_reduce_fusion_config": [1]}, marks=IGNORED, id="buckets"),
        pytest.param(chain, CHAIN, {"parallel_mode": "semi_auto_parallel", "enable_parallel_optimizer": True}, id="optimizer"),
        pytest.param(chain, CHAIN, {"mesh": {"rows": 2, "columns": 4}}, id="mesh"),
    ],
)
def test_forms_of_steps_compile_and_compute_the_same(tmp_path, loss, params, options):
    step = descending(loss)
    split = spmdctx.parallel(step, **(options if "parallel_mode" in options else {**QUICK, **options}))
    plan = split.plan(params, X)
    plan.export("jax", tmp_path / "m.py")
    exported = loaded(tmp_path / "m.py")["parallel"](step)
    assert collectives(exported.lower(params, X).compile(), plan) == collectives(split.lower(params, X).compile(), plan)
    jax.tree.map(np.testing.assert_array_equal, exported(params, X), split(params, X))


def test_a_mesh_that_the_steps_own_constraints_name_is_set(tmp_path):
    def loss(params, x):
        return chain(params, lax.with_sharding_constraint(x, jax.P("rows", None)))

    step = descending(loss)
    plan = spmdctx.parallel(step, mesh={"rows": 2, "columns": 4}, **QUICK).plan(CHAIN, X)
    plan.export("jax", tmp_path / "m.py")
    result = loaded(tmp_path / "m.py")["parallel"](step)(CHAIN, X)
    np.testing.assert_allclose(result[1], chain(CHAIN, X), rtol=1e-5)


MODEL = """
import jax
import jax.numpy as jnp

def step(params, x):
    def loss(params):
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda old, new: old - 0.1 * new, params, grads), value

def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"up": jax.random.normal(keys[0], (64, 256)), "down": jax.random.normal(keys[1], (256, 64))}
    return params, jax.random.normal(keys[2], (32, 64))
"""

ALONE = """
import sys

class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("spmdctx", "flax", "optax"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import exported, model

step = exported.parallel(model.step)
state, batch = model.arguments()
for _ in range(3):
    state, loss = step(state, batch)
print(float(loss).hex(), state["up"].sharding.spec == exported.INPUTS[1][2])
"""


def test_an_exported_module_runs_without_spmdctx(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    model: dict = {}
    exec(MODEL, model)
    split = spmdctx.parallel(model["step"], donate_argnums=0, **QUICK)
    state, batch = model["arguments"]()
    split.plan(state, batch).export("jax", tmp_path / "exported.py")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    for _ in range(3):
        state, loss = split(state, batch)
    assert done.stdout.split() == [float(loss).hex(), "True"]


def test_a_module_imports_jax_alone_and_says_what_it_is(tmp_path):
    step = descending(chain)
    plan = spmdctx.parallel(step, donate_argnums=0, **QUICK).plan(CHAIN, X)
    plan.export("jax", tmp_path / "m.py")
    text = (tmp_path / "m.py").read_text()
    imported = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"__future__", "hashlib", "typing", "jax"}
    module = loaded(tmp_path / "m.py")
    assert module["AXES"] == plan.mesh
    assert [path for path, *_ in module["INPUTS"]] == ["params/w0", "params/w1", "params/w2", "argument1"]
    assert module["DONATED"] == ("params/w0", "params/w1", "params/w2")
    assert dict(module["mesh"]().shape) == plan.mesh


def changed_activation(params, x):
    for name in sorted(params):
        x = jnp.sin(x @ params[name])
    return jnp.mean(x**2)


def one_more_product(params, x):
    return chain(params, x @ params["w0"])


@pytest.mark.parametrize("other", [changed_activation, one_more_product])
def test_another_step_is_refused(tmp_path, other):
    spmdctx.parallel(descending(chain), **QUICK).plan(CHAIN, X).export("jax", tmp_path / "m.py")
    with pytest.raises(ValueError, match=r"not the one that was exported: (equation|it has other equations)"):
        loaded(tmp_path / "m.py")["parallel"](descending(other))(CHAIN, X)


@pytest.mark.parametrize("args", [(CHAIN, X[:16]), ({**CHAIN, "w3": CHAIN["w0"]}, X), (CHAIN, X.astype(jnp.bfloat16))])
def test_arguments_of_other_shapes_are_refused(tmp_path, args):
    spmdctx.parallel(descending(chain), **QUICK).plan(CHAIN, X).export("jax", tmp_path / "m.py")
    with pytest.raises(ValueError, match=r"Argument leaf|takes 4 arrays"):
        loaded(tmp_path / "m.py")["parallel"](descending(chain))(*args)


def test_what_cannot_be_exported_is_named(tmp_path):
    path = tmp_path / "m.py"
    plan = spmdctx.parallel(descending(chain), **QUICK).plan(CHAIN, X)
    with pytest.raises(ContextError, match="no such export"):
        plan.export("flax", path)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="does not hold"):
        spmdctx.Plan.load(tmp_path / "plan.json").export("jax", path)

    def local(params, x):
        value, grads = spmdctx.value_and_grad(lambda params: chain(params, x))(params)
        return jax.tree.map(lambda old, new: old - 0.1 * new, params, grads), value

    with pytest.raises(UnsupportedError, match="gradient options"):
        spmdctx.parallel(local, parallel_mode="data_parallel").plan(CHAIN, X).export("jax", path)
    assert not path.exists()


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(compile(block, "export.md", "exec"), names)
    assert dict(names["exported"].AXES) == names["rules"].MESH


def test_static_arguments_are_bound_first(tmp_path):
    def step(params, x, power):
        return params, jnp.mean(chain(params, x) ** power)

    spmdctx.parallel(step, static_argnames="power", **QUICK).plan(CHAIN, X, power=3).export("jax", tmp_path / "m.py")
    assert "power" in textwrap.dedent(loaded(tmp_path / "m.py")["__doc__"])
    result = loaded(tmp_path / "m.py")["parallel"](lambda params, x: step(params, x, 3))(CHAIN, X)
    np.testing.assert_allclose(result[1], step(CHAIN, X, 3)[1], rtol=1e-5)
