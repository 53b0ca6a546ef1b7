"""Each program of a pipeline is compiled with options of its own: its scheduler's limit, and how its collectives are combined."""

import jax
import pytest

from spmdctx.machine.xla.options import BYTE_THRESHOLDS
from spmdctx.pipeline.run import compiled as compiled_module
from tests.audit.compile_only import need_gpu, need_tpu
from tests.step.pipelined import small
from tests.step.pipelined.test_audit import arguments

LIMIT = "xla_tpu_scheduler_percent_shared_memory_limit"
DEVICES = {"gpu": lambda: need_gpu(4), "tpu": lambda: need_tpu()[:4]}


def options_of(monkeypatch, devices, **options):
    """The compile options of each program, by its name."""
    seen = {}
    jit_program = compiled_module.jit_program

    def noted(*args):
        seen[args[-1].name] = args[-1].compiler_options
        return jit_program(*args)

    monkeypatch.setattr(compiled_module, "jit_program", noted)
    lowered = small.parallel(devices=devices, **options).lower(*jax.eval_shape(arguments))
    assert "forward0" in lowered
    return seen


def test_programs_for_tpu_have_the_limits_of_their_own_plans(monkeypatch):
    found = options_of(monkeypatch, need_tpu()[:4])
    assert {"pipeline_forward0", "pipeline_backward1", "pipeline_after0_0"} <= set(found)
    assert {own.get(LIMIT) for own in found.values()} == {1}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_programs_combine_collectives_as_the_context_says(monkeypatch, platform):
    fusion = {"allreduce": {"mode": "size", "config": 3}}
    found = options_of(monkeypatch, DEVICES[platform](), comm_fusion=fusion)
    assert {own.get(BYTE_THRESHOLDS[platform, "all_reduce"]) for own in found.values()} == {3 * 2**20}


def test_programs_for_cpu_have_no_options(monkeypatch):
    assert not any(options_of(monkeypatch, jax.devices()[:4]).values())
