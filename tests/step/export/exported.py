"""Exports steps of the zoo, and compares what the exported module compiles and computes with the step itself."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import spmdctx
from spmdctx.audit.collectives import parse_collectives
from tests.zoo import UNSPLIT, Case

GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""XLA 0.10.2 finds no tiles for some of the zoo's odd sizes."""


def loaded(path: Path) -> Mapping[str, Any]:
    """The names of an exported module."""
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    return names


def as_pytrees(step: Callable[..., Any], args: tuple[Any, ...], num_objects: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An nnx step in the form that the exported module's docstring gives, and its arguments."""
    graphdef, state = nnx.split(args[:num_objects])

    def functional(state: Any, *batch: Any) -> Any:
        objects = nnx.merge(graphdef, state)
        result = step(*objects, *batch)
        return nnx.state(objects), result

    return functional, (state, *args[num_objects:])


def collectives(compiled: Any, plan: spmdctx.Plan) -> Counter[tuple[Any, ...]]:
    """How often a compiled program moves how many bytes by each kind of collective over which axes."""
    found = parse_collectives(compiled.as_text(), plan.logical_mesh)
    return Counter((one.kind, one.axes, one.payload_bytes, one.repeats) for one in found)


def compared(one: Case, path: Path, devices: Any, topology: str, *, runs: bool, **options: Any) -> tuple[Any, Any, bool]:
    """The collectives of a step of the zoo and of its exported module, and whether both computed the same bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step, args = one.make(UNSPLIT, np.float32)
        split = spmdctx.parallel(step, parallel_mode="auto_parallel", devices=devices, topology=topology, **options)
        plan = split.plan(*args)
        plan.export("jax", path)
        of_xla = GPU_OPTIONS if topology == "h100" else None
        own = collectives(split.lower(*args).compile(compiler_options=of_xla), plan)
        fn, given = as_pytrees(step, args, 2) if one.flavor == "nnx" else (step, args)
        exported = loaded(path)["parallel"](fn, devices)
        others = collectives(exported.lower(*given).compile(compiler_options=of_xla), plan)
        return own, others, not runs or _are_equal(one, split, args, exported, given)


def _are_equal(one: Case, split: Any, args: Any, exported: Any, given: Any) -> bool:
    found = exported(*given)
    result = split(*args)
    wanted = (nnx.state(args[:2]), result) if one.flavor == "nnx" else result
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(np.array_equal(bits(left), bits(right), equal_nan=True) for left, right in pairs)


def bits(leaf: Any) -> np.ndarray:
    """A leaf as numbers, also that of a random key."""
    return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
