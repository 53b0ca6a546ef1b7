"""Random programs as Python source, from a seed: what `benchmarks.fuzz` runs on one device and on many.

A program is a function `step` of arrays. It is made line by line; JAX says what each line returns, and lines that it refuses are left out.
Values are *exact* where every way to run the program gives the same bits. Only these are rounded, compared, sorted or counted, since a
last bit decides there. For the others `eps` is the precision of the coarsest type on the way to them.
"""

from __future__ import annotations

import math
import random
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import spmdctx

MOST_ELEMENTS, MOST_RANK = 2048, 5
EPS = {"float32": 1.2e-7, "complex64": 1.2e-7, "float16": 1e-3, "bfloat16": 8e-3, "float8_e4m3fn": 0.125, "float8_e5m2": 0.25}
SIZES = (1, 2, 3, 4, 5, 7, 8, 8, 16, 24)
FLOATS = ("float32", "float32", "float32", "float32", "bfloat16", "float16")
INTEGERS = ("int32", "int32", "int8", "uint8", "uint32", "int16")
_NAMES = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "spmdctx": spmdctx}
_KEY = jax.eval_shape(lambda: jax.random.key(0)).dtype
HEADER = """import jax, jax.numpy as jnp, numpy as np, spmdctx
from jax import lax

def arg(seed, shape, dtype):
    r = np.random.default_rng(seed)
    if dtype == "key":
        return jax.random.key(seed)
    if dtype == "bool":
        return jnp.asarray(r.random(shape) < 0.5)
    if dtype.startswith(("int", "uint")):
        return jnp.asarray(np.asarray(r.integers(0, 7, shape)).astype(dtype))
    return jnp.asarray(np.asarray(r.normal(size=shape)).astype(jnp.dtype(dtype)))
"""


class Var(NamedTuple):
    """A variable of the program; see the module's docstring for `exact` and `eps`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    exact: bool
    eps: float
    depends: bool = True
    """Whether an argument may change it: XLA folds what is left."""

    @property
    def is_float(self) -> bool:
        return self.dtype in EPS and self.dtype != "complex64"

    @property
    def is_int(self) -> bool:
        return self.dtype.startswith(("int", "uint"))

    @property
    def is_key(self) -> bool:
        return self.dtype.startswith("key")

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Argument(NamedTuple):
    """An argument of the program: its values come from a seed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    seed: int

    @property
    def source(self) -> str:
        return f"arg({self.seed}, {self.shape}, {self.dtype!r})"


@dataclass
class Program:
    """A finished program: its source, its arguments, the precision of each result, and what is special about it."""

    source: str
    arguments: list[Argument]
    eps: list[float]
    tags: set[str]

    @property
    def bytes(self) -> int:
        """The bytes of all arguments."""
        return sum(math.prod(one.shape) * (8 if one.dtype == "key" else jnp.dtype(one.dtype).itemsize) for one in self.arguments)

    def script(self, options: str = "") -> str:
        """Returns a script that makes the arguments and runs the program on one device, and on many if options are given."""
        made = ", ".join(argument.source for argument in self.arguments)
        many = f"print(spmdctx.parallel(step, {options})(*args))\n" if options else ""
        return f"{HEADER}\n{self.source}\nargs = ({made}{',' if made else ''})\nprint(jax.jit(step)(*args))\n{many}"

    def load(self) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
        """Returns the function, and what makes its arguments."""
        names = dict(_NAMES)
        exec(compile(HEADER + self.source, "fuzz_program", "exec"), names)
        return names["step"], lambda: tuple([eval(argument.source, names) for argument in self.arguments])


