"""Plain text never steers the terminal that shows it."""

import dataclasses

import jax.numpy as jnp

import spmdctx
from spmdctx.plan.show.terminal import plain_text


def test_characters_that_steer_a_terminal_are_spelled_out():
    assert plain_text("one\x1b[31m two\u202e three") == "one\\x1b[31m two\\u202e three"
    assert plain_text("first\nsecond") == "first\nsecond"


def test_a_plan_with_such_a_path_is_shown_in_plain_characters():
    plan = spmdctx.plan(lambda x: jnp.sin(x), jnp.ones((8, 8)), parallel_mode="data_parallel", device_num=8)
    named = dataclasses.replace(plan, inputs=[plan.inputs[0]._replace(path="x\x1b]0;title\x07")])
    text = str(named)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "x\\x1b]0;title" in text
