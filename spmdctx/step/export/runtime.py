"""The code of an exported module: it writes the tables into the step that it is given.

Exports copy what is below MARK, together with `blocks`; both need JAX alone.

An exported module has tables of its own in place of the empty ones here.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.extend.core as jexc
from jax.sharding import NamedSharding, PartitionSpec

from spmdctx.step.export.blocks import primitive, run_rows, scalar

P = PartitionSpec
AXES: dict[str, int] = {}
TRACED_ON: dict[str, int] = {}
ARGUMENT_NAMES: tuple[str, ...] = ()
INPUTS: tuple[Any, ...] = ()
OUTPUTS: tuple[Any, ...] = ()
DONATED: tuple[str, ...] = ()
COMPILER_OPTIONS: dict[str, Any] = {}
DIGEST = ""
JAX_VERSION = ""
EDITS: dict[str, dict[str, Any]] = {}

# MARK


def mesh(devices: Any = None) -> jax.sharding.Mesh:
    """Returns the mesh, over the first of `devices` (default: all that JAX has) in their order."""
    count = 1
    for size in AXES.values():
        count *= size
    found = list(jax.devices() if devices is None else devices)
    if len(found) < count:
        raise ValueError(f"The step needs {count} devices, and there are {len(found)}.")
    grid = found[:count]
    for size in reversed(list(AXES.values())[1:]):
        grid = [grid[start : start + size] for start in range(0, len(grid), size)]
    return jax.sharding.Mesh(grid, tuple(AXES), axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def parallel(step: Any, devices: Any = None) -> Parallel:
    """Returns the step as a jitted function, split as the tables say: call it, or `.lower(...)` it, as a function of jax.jit.

    It must be the step that was exported, and its arguments must have the same shapes; another step raises a ValueError.
    """
    return Parallel(step, mesh(devices))


class Parallel:
    """The step, split over a mesh. The first call traces and compiles it."""

    def __init__(self, step: Any, placed: jax.sharding.Mesh) -> None:
        self.step, self.mesh = step, placed
        self.in_shardings = [NamedSharding(placed, spec) for _, _, spec in INPUTS]
        self.out_shardings = [NamedSharding(placed, spec) for _, _, spec in OUTPUTS]
        self._known: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        leaves, jitted, result = self._prepared(args, kwargs)
        return filled(result, jitted(*map(_placed, leaves, self.in_shardings)))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step, which then takes its arguments as flat leaves; arguments may be abstract."""
        leaves, jitted, _ = self._prepared(args, kwargs)
        types = [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf) for leaf in leaves]
        lowered: jax.stages.Lowered = jitted.lower(*[jax.ShapeDtypeStruct(own.shape, own.dtype, weak_type=own.weak_type) for own in types])
        return lowered

    def _prepared(self, args: Any, kwargs: Any) -> tuple[list[Any], Any, Any]:
        paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        arrays = [(path, leaf) for path, leaf in paths if not callable(leaf)]
        leaves, key = [leaf for _, leaf in arrays], (tree, functions([leaf for _, leaf in paths]))
        if key not in self._known:
            for place, (path, leaf) in enumerate(arrays):
                _check_leaf(place, _name(path), leaf)
            if len(leaves) != len(INPUTS):
                raise ValueError(f"The step that was exported takes {len(INPUTS)} arrays, and not {len(leaves)}.")
            try:
                closed, result = traced(self.step, leaves, key, TRACED_ON)
            except TypeError as error:
                raise ValueError(_OTHER.format(f"it cannot be traced ({error})")) from error
            program = jexc.jaxpr_as_fun(rewritten(closed, self.mesh))
            self._known[key] = self._jitted(program), result
        return leaves, *self._known[key]

    def _jitted(self, program: Any) -> Any:
        return jax.jit(
            lambda *leaves: tuple(program(*leaves)),
            in_shardings=tuple(self.in_shardings),
            out_shardings=tuple(self.out_shardings),
            donate_argnums=tuple(place for place, (path, *_) in enumerate(INPUTS) if path in DONATED),
            compiler_options=COMPILER_OPTIONS or None,
        )


def _name(path: Any) -> str:
    """Returns the path of an argument's leaf, such as `state/params/w`."""
    positional, argument, *inner = path
    first = (
        ARGUMENT_NAMES[argument.idx]
        if positional.idx == 0 and argument.idx < len(ARGUMENT_NAMES)
        else jax.tree_util.keystr((argument,), simple=True)
    )
    return "/".join([first, *[jax.tree_util.keystr((key,), simple=True) for key in inner]])


