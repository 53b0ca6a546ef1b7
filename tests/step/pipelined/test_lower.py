"""A pipeline is lowered as a program for each stage and kind of task, which calls share."""

import jax
import pytest

from tests.audit.compile_only import need_gpu
from tests.step.pipelined import small
from tests.step.pipelined.test_audit import arguments


def test_a_pipeline_is_lowered_by_stage_and_kind_of_task():
    lowered = small.parallel().lower(*jax.eval_shape(lambda: arguments(num_layers=4, tied=False)))
    tasks = ["forward0", "backward0", "forward1", "backward1"]
    assert list(lowered) == ["begin0", "begin1", *tasks, "end_0", "end_1", "after0_0", "after0_1", "after1_0", "after1_1"]
    assert isinstance(lowered["forward0"], jax.stages.Lowered)
    assert all(f"// {name}\n" in lowered.as_text() for name in lowered)
    assert "pipeline_backward1" in lowered["backward1"].as_text()
    compiled = lowered.compile()
    assert len(compiled) == len(lowered)
    assert compiled.as_text().count("HloModule") == len(lowered)
    assert compiled.memory_analysis()["backward0"].alias_size_in_bytes > 0
    assert compiled.cost_analysis()["forward0"]
    assert "forward0" in repr(compiled)


def test_calls_compile_none_of_the_lowered_programs_again(caplog):
    args, step = arguments(), small.parallel(donate_argnums=(0, 1))
    step.lower(*args).compile()
    with jax.log_compiles():
        step(*args)
    assert not [record.message for record in caplog.records if "Compiling jit(pipeline_" in record.message]


@pytest.mark.parametrize("name", ["input0", "weight0"])
def test_unknown_programs_are_no_keys(name):
    with pytest.raises(KeyError, match=name):
        small.parallel().lower(*arguments())[name]


def test_a_pipeline_compiles_for_devices_that_are_not_there():
    devices = need_gpu(4)
    shapes = jax.eval_shape(lambda: (*small.state_of(2, 256), small.batch_of(256, 256)))
    step = small.parallel(devices=devices, donate_argnums=(0, 1))
    report = step.audit(*shapes)
    assert report.ok
    operands = [program.input_shardings[0] for program in step.lower(*shapes).compile().values()]
    placed = [next(own for own in each if own is not None).mesh.devices.ravel().tolist() for each in operands if any(each)]
    assert {tuple(map(id, own)) for own in placed} == {tuple(map(id, devices[:2])), tuple(map(id, devices[2:]))}
