"""A fingerprint is that of the program: not of the terminal, of print options, of hash seeds or of what was traced before."""

import os
import pty
import subprocess
import sys
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from nbclient import NotebookClient

from spmdctx.trace.build.canonical import Canonical
from tests.road import trace

ROOT = str(Path(__file__).parents[3])
X = jnp.linspace(0.0, 1.0, 128).reshape(8, 16)
TABLE = np.arange(2000)


@jax.custom_batching.sequential_vmap
def held(x):
    return x + TABLE.sum()


def step(x):
    """Ops of many kinds of parameters: numbers of gathers, scatters and convolutions, bodies, names of functions, print options."""
    x = x - jax.grad(lambda x: (x[jnp.array([1, 2])] ** 2).sum())(x)
    image = lax.conv_general_dilated(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME", precision="highest")
    largest = lax.reduce(image[0, 0], -jnp.inf, lambda a, b: jnp.maximum(a, b * 1.5), (0,))
    windows = lax.reduce_window(x, 0.0, lambda a, b: a + b / 3, (2, 2), (1, 1), "SAME")
    x = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + windows
    jax.debug.print("{x}", x=x[0, 0])
    noise = jax.random.gamma(jax.random.key(0), 2.0, x.shape) + jax.random.normal(jax.random.key(1), x.shape)
    x = lax.scan(jax.checkpoint(lambda c, _: (jnp.take(c, TABLE % 8, axis=0).sum(0) + c, None)), x, None, length=2)[0]
    return lax.sort((x + noise, x), num_keys=2), largest, held(x).at[TABLE % 8].max(0.5)


def fingerprint(function=step):
    return trace(function, X).graph.fingerprint


SCRIPT = f"from {__name__} import fingerprint; print('fingerprint', fingerprint(), 'end')"


def printed(text):
    return text.split("fingerprint ")[1].split(" end")[0]


def environment(**given):
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT, **given}


def on_a_terminal():
    """The fingerprint as a process prints it that has a terminal, 40 letters wide."""
    parent, child = pty.openpty()
    env = environment(PYTHONHASHSEED="1", COLUMNS="40", TERM="xterm-256color")
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=child, stdout=child, stderr=child, env=env, close_fds=True)
    os.close(child)
    text = b""
    try:
        while part := os.read(parent, 4096):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(parent)
    assert process.wait(60) == 0, text.decode()
    return printed(text.decode())


def in_a_pipe():
    env = environment(PYTHONHASHSEED="2", COLUMNS="200", NO_COLOR="1")
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True, timeout=120)
    return printed(done.stdout)


def in_a_kernel(monkeypatch, path):
    for name, value in environment(IPYTHONDIR=str(path), PYDEVD_DISABLE_FILE_VALIDATION="1").items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(f"import numpy as np; np.set_printoptions(threshold=3)\n{SCRIPT}")]
    )
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(path)}}).execute()
    return printed("".join(output.text for output in notebook.cells[0].outputs if output.output_type == "stream"))


def test_a_terminal_a_pipe_and_a_kernel_give_one_fingerprint(monkeypatch, tmp_path):
    own = fingerprint()
    assert on_a_terminal() == own
    assert in_a_pipe() == own
    assert in_a_kernel(monkeypatch, tmp_path) == own


@pytest.mark.parametrize("has_color", [False, True])
def test_colors_of_jax_change_no_fingerprint(has_color):
    own = fingerprint()
    before = jax.config.jax_pprint_use_color
    jax.config.update("jax_pprint_use_color", has_color)
    try:
        assert fingerprint() == own
    finally:
        jax.config.update("jax_pprint_use_color", before)


@pytest.mark.parametrize("options", [{"threshold": 2}, {"precision": 1, "suppress": True}, {"legacy": "1.25"}, {"linewidth": 20}])
def test_print_options_of_numpy_change_no_fingerprint(options):
    own = fingerprint()
    with np.printoptions(**options):
        assert fingerprint() == own


