"""Fusion of collectives by size: the table from the context to compiler options, and what the compilers make of it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.context.layers import AutoParallelContext, current_context
from spmdctx.errors import ContextWarning, UnsupportedError
from spmdctx.lowering.compile_options import compile_options, without_option
from spmdctx.machine.devices import backend_of
from spmdctx.machine.xla.options import UNLIMITED
from tests.audit.compile_only import need_gpu, need_tpu
from tests.lowering.gradients import NUM_PARAMETERS, arguments, combined, step

MIB = 2**20
TARGETS = {"tpu": (need_tpu, "tpu-v5e"), "gpu": (need_gpu, "h100")}
KINDS = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter"}

KNOBS = [
    pytest.param(backend, kind, id=f"{backend}-{kind}")
    for backend, kind in [
        ("tpu", "all_reduce"),
        ("tpu", "reduce_scatter"),
        ("gpu", "all_reduce"),
        ("gpu", "reduce_scatter"),
        ("gpu", "all_gather"),
    ]
]


def context(**options: object) -> AutoParallelContext:
    return current_context().replace(**{"parallel_mode": "data_parallel", **options})


def size(kind: str, megabytes: int) -> dict[str, dict[str, object]]:
    return {KINDS[kind]: {"mode": "size", "config": megabytes}}


def devices_of(platform: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(platform=platform)]


def test_the_backend_of_real_and_compile_only_devices_is_told():
    assert backend_of(jax.devices()) == "cpu"
    assert backend_of(need_tpu()) == "tpu"
    assert backend_of(need_gpu()) == "gpu"


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_where_nothing_is_set_the_compilers_defaults_hold(platform):
    assert compile_options(devices_of(platform), context()) == {}
    assert compile_options(devices_of(platform), context(comm_fusion={"openstate": False}, parallel_mode="stand_alone")) == {}


@pytest.mark.parametrize("platforms", [["cpu", "tpu"], ["abacus"], []])
def test_mixed_unknown_or_no_devices_are_refused(platforms):
    with pytest.raises(UnsupportedError, match="one backend"):
        backend_of([SimpleNamespace(platform=platform) for platform in platforms])


@pytest.mark.parametrize(("fusion", "bytes_"), [({}, 64 * MIB), (size("all_reduce", 4), 4 * MIB), ({"openstate": False}, 0)])
def test_auto_is_64_mb_size_is_its_own_and_off_combines_nothing(fusion, bytes_):
    found = compile_options(devices_of("tpu"), context(comm_fusion=fusion))
    assert found["xla_jf_crs_combiner_threshold_in_bytes"] == bytes_


def test_buckets_by_index_are_limited_by_no_size_and_leave_other_kinds_alone():
    found = compile_options(devices_of("gpu"), context(all_reduce_fusion_config=[3, 10]))
    assert found == {"xla_gpu_all_reduce_combine_threshold_bytes": UNLIMITED, "xla_gpu_collective_combine_threshold_count": 100_000}


def test_a_gpus_reduce_scatters_are_counted_by_what_one_device_keeps():
    found = compile_options(devices_of("gpu"), context(comm_fusion=size("reduce_scatter", 8)), scatter_ways=8)
    assert found["xla_gpu_reduce_scatter_combine_threshold_bytes"] == MIB


@pytest.mark.parametrize(
    ("backend", "fusion", "named"),
    [
        ("tpu", size("all_gather", 4), ["allgather"]),
        ("tpu", {"openstate": False}, []),  # it combines none anyway
        ("gpu", {**size("all_gather", 4), **size("reduce_scatter", 4)}, []),
        ("cpu", size("all_reduce", 4), ["allreduce"]),
        ("cpu", {"openstate": False}, ["allreduce", "allgather", "reducescatter"]),
    ],
)
def test_what_a_backend_has_no_option_for_is_named(backend, fusion, named):
    sentences = without_option(backend, context(comm_fusion=fusion))
    assert [sentence.split("'")[1] for sentence in sentences] == named


def test_a_kind_without_an_option_is_warned_of_and_noted():
    parallel = spmdctx.parallel(step, parallel_mode="data_parallel", device_num=8, topology="tpu-v5e", comm_fusion=size("all_gather", 4))
    with pytest.warns(ContextWarning, match=r"comm_fusion\['allgather'\] has no effect: the TPU compiler"):
        plan = parallel.plan(*arguments())
    assert any("comm_fusion['allgather']" in note for note in plan.notes)


def gathered(weights, x):
    """The step with weights that are stored split over all devices, gathered where they are used."""
    mesh = spmdctx.get_mesh()
    split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (mesh.axis_names, ()))
    constrain = jax.lax.with_sharding_constraint

    def loss(weights):
        hidden = x
        for weight in weights:
            hidden = jnp.tanh(hidden @ constrain(weight, whole))
        return jnp.mean(hidden**2)

    value, gradients = jax.value_and_grad(loss)([constrain(weight, split) for weight in weights])
    return value, [weight - 0.1 * constrain(one, split) for weight, one in zip(weights, gradients, strict=True)]


@pytest.mark.parametrize(("backend", "kind"), KNOBS)
@pytest.mark.parametrize("megabytes", [4, 8])
def test_a_size_gives_the_number_of_collectives_that_it_implies(backend, kind, megabytes):
    """Twenty tensors of 1 MiB, and of the all_reduces the loss too: it takes the room of one of them where the others fill all."""
    need, topology = TARGETS[backend]
    if kind == "all_reduce":
        function, mode = step, {"parallel_mode": "data_parallel"}
    else:
        function, mode = gathered, {"parallel_mode": "semi_auto_parallel", "mesh": {"data": 8}}
    parallel = spmdctx.parallel(function, devices=need(), topology=topology, comm_fusion=size(kind, megabytes), **mode)
    program = combined(parallel.lower(*arguments(lambda index: 512)).compile().as_text())
    counts = [len(one.shapes) for one in program if one.kind == kind]
    scale = 4 * (8 if kind == "all_gather" else 1)
    in_bytes = [sum(map(math.prod, one.shapes)) * scale for one in program if one.kind == kind]
    assert sum(counts) == NUM_PARAMETERS + (kind == "all_reduce")
    assert len(counts) == math.ceil(sum(in_bytes) / megabytes / MIB)
    assert max(in_bytes) <= megabytes * MIB
