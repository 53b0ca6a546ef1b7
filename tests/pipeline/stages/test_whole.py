"""What stages do around a loss, which plans of the same chunks share."""

from collections import Counter

from spmdctx.pipeline.stages import captured, whole
from tests.step.pipelined import small


def test_programs_around_the_loss_are_built_once_for_all_plans_of_chunks(monkeypatch):
    built, found, completions = Counter(), [], []
    build, programs_of, completed = captured.build, whole.programs_of, whole.completed

    def building(jaxpr, *how):
        built[id(jaxpr)] += 1
        return build(jaxpr, *how)

    def finding(*how):
        found.append(programs_of(*how))
        return found[-1]

    def completing(*how, **options):
        completions.append(completed(*how, **options))
        return completions[-1]

    monkeypatch.setattr(captured, "build", building)
    monkeypatch.setattr(whole, "programs_of", finding)
    monkeypatch.setattr("spmdctx.pipeline.search.reduced.completed", completing)
    step = small.parallel(2, parallel_mode="auto_parallel", grad_accumulation_step=8)
    plan = step.plan(*small.state_of(num_layers=4), small.batch_of(8192))
    programs = [program for rounds in found for own in rounds for program in own]
    assert plan.stages[0].after
    assert len(found) == 1
    # Sums that wait are reduced to all devices, or to a part each.
    assert len(completions) == 2
    assert programs
    assert [built[id(program.jaxpr)] for program in programs] == [1] * len(programs)
