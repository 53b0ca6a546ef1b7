"""Searched plans against the rule tables of public projects and against templates, judged on compiled TPU programs.

    python -m benchmarks.public_tables [--only decoder] [--topology v5e:2x4] [--memory-gib 8 | --tight] [--details] [--cache FOLDER]

The programs (`public_models`, `public_science`) name the dimensions of weights and values as their projects do. A table says which mesh
axes split a name, and on which mesh: those of the projects, dp, ZeRO-1, -2 and -3, tensor parallelism and mixes. Weights and values are
pinned as the table says; ZeRO-3 templates gather a layer's weights where it uses them, and from ZeRO-2 on gradients are pinned as the
optimizer state is. Every program is judged by the roofline of its scheduled instructions; one that exceeds the memory counts as none.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import public_models, public_science
from benchmarks.judge_compile import Built, Job, Judged, judge_parser, judged
from benchmarks.public_models import Marks, Public
from benchmarks.templates import Spec, constrain, partition_spec, path_of, split_over_data

MODULE = "benchmarks.public_tables"
PROGRAMS: dict[str, Callable[[], Public]] = {
    name: getattr(module, name)
    for module, names in ((public_models, "decoder moe_dense moe_ragged vit dit unet haiku"), (public_science, "evoformer gnn"))
    for name in names.split()
} | {
    "decoder_scan": partial(public_models.decoder, layers=4, scan=True),
    "decoder_few": partial(public_models.decoder, batch=4, length=4096),
}
Rules = Mapping[str, tuple[str, ...]]


class Table(NamedTuple):
    """Which mesh axes split dimensions of a name, first those of weights, then those of values; `zero` is the ZeRO stage of a template."""

    mesh: Mapping[str, int]
    weights: Rules
    values: Rules
    zero: int = 0


def template(program: Public, data: int, model: int, zero: int = 0) -> Table:
    """Slices of the batch (of a graph: of its edges and nodes) and of the weights."""
    split = dict.fromkeys(program.tensor, ("model",))
    return Table({"data": data, "model": model}, split, split | dict.fromkeys(("batch", "batch_no_exp", "nodes", "edges"), ("data",)), zero)


def _maxtext(**mesh: int) -> Table:
    """Batch over data, fsdp and expert, length over context; embed of weights over fsdp, expert and context, of values over tensor."""
    wide = dict.fromkeys(("heads", "mlp", "vocab"), ("tensor",))
    rows = {"batch": ("data", "fsdp", "expert"), "batch_no_exp": ("data", "fsdp"), "length": ("context",)}
    weights = {**wide, "exp": ("expert",), "embed": ("fsdp", "expert", "context")}
    return Table(mesh, weights, {**wide, **rows, "embed": ("tensor",), "exp": ("expert",)})


def _easylm(**mesh: int) -> Table:
    """Every kernel over fsdp by one dimension and over mp by the other; values by batch over fsdp, by heads and mlp over mp."""
    wide = dict.fromkeys(("heads", "mlp", "vocab"), ("mp",))
    return Table(mesh, {**wide, "embed": ("fsdp",)}, {**wide, "batch": ("fsdp",)})


def _t5x(**mesh: int) -> Table:
    """Weights by heads, mlp and vocab over model, by embed over data; values' embed over model too (two-dimensional rules)."""
    wide = dict.fromkeys(("heads", "mlp", "vocab"), ("model",))
    return Table(mesh, {**wide, "embed": ("data",)}, {**wide, "batch": ("data",), "embed": ("model",)})


def _diffusion(**mesh: int) -> Table:
    """MaxDiffusion's: batch over data and fsdp, embed and a convolution's input over fsdp, heads, mlp and its output over tensor."""
    wide = dict.fromkeys(("heads", "mlp", "out"), ("tensor",))
    return Table(mesh, {**wide, "embed": ("fsdp",), "in": ("fsdp",)}, {**wide, "batch": ("data", "fsdp")})


def _axial(**mesh: int) -> Table:
    """FastFold's axial split: alignments by rows, but by columns while rows attend; pairs by their left end; whole weights."""
    return Table(mesh, {}, {"batch": ("data",), **dict.fromkeys(("rows", "columns", "left"), ("axial",))})


def _edges(**mesh: int) -> Table:
    """Messages are split, nodes whole, as in Jraph's example of a graph over devices."""
    return Table(mesh, {}, {"edges": ("data",)})


