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
import optax
import pytest
from flax import nnx
from jax import lax

import spmdctx
from spmdctx.errors import ContextError, PlanError, UnsupportedError
from tests.audit.compile_only import need_gpu, need_tpu
from tests.step.export.exported import as_pytrees, bits, collectives, compared, loaded
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


def marked(params, x):
    return jnp.mean(spmdctx.shard(lambda x, w: jnp.tanh(x @ w), in_strategy=((2, 1), (1, 4)))(x, params["w0"]) ** 2)


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


def half(params, x):
    """Rows of a table and a product in bfloat16, whose gradients are reduced in float32."""
    table, x = params["table"].astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    rows = table[(jnp.abs(x[:, :8]) * 64).astype(jnp.int32) % 64].sum(1)
    return jnp.mean(((x + rows) @ params["w"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)


def in_parts(loss):
    """Gradients of micro-batches, added up by a loop of the user's own."""

    def step(params, x):
        def add(sums, part):
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, part)), None

        sums, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), x.reshape(4, -1, x.shape[-1]))
        return jax.tree.map(lambda old, new: old - 0.1 * new, params, sums)

    return step


HALF = {"table": weights(64, 64), "w": weights(64, 64, seed=1)}
PARAMS, X = {"w": weights(4, 64, 64)}, weights(32, 64)
CHAIN = {f"w{place}": weights(64, 64, seed=place) for place in range(3)}
IGNORED = pytest.mark.filterwarnings("ignore:Buckets of gradients have no effect")
UNMARKED = pytest.mark.filterwarnings("ignore:shard")
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
        pytest.param(marked, CHAIN, {"parallel_mode": "semi_auto_parallel"}, marks=UNMARKED, id="marks"),
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


@pytest.mark.parametrize("is_widened", [True, False])
@pytest.mark.parametrize("made", [descending, in_parts])
def test_gradients_of_low_precision_compile_and_compute_the_same(tmp_path, made, is_widened):
    step = made(half)
    split = spmdctx.parallel(step, parallel_mode="data_parallel", gradient_fp32_sync=is_widened)
    plan = split.plan(HALF, X)
    plan.export("jax", tmp_path / "m.py")
    exported = loaded(tmp_path / "m.py")["parallel"](step)
    assert collectives(exported.lower(HALF, X).compile(), plan) == collectives(split.lower(HALF, X).compile(), plan)
    jax.tree.map(np.testing.assert_array_equal, exported(HALF, X), split(HALF, X))


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


def transposed(params, x):
    """The same equations and shapes with other parameters."""
    for name in sorted(params):
        x = jnp.tanh(lax.dot_general(x, params[name], (((1,), (1,)), ((), ()))))
    return jnp.mean(x**2)


@pytest.mark.parametrize("other", [changed_activation, one_more_product, transposed])
def test_another_step_is_refused(tmp_path, other):
    spmdctx.parallel(descending(chain), **QUICK).plan(CHAIN, X).export("jax", tmp_path / "m.py")
    with pytest.raises(ValueError, match=r"not the one that was exported: (equation|it has other equations)"):
        loaded(tmp_path / "m.py")["parallel"](descending(other))(CHAIN, X)


def test_other_numbers_in_a_step_are_none_of_its_form(tmp_path):
    def step(rate):
        return lambda params, x: (jax.tree.map(lambda own: own * rate, params), chain(params, x))

    spmdctx.parallel(step(0.9), **QUICK).plan(CHAIN, X).export("jax", tmp_path / "m.py")
    found, _ = loaded(tmp_path / "m.py")["parallel"](step(0.5))(CHAIN, X)
    np.testing.assert_array_equal(found["w0"], CHAIN["w0"] * 0.5)


def test_numbers_of_python_among_the_results_are_those_of_the_step_that_runs(tmp_path):
    def step(*numbers):
        return lambda params, x: ({"loss": chain(params, x)}, None, *numbers)

    split = spmdctx.parallel(step(1, 2.5, True, float("nan")), **QUICK)
    split.plan(CHAIN, X).export("jax", tmp_path / "m.py")
    module = loaded(tmp_path / "m.py")
    found, wanted = module["parallel"](step(1, 2.5, True, float("nan")))(CHAIN, X), split(CHAIN, X)
    assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type), found) == jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type), wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert [float(one) for one in module["parallel"](step(3, 0.5, False, 7.0))(CHAIN, X)[2:]] == [3, 0.5, 0, 7]


@pytest.mark.parametrize(
    "change",
    [
        lambda params, value: (params, value, value),
        lambda params, value: params,
        lambda params, value: (value, params),
        lambda params, value: (params, jnp.sin(value)),
        lambda params, value: (params, 3),
        lambda params, value: (params, value, "text"),
    ],
)
def test_a_step_that_changed_is_refused_before_and_after_its_export(tmp_path, change):
    changes = [lambda params, value: (params, value)]

    def step(params, x):
        return changes[-1](params, chain(params, x))

    plan = spmdctx.parallel(step, **QUICK).plan(CHAIN, X)
    plan.export("jax", tmp_path / "m.py")
    changes.append(change)
    with pytest.raises(PlanError, match="has changed since"):
        plan.export("jax", tmp_path / "other.py")
    with pytest.raises(ValueError, match="not the one that was exported"):
        loaded(tmp_path / "m.py")["parallel"](step)(CHAIN, X)