def _check_leaf(place: int, path: str, leaf: Any) -> None:
    try:
        found = type_text(jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf)
    except TypeError:
        found = f"of type {type(leaf).__name__}"
    wanted, type_, _ = INPUTS[place] if place < len(INPUTS) else ("nothing", "nothing", None)
    if (path, found) != (wanted, type_):
        raise ValueError(f"Argument leaf {place} is not the one of the step that was exported: {path} {found}, and not {wanted} {type_}.")


def _placed(leaf: Any, sharding: Any) -> Any:
    stays = not isinstance(leaf, jax.Array) or not leaf.committed or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    return leaf if stays else jax.device_put(leaf, sharding)


def type_text(aval: Any) -> str:
    """Returns a type as text, such as `float32[8,128]`."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]" if hasattr(aval, "shape") else str(aval)


def functions(leaves: Any) -> Any:
    """Returns the functions among the leaves of a tree, by their places, such as the activations of a module."""
    return tuple((place, leaf) for place, leaf in enumerate(leaves) if callable(leaf))


def filled(form: Any, arrays: Any) -> Any:
    """Returns a tree with arrays in it; its form is its structure and its functions."""
    leaves = list(arrays)
    for place, function in form[1]:
        leaves.insert(place, function)
    return jax.tree.unflatten(form[0], leaves)


def traced(step: Any, leaves: Any, form: Any, axes: Any) -> tuple[Any, Any]:
    """Returns the step as a closed jaxpr of flat leaves, and its result's structure; `axes` are those of the mesh that is set."""
    results: list[Any] = []

    def flat(*own: Any) -> Any:
        args, kwargs = filled(form, own)
        found, result = jax.tree.flatten(step(*args, **kwargs))
        results.append((result, functions(found)))
        return [leaf for leaf in found if not callable(leaf)]

    if not axes:
        return jax.make_jaxpr(flat)(*leaves), results[0]
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)):
        return jax.make_jaxpr(flat)(*leaves), results[0]


# A body is numbered: its equations from 0, those of calls in the caller's row. Values are named "in.0" (an input), "const.0", "12" (the
# result of equation 12) or "12.1" (its second one). The step's own constraints are names for their operands, as the tables have them all.

DISSOLVED = {
    **dict.fromkeys(("jit", "pjit", "composite"), "jaxpr"),
    **dict.fromkeys(("call", "core_call", "closed_call", "core_closed_call", "eval_jaxpr"), "call_jaxpr"),
    "remat_opt": "fwd_jaxpr",
}
HELD = {
    **dict.fromkeys(("scan", "checkpoint", "remat", "remat2", "jit", "pjit", "xla_metadata_call", "compute_on"), ("jaxpr",)),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "closed_call"), ("call_jaxpr",)),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "custom_vmap_call": ("call",),
    "linear_call": ("callee",),
}
RENAMING = frozenset({"sharding_constraint", "reshard", "spmdctx_shard", "spmdctx_loss"})  # the last are marks, if a step has any


class Numbered:
    """A body with numbers: `lines` has (equation, names of its operands or literals, names of its results)."""

    def __init__(self, jaxpr: Any, same: Any = RENAMING) -> None:
        self.jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        self.lines: list[tuple[Any, list[Any], list[str]]] = []
        self.renamed: list[tuple[Any, Any]] = []
        self.inputs = {
            **{f"const.{place}": var for place, var in enumerate(self.jaxpr.constvars)},
            **{f"in.{place}": var for place, var in enumerate(self.jaxpr.invars)},
        }
        self._same = same
        self.results = self._walk(self.jaxpr, {var: name for name, var in self.inputs.items()})

    def _walk(self, jaxpr: Any, names: dict[Any, Any]) -> list[Any]:
        def read(atom: Any) -> Any:
            return atom if isinstance(atom, jexc.Literal) else names[atom]

        for eqn in jaxpr.eqns:
            operands, kind = [read(atom) for atom in eqn.invars], eqn.primitive.name
            body = eqn.params.get(DISSOLVED.get(kind, ""))
            if kind in self._same:
                results = operands[:1]
                self.renamed.append((eqn, *results))
            elif body is not None and not getattr(body, "consts", ()):
                inner = getattr(body, "jaxpr", body)
                results = self._walk(inner, dict(zip(inner.invars, operands, strict=True)))
            else:
                number = len(self.lines)
                results = [f"{number}.{place}" if place else f"{number}" for place in range(len(eqn.outvars))]
                self.lines.append((eqn, operands, results))
            names.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def text(self, number: int) -> str:
        """Describes an equation: its primitive, the type of its first result, its name scope."""
        eqn = self.lines[number][0]
        types = [type_text(var.aval) for var in eqn.outvars[:1]]
        return " ".join([eqn.primitive.name, *types, *filter(None, [str(eqn.source_info.name_stack)])])