def test_what_jax_forgets_between_traces_changes_no_fingerprint():
    def twice(x):
        x = x.at[jnp.array([1])].add(1.0)
        if forgets:
            jax.clear_caches()
        return x.at[jnp.array([2])].add(2.0)

    forgets = False
    own = fingerprint(twice)
    forgets = True
    assert fingerprint(twice) == own


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * 1.00000001e-3, (0,)),
            lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * 1e-3, (0,)),
        ),
        (lambda x: jnp.take(x, TABLE % 8, axis=0, mode="clip"), lambda x: jnp.take(x, TABLE % 8, axis=0, mode="wrap")),
        (lambda x: x.at[0].add(1.0), lambda x: x.at[0].mul(1.0)),
        (partial(lax.dot, X.T, precision="highest"), partial(lax.dot, X.T, precision="default")),
    ],
    ids=["body", "mode", "combiner", "precision"],
)
def test_a_parameter_that_prints_alike_or_not_is_in_the_fingerprint(one, other):
    with np.printoptions(precision=2, threshold=2):
        assert fingerprint(one) != fingerprint(other)


class Color(Enum):
    RED = 1


class Number(IntEnum):
    ONE = 1


class Pair(NamedTuple):
    a: object
    b: object


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


def with_array(place):
    """A body that holds an array of which NumPy prints the ends only."""
    array = np.zeros(2000, np.float32)
    array[place] = 1e-9
    return jax.make_jaxpr(lambda x: x + jnp.asarray(array))(X[0, 0])


def mesh(kind):
    return AbstractMesh((2, 4), ("a", "b"), axis_types=(kind, kind))


FORMS = [
    *(None, True, False, 1, 0, 1.0, 0.0, -0.0, float("nan"), 1j, "1", b"\x31", (), [], (1,), [1], (1, (2,)), ((1, 2),), ((1,), 2)),
    *({1}, {1, 2}, {"a": 1}, {"a": 2}, {"b": 1}, slice(1, 2), range(1, 2), slice(1, 2, 1), Color.RED, Number.ONE, Color, Number),
    *(np.float32(1), np.zeros(2), np.zeros((2, 1)), np.zeros(2, np.float32), np.array([0.0, -0.0]), jnp.zeros(2, jnp.bfloat16)),
    *(np.dtype("float32"), np.float32, jnp.bfloat16.dtype, jax.random.key(0).dtype, jax.random.key(0), jax.random.key(1)),
    *(Pair(1, 2), Pair(2, 1), Slots(1), Slots(2), lax.Precision.HIGH, jax.tree.structure([1]), jax.tree.structure((1,)), lax.add_p),
    *(P("a"), P(None, "a"), P(("a", "b")), mesh(AxisType.Auto), mesh(AxisType.Explicit), NamedSharding(mesh(AxisType.Auto), P("a"))),
    *(jax.typeof(X), jax.typeof(X[0]), jax.make_jaxpr(jnp.sin)(X), jax.make_jaxpr(jnp.cos)(X), jax.make_jaxpr(jnp.sin)(X[0]), jnp.sin),
    *(with_array(1000), with_array(1001)),
]


def test_values_of_different_structure_have_different_forms():
    forms = {Canonical().form(value).text for value in FORMS}
    assert len(forms) == len(FORMS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: jax.make_jaxpr(step)(X),
        lambda: frozenset(f"name{number}" for number in range(50)),
        lambda: lambda: None,
        lambda: SingleDeviceSharding(jax.devices()[0]),
        lambda: Slots(object()),
        lambda: {"b": 1, "a": [np.ones(3)]},
        lambda: partial(jnp.sin, out=None),
    ],
    ids=["jaxpr", "set", "function", "placement", "object", "mapping", "partial"],
)
def test_equal_values_have_one_form(make):
    one, other = make(), make()
    assert Canonical().form(one) == Canonical().form(other)


def test_a_mapping_has_one_form_in_every_order():
    assert Canonical().form({"a": 1, "b": 2}) == Canonical().form({"b": 2, "a": 1})


def test_a_set_has_one_form_in_every_order():
    names = [f"name{number}" for number in range(50)]
    assert Canonical().form(set(names)) == Canonical().form(frozenset(reversed(names)))


@pytest.mark.parametrize(("value", "is_exact"), [((1, "a", X), True), (jax.make_jaxpr(jnp.sin)(X), True), ((lambda: 1,), False)])
def test_a_form_is_exact_unless_it_holds_a_name_alone(value, is_exact):
    canonical = Canonical()
    assert canonical.form((value,)).is_exact is is_exact
    assert canonical.form(1).is_exact


def test_a_structure_that_holds_itself_has_a_form():
    value = Slots(None)
    value.held = [value]
    assert Canonical().form(value)
