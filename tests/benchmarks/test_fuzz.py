"""The fuzzer: a sample of its programs holds, programs are the same from a seed, and planted faults are found."""

import random
import subprocess
import sys
import time

import jax
import pytest

import spmdctx
from benchmarks import fuzz
from benchmarks.fuzz_checks import Reference, compare, try_way, ways
from benchmarks.fuzz_moves import MOVES
from benchmarks.fuzz_programs import make_program

AUTO = "parallel_mode='auto_parallel', search_mode='dynamic_programming', device_num=8, topology=FREE_LINKS"


def _sample(number):
    return make_program(f"sample {number}", MOVES)


def test_a_sample_of_programs_holds():
    tally = fuzz.Tally()
    fuzz.run(7, list(range(24)), tally, show=False)
    assert tally.programs == 24
    assert [fault for _, _, fault in tally.faults if fault["kind"] != "audit"] == []
    assert tally.audits > 35
    assert tally.split > 15


def test_programs_and_ways_are_the_same_from_a_seed():
    first, second = _sample(1), _sample(1)
    assert first == second
    assert list(ways(first, random.Random(3))) == list(ways(second, random.Random(3)))
    assert len({_sample(number).source for number in range(5)}) == 5


def test_programs_hold_what_they_are_said_to_hold():
    text = "\n".join(_sample(number).source for number in range(40))
    for part in (
        "lax.scan(",
        "jax.vmap(",
        "value_and_grad(",
        "conv_general_dilated(",
        "spmdctx.shard(",
        ".sort(",
        "bfloat16",
        ".at[",
        "einsum(",
    ):
        assert part in text


def test_the_printed_script_runs():
    program = next(one for one in map(_sample, range(10)) if "training" not in one.tags)
    done = subprocess.run([sys.executable, "-c", program.script()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "rray" in done.stdout


def _reference():
    return Reference(next(one for one in map(_sample, range(20)) if "jnp.sin" in one.source and one.eps[0] < 1e-6))


@pytest.mark.parametrize("change", [lambda one: one + 1e-2, lambda one: one[..., None], lambda one: one * float("nan")])
def test_a_wrong_result_is_found(change):
    reference = _reference()
    leaves = jax.tree.leaves(jax.jit(reference.step)(*reference.args))
    assert compare(reference, leaves) == ""
    place = max(range(len(leaves)), key=lambda place: leaves[place].dtype.kind == "f")
    assert compare(reference, [change(leaf) if place == own else leaf for own, leaf in enumerate(leaves)])


def test_crashes_and_refusals_are_told_apart(monkeypatch):
    reference = _reference()

    def raising(error):
        def parallel(*args, **kwargs):
            raise error

        monkeypatch.setattr(spmdctx, "parallel", parallel)
        return try_way(reference, AUTO)

    assert [fault.kind for fault in raising(IndexError("list index out of range")).faults] == ["crash"]
    refused = raising(spmdctx.StrategyError("does not divide"))
    assert (refused.faults, refused.refused) == ((), "StrategyError: does not divide")


def test_a_process_that_ends_is_a_fault_of_its_program(monkeypatch):
    popen = subprocess.Popen

    def started(command, **options):
        number = int(command[-1].split(",")[0])
        rest = (
            "import os, sys; sys.stdout.flush(); os.abort()"
            if number == 4
            else f"""print('{{"number": {number}, "tags": [], "outcomes": []}}')"""
        )
        return popen([sys.executable, "-c", f"""print('{{"start": {number}}}'); {rest}"""], **options)

    monkeypatch.setattr(fuzz.subprocess, "Popen", started)
    tally = fuzz.Tally()
    fuzz.run(0, [4, 5], tally, show=False)
    assert [(number, fault["kind"]) for number, _, fault in tally.faults] == [(4, "abort")]
    assert tally.programs == 2
    assert not tally.passes


def test_a_run_that_is_ended_says_what_it_has_found():
    command = [sys.executable, "-m", "benchmarks.fuzz", "--seed", "7", "--count", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(4)
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert "ended early" in out
    assert "audits that hold" in out