@dataclass
class Maker:
    """The state that all blocks of a program share."""

    random: random.Random
    arguments: list[Argument] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)
    count: int = 0
    lines_left: int = 0
    batch: int = 8

    def name(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"


class Block:
    """A function's body that is being written. It sees its own variables and those of the functions around it."""

    def __init__(self, maker: Maker, around: Sequence[Var] = (), depth: int = 0) -> None:
        self.maker, self.random, self.depth = maker, maker.random, depth
        self.lines: list[str] = []
        self.vars = list(around)
        self.own: list[Var] = []

    def add(self, var: Var) -> Var:
        """Makes a variable visible."""
        self.vars.append(var)
        self.own.append(var)
        return var

    def argument(self, shape: tuple[int, ...], dtype: str) -> Var:
        """Returns a new argument of the program, which every block sees that is made later."""
        self.maker.count += 1
        one = Argument(f"a{self.maker.count}", shape, dtype, self.random.randrange(1 << 20))
        self.maker.arguments.append(one)
        var = Var(one.name, shape, "key<fry>" if dtype == "key" else dtype, True, EPS.get(dtype, 0.0))
        self.vars.append(var)
        return var

    def pick(self, fits: Callable[[Var], bool] = lambda var: True) -> Var | None:
        """Returns a variable that fits; late ones and those of this block are likelier."""
        found = [var for var in self.vars if fits(var)]
        if not found:
            return None
        return found[-1 - min(int(self.random.expovariate(0.35)), len(found) - 1)]

    def float(self, rank: int = 0, exact: bool = False) -> Var | None:
        """Returns a float variable of at least some rank."""
        return self.pick(lambda var: var.is_float and len(var.shape) >= rank and (var.exact or not exact) and EPS[var.dtype] < 0.1)

    def array(self, rank: int = 0) -> Var | None:
        """Returns a variable of any type but keys."""
        return self.pick(lambda var: not var.is_key and len(var.shape) >= rank)

    def let(self, expression: str, *operands: Var, exact: bool = False, before: Sequence[str] = ()) -> list[Var]:
        """Adds a line that names the results of an expression; adds nothing if JAX refuses it or a result is too large.

        Args:
            expression: Python source of an array or a tuple of arrays.
            operands: what the results depend on.
            exact: the results have the same bits wherever they are computed, if those of the operands have.
            before: lines that define the functions that the expression calls.
        """
        shapes = self._types([*before, f"_r = {expression}"])
        if shapes is None or not shapes or any(math.prod(one.shape) > MOST_ELEMENTS or len(one.shape) > MOST_RANK for one in shapes):
            return []
        eps = max((operand.eps for operand in operands), default=0.0)
        is_exact = exact and all(operand.exact for operand in operands)
        depends = any(operand.depends for operand in operands)
        found = []
        for one in shapes:
            dtype = str(one.dtype)
            certain = is_exact or dtype == "bool" or dtype.startswith(("int", "uint"))
            found.append(Var(self.maker.name(), tuple(one.shape), dtype, certain or "key" in dtype, max(eps, EPS.get(dtype, 0.0)), depends))
        names = ", ".join(var.name for var in found)
        self.lines += [*before, f"{names}{',' if isinstance(shapes, tuple) and len(shapes) == 1 else ''} = {expression}"]
        self.maker.lines_left -= 1
        return [self.add(var) for var in found]

    def _types(self, lines: Sequence[str]) -> list[Any] | tuple[Any, ...] | None:
        visible = list({var.name: var for var in self.vars}.values())
        source = f"def _f({', '.join(var.name for var in visible)}):\n{textwrap.indent(chr(10).join(lines), '    ')}\n    return _r"
        names = dict(_NAMES)
        structs = [_struct(var.shape, var.dtype) for var in visible]
        try:
            exec(source, names)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = jax.eval_shape(names["_f"], *structs)
        except Exception:
            return None
        if isinstance(found, jax.ShapeDtypeStruct):
            return [found]
        return tuple(found) if isinstance(found, tuple | list) and all(isinstance(one, jax.ShapeDtypeStruct) for one in found) else None


def indented(lines: Sequence[str]) -> list[str]:
    """Returns the lines of a function's body."""
    return textwrap.indent("\n".join(lines), "    ").split("\n")


def make_program(seed: str, moves: Sequence[tuple[int, Callable[[Block], object]]]) -> Program:
    """Returns the program of a seed: the first that JAX takes as a whole.

    Args:
        seed: any text.
        moves: what may be added to a block, with weights.
    """
    for attempt in range(50):
        made = _attempt(random.Random(f"{seed} {attempt}"), moves)
        if made is not None:
            return made
    raise RuntimeError(f"no program for {seed}")


def _attempt(rng: random.Random, moves: Sequence[tuple[int, Callable[[Block], object]]]) -> Program | None:
    maker = Maker(rng, batch=rng.choice((8, 8, 16, 16, 24)))
    is_training = rng.random() < 0.35
    block = Block(maker)
    for _ in range(rng.randint(1, 4)):
        block.argument(_shape(maker), rng.choice(FLOATS))
    if rng.random() < 0.5:
        block.argument(_shape(maker), rng.choice((*INTEGERS, "bool")))
    if rng.random() < 0.25:
        block.argument((), "key")
    maker.lines_left = count = rng.randint(5, 40 if rng.random() < 0.3 else 16)
    fill(block, count, moves)
    source, eps = _training(block) if is_training else _plain(block)
    program = Program(source, list(maker.arguments), eps, set(maker.tags))
    return program if eps and _runs(program) else None


def fill(block: Block, count: int, moves: Sequence[tuple[int, Callable[[Block], object]]]) -> None:
    """Adds about `count` random moves to a block."""
    weights, functions = zip(*moves, strict=True)
    before = len(block.own)
    for _ in range(3 * count):
        if len(block.own) - before >= count or block.maker.lines_left <= 0:
            break
        block.random.choices(functions, weights)[0](block)


def _shape(maker: Maker) -> tuple[int, ...]:
    rng = maker.random
    rank = rng.choices((0, 1, 2, 3, 4), (1, 2, 5, 3, 1))[0]
    shape = [rng.choice(SIZES) for _ in range(rank)]
    if rank and rng.random() < 0.6:
        shape[0] = maker.batch
    if rank and rng.random() < 0.02:
        shape[rng.randrange(rank)] = 0
        maker.tags.add("zero size")
    while math.prod(shape) > MOST_ELEMENTS:
        shape[shape.index(max(shape))] //= 2
    return tuple(shape)


def _results(block: Block) -> list[Var]:
    """Returns the last variables and a few of the others."""
    own = [var for var in block.own if not var.is_key and var.depends]
    return [*own[-2:], *block.random.sample(own[:-2], min(2, max(len(own) - 2, 0)))]


def _plain(block: Block) -> tuple[str, list[float]]:
    results = _results(block)
    names = ", ".join(argument.name for argument in block.maker.arguments)
    returned = f"return ({', '.join(var.name for var in results)},)"
    return f"def step({names}):\n" + "\n".join(indented([*block.lines, returned])) + "\n", [var.eps for var in results]


def _training(block: Block) -> tuple[str, list[float]]:
    """Writes a step that takes a dictionary of weights, and returns the next ones, a loss and more results."""
    arguments = block.maker.arguments
    floats = [one for one in arguments if one.dtype in EPS and EPS[one.dtype] < 0.1]
    weights = floats[:1] + [one for one in floats[1:] if block.random.random() < 0.6]
    results = [var for var in _results(block) if var.is_float]
    if not results or not weights:
        return _plain(block)
    rest = [one for one in arguments if one not in weights]
    terms = " + ".join(f"jnp.mean(jnp.square({var.name}.astype(jnp.float32)))" for var in results)
    loss = [f"{one.name} = p[{one.name!r}]" for one in weights] + [*block.lines, f"return {terms}, {results[-1].name}"]
    taken = "".join(f", {one.name}" for one in rest)
    lines = [
        "def loss(p):",
        *indented(loss),
        f"p = dict({', '.join(f'{one.name}={one.name}' for one in weights)})",
        "(l, more), g = jax.value_and_grad(loss, has_aux=True)(p)",
        "return jax.tree.map(lambda w, d: w - (0.1 * d).astype(w.dtype), p, g), l, more",
    ]
    named = ", ".join(one.name for one in weights)
    eps = max([var.eps for var in results] + [EPS[one.dtype] for one in weights])
    arguments[:] = [*weights, *rest]
    block.maker.tags.add("training")
    return f"def step({named}{taken}):\n" + "\n".join(indented(lines)) + "\n", [eps] * (len(weights) + 2)


def _struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, _KEY if dtype.startswith("key") else dtype)


def _runs(program: Program) -> bool:
    """Returns whether JAX takes a program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.eval_shape(program.load()[0], *[_struct(one.shape, one.dtype) for one in program.arguments])
    except Exception:
        return False
    return True
