"""Causes of collectives: values that plan files keep as sentences."""

from __future__ import annotations

import pickle

import pytest

from spmdctx.ir.collective import LOSS_REDUCTION, Cause, CauseForm

ENDS = ("[data, -]", "[-, model+axis2]")

CAUSES = {
    "operand 10 of dot_general: params/layers/0/w [data, -] -> [-, model+axis2]": Cause.move(10, "dot_general", "params/layers/0/w", *ENDS),
    "result of scan.exit: value [data, -] -> [-, model+axis2]": Cause.move(None, "scan.exit", "", *ENDS),
    "result of mul: a [name] of two words [data, -] -> [-, model+axis2]": Cause.move(None, "mul", "a [name] of two words", *ENDS),
    "partial result of dot_general": Cause.sum("dot_general"),
    "partial result of dot_general, added up by a loop": Cause.sum("dot_general", in_loop=True),
    "bucket 0 of gradients: partial result of reduce_sum": Cause.sum("reduce_sum", 0),
    "bucket 12 of gradients: partial result of reduce_sum, added up by a loop": Cause.sum("reduce_sum", 12, in_loop=True),
    "joined by value_and_grad": LOSS_REDUCTION,
    "psum written in shard_map": Cause(CauseForm.WRITTEN, primitive="psum"),
    "result of pure_callback, which runs on one device": Cause(CauseForm.BROADCAST, primitive="pure_callback"),
    "of another version": Cause(CauseForm.OTHER, text="of another version"),
}


def test_every_form_has_a_case():
    assert {cause.form for cause in CAUSES.values()} == set(CauseForm)


@pytest.mark.parametrize("text", CAUSES)
def test_a_cause_is_printed_as_its_sentence_and_read_back_from_it(text):
    cause = CAUSES[text]
    assert cause == text
    for again in (Cause.read(text), pickle.loads(pickle.dumps(cause))):
        assert (type(again), again, again.form, again.gaps) == (Cause, cause, cause.form, cause.gaps)


def test_a_move_is_renamed_by_its_path_alone():
    first = Cause.move(0, "dot_general", "layers/0/w", *ENDS)
    assert first.along("layers/*/w") == Cause.move(0, "dot_general", "layers/*/w", *ENDS)
