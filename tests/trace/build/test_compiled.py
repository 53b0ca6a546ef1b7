"""What programs say of the fusions of compilers that take no chains into matrix products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import spmdctx
from benchmarks.judge_work import hbm_size, work_of
from spmdctx.audit.hlo import read_module
from spmdctx.machine.presets import PRESETS
from spmdctx.trace.build.compiled import as_compiled
from tests.audit.compile_only import need_gpu
from tests.road import ops, trace

X, W = jnp.ones((512, 256)), jnp.ones((256, 512))
SCORES = jnp.ones((8, 128, 512))
GPU, TPU = PRESETS["h100"].compiler, PRESETS["tpu-v5e"].compiler


def moved_bytes(program):
    """All bytes that the fusions of a program read and write."""
    graph = program.graph
    return sum(
        rate * np.prod(graph.values[value].shape, dtype=int)
        for op in graph.ops
        if op.work is not None
        for rate, value in zip(op.work.moved, op.operands + op.results, strict=False)
        if rate
    )


def test_the_tpu_compiler_fuses_as_programs_are_built():
    program = trace(lambda x, w: jnp.exp(x) @ w, X, W)
    assert as_compiled(program, TPU) is program


def test_what_a_product_reads_is_written_before_it():
    program = trace(lambda x, w: jnp.exp(x) @ w, X, W)
    (exp,), (dot,) = ops(as_compiled(program, GPU), "exp"), ops(as_compiled(program, GPU), "dot_general")
    assert exp.fused == 0
    assert exp.work.moved == (4.0, 4.0)
    assert dot.work.moved == (4.0, 4.0, 4.0)


def test_what_follows_a_product_reads_its_result():
    program = as_compiled(trace(lambda x, w: jnp.exp(x @ w), X, W), GPU)
    (exp,) = ops(program, "exp")
    assert exp.work.moved == (4.0, 4.0)


def test_each_reader_of_a_chain_reads_what_it_is_made_of():
    program = trace(lambda x: jax.nn.softmax(2.0 * x, axis=-1), SCORES)
    size, small = SCORES.nbytes, SCORES.nbytes // SCORES.shape[-1]
    # The maximum, the sum and the result read the scores; the sum reads the maxima, the result both, and all write theirs.
    assert moved_bytes(as_compiled(program, GPU)) == pytest.approx(4 * size + 5 * small, abs=2 * small)
    assert moved_bytes(program) < 4 * size


def test_bodies_of_shard_maps_are_fused_likewise():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    body = jax.shard_map(
        lambda x, w: jnp.exp(x) @ w, mesh=mesh, in_specs=(PartitionSpec("x"), PartitionSpec()), out_specs=PartitionSpec("x")
    )
    program = as_compiled(trace(body, X, W), GPU)
    (region,) = program.manual
    (exp,) = ops(region.body, "exp")
    assert exp.fused == 0


def test_plans_for_gpus_count_it():
    def attention(x, w):
        return jax.nn.softmax(x @ w, axis=-1) @ w.T

    large = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
    plan = spmdctx.parallel(attention, parallel_mode="auto_parallel", device_num=1, topology="h100").plan(*large)
    machine = PRESETS["h100"]
    scores_s = 4096 * 4096 * 2 / machine.memory_bytes_per_s
    products_s = 4 * 4096 * 4096 * 1024 / machine.peak_flops_per_s
    # The first product writes the scores; the maximum, the sum and the weights read them; the weights are written, and read.
    assert plan.cost.total_s >= products_s + 4 * scores_s


def attention_loss(weights, x):
    query, key, value = ((x @ own).reshape(4, 512, 4, 64) for own in weights[:3])
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), value)
    return jnp.mean(jnp.square((x + mixed.reshape(x.shape) @ weights[3]).astype(jnp.float32)))


def norms_loss(weights, x):
    for own in weights[:3]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        x = (centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) @ own
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def cross_entropy(weights, x):
    logits = (x @ weights[4]).astype(jnp.float32)
    return (jax.nn.logsumexp(logits, axis=-1) - logits[..., 3]).mean()


@pytest.mark.parametrize("loss", [attention_loss, norms_loss, cross_entropy])
def test_gradients_move_as_many_bytes_as_the_gpu_compiler_says(loss):
    weights = [*[jnp.ones((256, 256), jnp.bfloat16)] * 4, jnp.ones((256, 2048), jnp.bfloat16)]
    x = jnp.ones((4, 512, 256), jnp.bfloat16)
    step = spmdctx.parallel(jax.grad(loss), parallel_mode="semi_auto_parallel", devices=need_gpu(1))
    compiled = _bytes_of_kernels(step.lower(weights, x).compile().as_text())
    program = trace(lambda *args: jax.grad(loss)(list(args[:5]), args[5]), *weights, x)
    assert moved_bytes(as_compiled(program, GPU)) == pytest.approx(compiled, rel=0.25)
    assert moved_bytes(program) < 0.6 * compiled


def _bytes_of_kernels(text):
    """What the kernels of a scheduled program read and write; a library's room to work in (int8) is not among it."""
    module = read_module(text)
    entry = module.computations[module.entry]
    total = 0
    for one in entry.instructions.values():
        total += work_of(one, entry, module).hbm_bytes
        if one.opcode == "custom-call":
            operands = [entry.instructions[name].shape for name in one.operands]
            total += sum(map(hbm_size, [one.shape.split(", s8[")[0], *operands]))
    return total
