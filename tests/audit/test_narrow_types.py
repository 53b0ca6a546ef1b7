"""CPU moves floats of a byte or less in a wider type, TPU short integers; the audit finds them where a program has such types."""

import jax
import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.audit.collectives import CompiledCollective
from spmdctx.audit.hlo import read_leaves
from spmdctx.audit.match import compare
from spmdctx.ir.collective import Cause, CauseForm, Collective
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.machine.xla.collectives.ways import WAYS, ways_of

MESH = LogicalMesh.of({"data": 8})


def found(dtypes, compiled_dtype, ratio, kind="all_gather"):
    planned = [Collective(kind, ("data",), 1024, 0.0, 1, Cause(CauseForm.OTHER, text="planned"))]
    compiled = [CompiledCollective(kind, ("data",), 1024 * ratio, compiled_dtype, 1, "", "one")]
    return not compare(planned, compiled, MESH, ways_of(dtypes)).missing


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "collective_permute", "all_reduce"])
def test_only_programs_with_narrow_floats_move_them_in_wider_types(kind):
    assert found(["float32", "float8_e5m2"], "float16", 2, kind)
    assert found(["float4_e2m1fn"], "float16", 2, kind)
    assert found(["float8_e8m0fnu"], "float32", 4, kind)
    assert not found(["float32", "bfloat16", "int8"], "float16", 2, kind)
    assert not found(["float8_e4m3fn"], "float32", 4, kind)
    assert not found(["float8_e8m0fnu"], "float16", 2, kind)
    assert not found(["float8_e4m3fn"], "float16", 4, kind)


def test_programs_without_them_have_the_same_ways_as_before():
    assert ways_of(["float32", "int4", "key<fry>"]) == WAYS


@pytest.mark.parametrize(("planned_bytes", "compiled_bytes"), [(1, 4), (3, 512), (640, 2048), (6000, 10240)])
def test_programs_with_short_types_reduce_them_as_padded_words(planned_bytes, compiled_bytes):
    planned = [Collective("all_reduce", ("data",), planned_bytes, 0.0, 1, Cause(CauseForm.OTHER, text="planned"))]

    def missing(dtypes, dtype, num_bytes):
        compiled = [CompiledCollective("all_reduce", ("data",), num_bytes, dtype, 1, "", "one")]
        return compare(planned, compiled, MESH, ways_of(dtypes)).missing

    assert not missing(["float32", "bool"], "uint32", compiled_bytes)
    assert missing(["float32", "int32"], "uint32", compiled_bytes)
    assert missing(["float32", "bool"], "float32", compiled_bytes)
    assert missing(["float32", "bool"], "uint32", 5 * 6000)


NARROW = {"f8e4m3fn[64]": "float8_e4m3fn", "f4e2m1fn[64]": "float4_e2m1fn", "f8e8m0fnu[64]": "float8_e8m0fnu", "s2[8,8]": "int2"}


@pytest.mark.parametrize("text", NARROW)
def test_narrow_types_of_compiled_programs_are_read(text):
    (leaf,) = read_leaves(text)
    assert (leaf.dtype, leaf.num_bytes) == (NARROW[text], 64)


@pytest.mark.parametrize("name", ["float8_e4m3b11fnuz", "float8_e5m2", "float4_e2m1fn", "float8_e8m0fnu"])
def test_gathered_narrow_floats_are_found(name):
    dtype = jnp.dtype(name)

    def function(x, w):
        narrow = jax.lax.with_sharding_constraint(x.astype(dtype), jax.P("data", None))
        whole = jax.lax.with_sharding_constraint(narrow, jax.P(None, None))
        return jnp.sort(whole.astype(jnp.float32), 0) + w

    step = spmdctx.parallel(function, parallel_mode="semi_auto_parallel", mesh={"data": 8})
    report = step.audit(jnp.linspace(0.5, 4.0, 1024).reshape(64, 16), jnp.float32(1))
    assert report.planned_bytes == 1024, str(report)
    assert (report.missing, report.unplanned) == ((), ()), str(report)