_DECODERS = {
    "maxtext fsdp8": _maxtext(fsdp=8),
    "maxtext fsdp4 tensor2": _maxtext(fsdp=4, tensor=2),
    "maxtext tensor8": _maxtext(tensor=8),
    "maxtext fsdp4 context2": _maxtext(fsdp=4, context=2),
    "easylm fsdp8": _easylm(fsdp=8, mp=1),
    "easylm fsdp4 mp2": _easylm(fsdp=4, mp=2),
    "t5x 2d data4 model2": _t5x(data=4, model=2),
}
_MIXTURES = {
    "maxtext fsdp8": _maxtext(fsdp=8),
    "maxtext expert8": _maxtext(expert=8),
    "maxtext fsdp2 expert4": _maxtext(fsdp=2, expert=4),
    "maxtext data2 expert4": _maxtext(data=2, expert=4),
    "maxtext fsdp4 tensor2": _maxtext(fsdp=4, tensor=2),
}
_PICTURES = {"maxdiffusion fsdp8": _diffusion(fsdp=8), "maxdiffusion fsdp4 tensor2": _diffusion(fsdp=4, tensor=2)}
OWN: dict[str, dict[str, Table]] = {
    **dict.fromkeys(("decoder", "decoder_scan", "decoder_few"), _DECODERS),
    "moe_dense": _MIXTURES,
    "moe_ragged": {name: table for name, table in _MIXTURES.items() if "expert" not in name},
    "vit": {"t5x 2d data4 model2": _t5x(data=4, model=2), "maxtext fsdp8": _maxtext(fsdp=8)},
    "dit": _PICTURES,
    "unet": _PICTURES,
    "haiku": {"maxtext fsdp8": _maxtext(fsdp=8), "t5x 2d data4 model2": _t5x(data=4, model=2)},
    "evoformer": {"fastfold axial8": _axial(data=1, axial=8), "fastfold data4 axial2": _axial(data=4, axial=2)},
    "gnn": {"jraph edges8": _edges(data=8)},
}
"""The projects' tables. big_vision's are dp and ZeRO-3, Mesh Transformer JAX's those of tensor parallelism, AlphaFold's dp."""


def tables(name: str) -> dict[str, Table]:
    """Every table for a program, by its name; templates on meshes of eight."""
    program = PROGRAMS[name]()
    found = dict(OWN[name])
    for data, model in ((8, 1), (4, 2), (2, 4), (1, 8)):
        for zero in (0, 1, 2, 3) if model == 1 else (0, 2, 3) if model == 2 else (0,):
            words = [f"zero{zero}_{data}" if zero else f"dp{data}"] if data > 1 else []
            found["_".join(words + ([f"tp{model}"] if model > 1 else []))] = template(program, data, model, zero)
    return found


def spec_of(names: str, shape: Sequence[int], rules: Rules, mesh: Mapping[str, int]) -> Spec:
    """The mesh axes of each dimension: those of its name that exist, are free, and divide it."""
    taken: set[str] = set()
    spec: list[tuple[str, ...]] = [()] * len(shape)
    # Names with an axis of their own come before those that take what is left.
    for place, name in sorted(enumerate(names.split()), key=lambda item: item[1] == "embed"):
        axes = tuple(axis for axis in rules.get(name, ()) if mesh.get(axis, 1) > 1 and axis not in taken)
        if axes and shape[place] % math.prod(mesh[axis] for axis in axes) == 0:
            spec[place] = axes
            taken.update(axes)
    return tuple(spec)