@pytest.mark.parametrize("args", [(CHAIN, "text"), (CHAIN, X[:16]), ({**CHAIN, "w3": CHAIN["w0"]}, X), (CHAIN, X.astype(jnp.bfloat16))])
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
    assert not path.exists()


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    page = page.replace('jax.config.update("jax_num_cpu_devices", 8)', "")  # they are there already
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(compile(block, "export.md", "exec"), names)
    assert dict(names["exported"].AXES) == names["rules"].MESH


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """A module whose activation is a leaf, as in Equinox."""

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in ("activation", "weight")], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(leaves[1], leaves[0])


def test_functions_in_modules_are_arguments_too(tmp_path):
    def step(modules, x):
        for module in modules:
            x = module.activation(x @ module.weight)
        return [Module(module.weight * 0.9, module.activation) for module in modules], jnp.mean(x)

    modules = [Module(CHAIN["w0"], jnp.tanh), Module(CHAIN["w1"], jnp.sin)]
    split = spmdctx.parallel(step, **QUICK)
    split.plan(modules, X).export("jax", tmp_path / "m.py")
    exported = loaded(tmp_path / "m.py")["parallel"](step)
    found, wanted = exported(modules, X), split(modules, X)
    assert [module.activation for module in found[0]] == [jnp.tanh, jnp.sin]
    np.testing.assert_array_equal(found[0][1].weight, wanted[0][1].weight)
    np.testing.assert_array_equal(found[1], wanted[1])
    with pytest.raises(ValueError, match="not the one that was exported"):
        exported([Module(CHAIN["w0"], jnp.tanh), Module(CHAIN["w1"], jnp.cos)], X)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(11)])
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return jnp.mean(self.dropout(x) ** 2)

    def train(self, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: model(x))(self)
        optimizer.update(self, grads)
        return value


def test_a_method_of_a_module_becomes_a_function_of_its_state(tmp_path):
    model = Layer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    split = spmdctx.parallel(model.train, donate_argnums=0, **QUICK)
    split.plan(optimizer, X).export("jax", tmp_path / "m.py")
    module = loaded(tmp_path / "m.py")
    assert "nnx.split((self, optimizer))" in module["__doc__"]
    functional, args = as_pytrees(Layer.train, (model, optimizer, X), 2)
    exported = module["parallel"](functional)
    state, _ = exported(*jax.tree.map(jnp.copy, args))
    state, value = exported(state, X)
    split(optimizer, X)
    np.testing.assert_array_equal(value, split(optimizer, X))
    wanted = nnx.state((model, optimizer))
    for found, other in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(bits(found), bits(other))


def test_state_that_a_step_only_reads_comes_back_as_it_is(tmp_path):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    model.kernel.set_metadata(out_sharding=("a", "b"))

    def evaluate(model, x):
        return nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)[0]

    options = {"mesh": {"rows": 2, "columns": 4}, "rules": {"a": "rows", "b": "columns"}}
    split = spmdctx.parallel(evaluate, **QUICK, **options)
    plan = split.plan(model, X)
    plan.export("jax", tmp_path / "m.py")
    functional, args = as_pytrees(evaluate, (model, X), 1)
    exported = loaded(tmp_path / "m.py")["parallel"](functional)
    assert collectives(exported.lower(*args).compile(), plan) == collectives(split.lower(model, X).compile(), plan)
    state, value = exported(*args)
    np.testing.assert_array_equal(value, split(model, X))
    assert jax.tree.leaves(state)[1].sharding.spec == jax.P("rows", "columns")


def test_nnx_objects_that_a_module_cannot_hand_back_are_named(tmp_path):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    with pytest.raises(UnsupportedError, match="inside of other arguments"):
        spmdctx.parallel(lambda models, x: models[0](x), **QUICK).plan((model,), X).export("jax", tmp_path / "m.py")
    with pytest.raises(UnsupportedError, match="makes nnx objects"):
        spmdctx.parallel(lambda model, x: (nnx.clone(model), model(x)), **QUICK).plan(model, X).export("jax", tmp_path / "m.py")


def test_a_plan_for_more_devices_than_are_there_is_exported(tmp_path):
    plan = spmdctx.plan(descending(chain), CHAIN, jnp.ones((128, 64)), device_num=64, topology="tpu-v5p", **QUICK)
    plan.export("jax", tmp_path / "m.py")
    module = loaded(tmp_path / "m.py")
    assert module["AXES"] == plan.mesh
    with pytest.raises(ValueError, match="needs 64 devices"):
        module["parallel"](descending(chain))


def test_static_arguments_are_bound_first(tmp_path):
    def step(params, x, power):
        return params, jnp.mean(chain(params, x) ** power)

    spmdctx.parallel(step, static_argnames="power", **QUICK).plan(CHAIN, X, power=3).export("jax", tmp_path / "m.py")
    assert "power" in textwrap.dedent(loaded(tmp_path / "m.py")["__doc__"])
    result = loaded(tmp_path / "m.py")["parallel"](lambda params, x: step(params, x, 3))(CHAIN, X)
    np.testing.assert_allclose(result[1], step(CHAIN, X, 3)[1], rtol=1e-5)