def bodies(eqn: Any) -> list[tuple[str, int, Any]]:
    """Returns the bodies that an equation holds: the parameter, the place in it, the body."""
    found = []
    for name in HELD.get(eqn.primitive.name, ()):
        held = eqn.params.get(name)
        for place, body in enumerate(held if isinstance(held, (tuple, list)) else (held,)):
            if hasattr(getattr(body, "jaxpr", body), "eqns"):
                found.append((name, place, body))
    return found


def digest(numbered: Numbered) -> str:
    """Returns a digest of a body: primitives with plain parameters, who reads what, types, and the same of the bodies inside."""
    rows = [type_text(var.aval) for var in numbered.inputs.values()]
    for eqn, operands, _ in numbered.lines:
        read = [name if isinstance(name, str) else type_text(name.aval) for name in operands]
        rows += [eqn.primitive.name, *read, *[type_text(var.aval) for var in eqn.outvars]]
        rows += [f"{name}={_plain(value)}" for name, value in sorted(eqn.params.items()) if name != "name"]
        rows += [digest(Numbered(body)) for _, _, body in bodies(eqn)]
    rows += [name if isinstance(name, str) else type_text(name.aval) for name in numbered.results]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def fixed(numbered: Numbered, rows: Any) -> str:
    """Returns a digest of the numbers in equations that no row runs: those of losses that each device computes by itself."""
    run = {number for kind, *row in rows for number in (range(*row) if kind == "run" else row[:1] if kind == "equation" else ())}
    found: list[str] = []

    def add(lines: Any) -> None:
        for eqn, operands, _ in lines:
            found.extend(repr(scalar(name.val, name.aval.dtype)) for name in operands if not isinstance(name, str))
            for _, _, body in bodies(eqn):
                add(Numbered(body).lines)

    add([line for number, line in enumerate(numbered.lines) if number not in run])
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _plain(value: Any) -> str:
    """Returns the text of a number, a word, a type or a tuple of them; other parameters have none."""
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_plain, value))})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return str(getattr(value, "name", "")) if hasattr(value, "itemsize") or hasattr(value, "value") else ""


def rewritten(closed: Any, placed: Any) -> Any:
    """Returns the step's program with everything that the tables say written into it.

    Raises:
        ValueError: the step is not the one that was exported.
    """
    body = Writer(closed.jaxpr, "", placed)
    if digest(body.numbered) != DIGEST:
        body.check()
        raise ValueError(_OTHER.format(f"it has other equations, or other shapes ({len(body.numbered.lines)} equations)"))
    return jexc.ClosedJaxpr(body.written(), closed.consts)


_OTHER = (
    "This step is not the one that was exported: {}. A step is exported for its code, its shapes and a version of JAX "
    f"({JAX_VERSION}, and here {jax.__version__}): export it again."
)