class Pins(Marks):
    """Pins weights and values as a table says."""

    def __init__(self, program: Public, table: Table, mesh: Mesh) -> None:
        super().__init__(program.dtype)
        self.program, self.table, self.mesh = program, table, mesh

    def use(self, weights: Any) -> Any:
        """Cast first: what a ZeRO-3 template gathers is narrow."""
        cast = super().use(weights)
        if self.table.zero < 3:
            return cast
        return jax.tree_util.tree_map_with_path(lambda path, leaf: constrain(leaf, self.mesh, self.used(path_of(path), leaf.shape)), cast)

    def __call__(self, x: Any, names: str) -> Any:
        """Pinned where the table knows the names."""
        return constrain(x, self.mesh, spec_of(names, x.shape, self.table.values, self.table.mesh))

    def on_rows(self, fn: Callable[..., Any], weights: Any, *rows: Any) -> Any:
        """Each device runs its own rows, on whole experts."""
        (axes,) = spec_of("batch", rows[0].shape[:1], self.table.values, self.table.mesh)
        if not axes:
            return fn(self, weights, *rows)
        run = partial(fn, Marks(self.program.dtype) if len(axes) == sum(size > 1 for size in self.table.mesh.values()) else self)
        split = PartitionSpec(axes or None)
        kept = (PartitionSpec(), *[split] * len(rows))
        return jax.shard_map(run, mesh=self.mesh, in_specs=kept, out_specs=split, axis_names=set(axes), check_vma=False)(weights, *rows)

    def used(self, path: str, shape: Sequence[int]) -> Spec:
        """How layers use a weight."""
        named = (names for end, names in self.program.names.items() if path == end or path.endswith(f"/{end}"))
        names = next(named, "").split()
        return spec_of(" ".join(["."] * (len(shape) - len(names)) + names), shape, self.table.weights, self.table.mesh)

    def stored(self, path: str, shape: Sequence[int], zero: int) -> Spec:
        """The same, and split over `data` from this ZeRO stage on."""
        spec = self.used(path, shape)
        return split_over_data(spec, shape, self.table.mesh["data"]) if self.table.zero >= zero else spec

    def tree(self, tree: Any, zero: int) -> Any:
        """Shardings of a tree's leaves."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: NamedSharding(self.mesh, partition_spec(self.stored(path_of(path), leaf.shape, zero))), tree
        )


Program = tuple[Callable[..., Any], tuple[Any, ...]]


def training_step(program: Public, mark: Marks) -> Program:
    """A step of AdamW and its abstract arguments."""
    tool = optax.adamw(1e-4)
    weights = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"), program.weights, is_leaf=lambda node: isinstance(node, tuple)
    )

    def step(state: tuple[Any, Any], *batch: Any) -> tuple[tuple[Any, Any], Any]:
        loss, gradients = jax.value_and_grad(lambda weights: program.loss(mark, weights, *batch))(state[0])
        if isinstance(mark, Pins) and mark.table.zero >= 2:
            gradients = jax.lax.with_sharding_constraint(gradients, mark.tree(gradients, 2))
        updates, moments = tool.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), loss

    return step, ((weights, jax.eval_shape(tool.init, weights)), *(one for one, _ in program.batch))


def lower_table(program: Public, table: Table, devices: Sequence[Any]) -> jax.stages.Lowered:
    """The step under a table, its state donated."""
    mesh = Mesh(np.array(devices).reshape(*table.mesh.values()), tuple(table.mesh))
    pins = Pins(program, table, mesh)
    step, (state, *batch) = training_step(program, pins)
    stored = pins.tree(state[0], 3), pins.tree(state[1], 1)
    rows = [NamedSharding(mesh, partition_spec(spec_of(names, one.shape, table.values, table.mesh))) for one, names in program.batch]
    return jax.jit(step, in_shardings=(stored, *rows), out_shardings=(stored, None), donate_argnums=0).lower(state, *batch)


def build(job: Job) -> Built:
    """The program under a table, or as it is planned."""
    from spmdctx.lowering.compile_only import tpu_devices

    program, devices = PROGRAMS[job["program"]](), tpu_devices(job["topology"])
    if "table" in job:
        return Built(lower_table(program, tables(job["program"])[job["table"]], devices), devices)
    run, arguments = planned_step(job, program, devices)
    return Built(run.lower(*arguments), devices, run.plan(*arguments))


def planned_step(job: Job, program: Public, devices: Any) -> tuple[Any, tuple[Any, ...]]:
    """The searched step, and its arguments."""
    import spmdctx

    step, arguments = training_step(program, Marks(program.dtype))
    # As the tables do: gradients are reduced in their own type.
    spmdctx.set_auto_parallel_context(gradient_fp32_sync=False)
    kind = f"tpu-{job['topology'].split(':')[0]}"
    options = {"parallel_mode": "auto_parallel", "search_mode": "dynamic_programming", "memory_bytes": job["memory_bytes"]}
    return spmdctx.parallel(step, devices=devices, topology=kind, donate_argnums=0, **options), arguments


def main() -> int:
    """Prints every program's figures, then the table."""
    from spmdctx.machine.presets import topology

    parser = judge_parser(__doc__)
    parser.add_argument("--tables", default="", metavar="REGEX", help="tables whose name it matches")
    parser.add_argument("--memory-gib", type=float, help="budget per device; default the device's memory")
    parser.add_argument("--tight", action="store_true", help="budgets 15 %% above the second least peak of the tables")
    parser.add_argument("--again", action="store_true", help="judge searched plans once more, with the planner as it is now")
    parser.add_argument("--details", action="store_true", help="collectives, planned and judged, of the plan and the best table")
    chosen = parser.parse_args()
    whole = topology(f"tpu-{chosen.topology.split(':')[0]}").memory_bytes
    rows = []
    for name in (name for name in PROGRAMS if re.search(chosen.only, name)):
        start: Job = {"topology": chosen.topology, "program": name}
        ways = {one: {**start, "table": one} for one in tables(name) if re.search(chosen.tables, one)}
        found = {one: judged(job, MODULE, chosen.cache, codegen=False) for one, job in ways.items()}
        limit = int(chosen.memory_gib * 2**30) if chosen.memory_gib else _tight(found) if chosen.tight else whole
        ours = judged({**start, "memory_bytes": limit}, MODULE, chosen.cache, codegen=False, again=chosen.again)
        best = min(found, key=lambda one: seconds(found[one], limit))
        rows.append(_row(name, limit, ours, best, found[best]))
        print("\n".join([name, *(_line(one, way, limit) for one, way in _sorted({**found, "ours": ours}, limit))]), flush=True)
        if chosen.details:
            print(_details(ours, found[best]), flush=True)
    print("program, GiB, ours ms, planned / judged, best table, its ms, ours / best", *rows, sep="\n")
    return 0


