"""What whoever launches a job tells its workers, and what is left of its temporary folder."""

import argparse
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import spmdctx
from spmdctx.cli import launch as command
from spmdctx.cli.output import Output
from spmdctx.cli.parser.others import add_launch_arguments
from spmdctx.errors import CommunicationError
from spmdctx.server.engine.client import NUM_PARTS, NUM_WORKERS, WORKER
from spmdctx.server.engine.fleet import Job
from spmdctx.server.engine.job import Launch, Outcome, _Running
from spmdctx.server.engine.worker import Script
from spmdctx.server.state.folder import SavedState, complete, state_folder

LAUNCH = Launch(Job(2, "sync", 4, 10, "folder"), 3, Script("train.py", [], False, "."))


def environments(num_parts, *counts):
    """Returns what each worker is told, where a job has so many workers, and then others."""
    told = []
    job = object.__new__(_Running)
    job._launch, job._num_parts, job._num_workers, job._num_gpus = LAUNCH, num_parts, counts[0], 0
    job._runs, job._added, job._leaving = {}, 0, set()

    def options(**given):
        told.append(given["runtime_env"]["env_vars"])
        return SimpleNamespace(remote=lambda number: SimpleNamespace(run=SimpleNamespace(remote=lambda script: f"run {number}")))

    job._ray = SimpleNamespace(remote=lambda _: SimpleNamespace(options=options), cluster_resources=dict)
    job._scheduler = SimpleNamespace(remove_worker=SimpleNamespace(remote=lambda number: None))
    job._fit_workers(counts[0])
    for count in counts[1:]:
        job._fit_workers(count)
    return [(own[WORKER], own[NUM_WORKERS], own[NUM_PARTS]) for own in told]


def test_workers_are_told_how_many_they_are_and_how_many_parts_a_step_has():
    assert environments(3, 2) == [("0", "2", "3"), ("1", "2", "3")]
    assert environments(1, 1, 3) == [("0", "1", "1"), ("1", "3", "1"), ("2", "3", "1")]


def test_a_step_of_a_job_that_goes_on_keeps_its_parts(monkeypatch):
    monkeypatch.setenv(WORKER, "0")
    monkeypatch.setenv(NUM_WORKERS, "2")
    monkeypatch.setenv(NUM_PARTS, "4")
    spmdctx.set_ps_context(enable_ps=True)

    def fn(params, x):
        value, grads = spmdctx.value_and_grad(lambda params: jnp.mean(x @ params))(params)
        return params - grads, value

    step = spmdctx.parallel(fn, parallel_mode="stand_alone")
    plan = step.plan(jnp.ones(3), jnp.ones((8, 3)))
    assert (plan.num_parts, plan.num_workers) == (4, 2)


@pytest.mark.parametrize(("outcome", "progress", "is_left"), [(0, True, False), (1, True, True), (1, False, False), (None, False, False)])
def test_a_temporary_folder_is_kept_only_where_a_job_can_go_on_from_it(monkeypatch, capsys, outcome, progress, is_left):
    folders = []

    def run(launch, out, err):
        folder = command.Path(launch.job.folder)
        folders.append(folder)
        for version in (0, 5) if progress else (0,):
            complete(folder, SavedState(version, state_folder(folder, version), "step", 1, ()), {})
        if outcome is None:
            raise CommunicationError("There is no cluster of Ray.")
        return Outcome(outcome)

    monkeypatch.setattr(command, "run_served", run)
    parser = argparse.ArgumentParser()
    add_launch_arguments(parser)
    arguments = parser.parse_args(["--servers", "1", "--workers", "1", "train.py"])
    if outcome is None:
        with pytest.raises(CommunicationError):
            command.launch(arguments, Output(False))
    else:
        assert command.launch(arguments, Output(False)) == outcome
    assert folders[0].exists() == is_left
    assert (f"--folder {folders[0]}" in capsys.readouterr().err) == is_left