class Writer:
    """Writes one body anew, row by row of its table; a body without a table comes back with its calls dissolved."""

    def __init__(self, body: Any, key: str, placed: Any) -> None:
        self.numbered, self.key, self.mesh = Numbered(body), key, placed
        whole = {"rows": (("run", 0, len(self.numbered.lines)),), "results": self.numbered.results}
        self.table = EDITS.get(key, whole)
        self.values: dict[str, Any] = dict(self.numbered.inputs)
        self.templates: dict[Any, Any] = {}
        self.eqns: list[Any] = []

    def check(self) -> None:
        """Compares what the table says of equations with the equations."""
        for kind, *row in self.table["rows"]:
            text = row[-1] if kind in ("equation", "constrain") else ""
            if not text:
                continue
            number = int(str(row[0]).partition(":")[0].partition(".")[0])
            found = self.numbered.text(number) if number < len(self.numbered.lines) else "nothing"
            if found != text:
                raise ValueError(_OTHER.format(f"equation {self.key}{number} is {found!r}, and was {text!r}"))

    def written(self) -> Any:
        """Returns the new body, open."""
        inputs = []
        for place, var in enumerate(self.numbered.jaxpr.invars):
            other = self.table.get("inputs", {}).get(place)
            inputs.append(var if other is None else jexc.Var(var.aval.update(shape=other)))
            self.values[f"in.{place}"] = inputs[-1]
        for kind, *row in self.table["rows"]:
            getattr(self, kind)(*row)
        if "fixed" in self.table and self.table["fixed"] != fixed(self.numbered, self.table["rows"]):
            raise ValueError(_OTHER.format("a number in a loss is another one, which each device computes by itself"))
        results = [self.atom(own if name is None else name) for name, own in zip(self.table["results"], self.numbered.results, strict=True)]
        return self.numbered.jaxpr.replace(invars=inputs, eqns=self.eqns, outvars=results)

    def atom(self, name: Any) -> Any:
        """Returns the variable of a name, or a literal for a number with its type."""
        if isinstance(name, str):
            return self.values[name]
        if isinstance(name, tuple):
            return jexc.Literal(scalar(*name), jax.core.ShapedArray((), jax.numpy.dtype(name[1])))
        return name

    def run(self, first: int, stop: int) -> None:
        """Runs equations as they are."""
        for number in range(first, stop):
            self.equation(number)

    def same(self, name: str, other: str) -> None:
        """Takes a value for another that is equal."""
        self.values[name] = self.atom(other)

    def equation(self, number: int, changed: Any = None, text: str = "") -> None:
        """Runs an equation on other operands (`reads`), with other parameters, shapes of results (`shapes`) or names for them (`to`)."""
        changed = changed or {}
        eqn, operands, results = self.numbered.lines[number]
        params = {**eqn.params, **changed.get("params", {})}
        for name, place, body in bodies(eqn):
            inner = Writer(body, f"{self.key}{number}/{name}.{place}/", self.mesh).written()
            if hasattr(body, "consts"):
                inner = jexc.ClosedJaxpr(inner, body.consts)
            held = params[name]
            params[name] = type(held)([*held[:place], inner, *held[place + 1 :]]) if isinstance(held, (tuple, list)) else inner
        fresh = []
        for place, var in enumerate(eqn.outvars):
            shape = changed.get("shapes", {}).get(place)
            fresh.append(jexc.Var(var.aval if shape is None else var.aval.update(shape=shape)))
        reads = changed.get("reads", {})
        invars = [self.atom(reads.get(place, name)) for place, name in enumerate(operands)]
        self.eqns.append(eqn.replace(invars=invars, outvars=fresh, params=params))
        self.values.update(zip(changed.get("to", results), fresh, strict=True))

    def constrain(self, name: str, spec: Any, to: str | None = None, text: str = "") -> None:
        """Constrains a value to a sharding: from here on for all readers, or as a value `to` of its own."""
        sharding = NamedSharding(self.mesh, spec)
        self._write(
            lambda value: jax.lax.with_sharding_constraint(value, sharding), [name], [to or name], (str(self.atom(name).aval), spec)
        )

    def barrier(self, names: Any, to: Any) -> None:
        """Makes some values wait for each other."""
        self._write(lambda *values: jax.lax.optimization_barrier(values), names, to)

    def apply(self, kind: str, operands: Any, params: Any, to: Any) -> None:
        """Runs an operation of JAX that the step does not have."""
        self._write(lambda *values: primitive(kind).bind(*values, **params), operands, to)

    def local(self, operands: Any, specs: Any, axes: Any, rows: Any, results: Any, to: Any) -> None:
        """Runs operations of JAX on each device's block."""
        placing: Any = {"mesh": self.mesh, "in_specs": specs[0], "out_specs": specs[1], "axis_names": set(axes), "check_vma": False}
        mapped = jax.shard_map(lambda *own: run_rows(rows, results, own), **placing)
        self._write(mapped, operands, to)

    def _write(self, function: Any, operands: Any, to: Any, key: Any = None) -> None:
        """Writes the one equation of a function; those of one `key` are alike."""
        atoms = [self.atom(name) for name in operands]
        template = self.templates.get(key)
        if template is None:
            shapes = [jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype, weak_type=one.aval.weak_type) for one in atoms]
            (template,) = jax.make_jaxpr(function)(*shapes).jaxpr.eqns
            if key is not None:
                self.templates[key] = template
        info = self.eqns[-1].source_info if self.eqns else template.source_info
        fresh = [jexc.Var(var.aval) for var in template.outvars]
        self.eqns.append(template.replace(invars=atoms, outvars=fresh, source_info=info))
        self.values.update(zip(to, fresh, strict=True))