def _tight(found: Mapping[str, Judged]) -> int:
    """Bytes in which two of the ways fit, and by how much a planned peak may be off."""
    return int(1.15 * sorted({way.judgement.peak_bytes for way in found.values() if way.judgement})[1])


def _row(name: str, limit: int, ours: Judged, best: str, table: Judged) -> str:
    own, against = seconds(ours, limit), seconds(table, limit)
    foreseen = f"{ours.planned['total_s'] / own:.2f}" if ours.planned else "none"
    ratio = f"{own / against:.3f}" if math.isfinite(against) else "no table fits"
    return f"{name}, {limit / 2**30:.2f}, {own * 1e3:.2f}, {foreseen}, {best}, {against * 1e3:.2f}, {ratio}"


def seconds(way: Judged, limit: int) -> float:
    """Step time by the roofline; infinite where there is no program within the memory."""
    made = way.judgement
    return math.inf if made is None or made.peak_bytes > limit else made.roofline_s


def _sorted(ways: Mapping[str, Judged], limit: int) -> list[tuple[str, Judged]]:
    return sorted(ways.items(), key=lambda item: seconds(item[1], limit))


def _line(name: str, way: Judged, limit: int) -> str:
    made = way.judgement
    if made is None:
        return f"  {name:<28} {way.error}"
    planned = f", planned {way.planned['total_s'] * 1e3:.2f} ms, {way.planned['memory_bytes'] / 2**30:.2f} GiB" if way.planned else ""
    over = " EXCEEDS THE MEMORY" if made.peak_bytes > limit else ""
    time = f"{made.roofline_s * 1e3:9.2f} ms ({made.roofline_exposed_s * 1e3:8.2f} exposed)"
    return f"  {name:<28} {time} {made.peak_bytes / 2**30:6.2f} GiB{planned}{over}"


def _details(ours: Judged, best: Judged) -> str:
    plan = ours.planned
    if not plan:
        return ""
    lines = [f"  planned: mesh {plan['mesh']}, compute {plan['compute_s'] * 1e3:.2f} ms"]
    lines += [f"    {kind} {one}" for kind in ("unplanned", "missing") for one in plan[kind]]
    lines += [
        f"    {kind:<20} {row['count']:5.0f} x {row['payload_bytes'] / 2**20:9.1f} MiB {row['seconds'] * 1e3:8.2f} ms"
        for kind, row in plan["collectives"].items()
    ]
    for title, way in (("ours", ours), ("best", best)):
        if way.judgement:
            lines.append(f"  {title}: compute {way.judgement.roofline_compute_s * 1e3:.2f} ms, {way.judgement.flops / 1e12:.3f} TFLOP")
            lines += [
                f"    {row['kind']:<16} {row['group_size']:<3} {'async' if row['is_async'] else 'sync':<5} {row['count']:5.0f} x "
                f"{row['payload_bytes'] / 2**20:9.1f} MiB {row['seconds'] * 1e3:8.2f} ms, {row['exposed_s'] * 1e3:8.2f} exposed"
                for row in way.judgement.traffic
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
