"""The plan in a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from tests.plan import small_plan

GOLDEN = """\
Plan  data 8  on h100
ZeRO-3 over 8 devices.
────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

  mode      auto_parallel · sharding_propagation
  step      400 µs  compute 300 µs, communication 100 µs (25 %)
  rate      160,000 samples a second, MFU 0.0 %
  memory    5.00 MiB (likely), 7.25 MiB (safe) of 55.9 GiB usable  peak per device
  optimum   no lower bound computed
  options   device_num=8
  program   6 ops, fingerprint ffffffffffff

Inputs  3 tensors

  tensor                  role        shape         split along   per device
 ────────────────────────────────────────────────────────────────────────────
  state/layers/*/w   \N{MULTIPLICATION SIGN}2   parameter   f32[32, 32]   [data, -]       1.00 KiB
  batch                   batch       f32[64, 32]   [data, -]       1.00 KiB

  all                                               of 16.0 KiB     2.00 KiB

Communication  4 collectives in a step

  collective       over   count   per device      time
 ─────────────────────────────────────────────────────────────────────────
  reduce_scatter   data       2     8.00 KiB   60.0 µs   ████████████████
  all_gather       data       2     8.00 KiB   40.0 µs   ███████████


  dearest causes                                          collective       over   count      time   where
 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
  partial result of dot_general                           reduce_scatter   data       2   60.0 µs   model.py:12 (loss)
  operand 1 of dot_general: state/layers/*/w [data, -]    all_gather       data       2   40.0 µs   model.py:12 (loss)
  -> [-, -]

Notes  1

  · The batch is split over data by default."""


def test_a_small_plan_reads_like_this():
    assert str(small_plan()) == GOLDEN


def test_long_names_are_folded_into_the_width_of_a_terminal():
    plan = small_plan()
    long = tuple(tensor._replace(path=f"{'very_' * 30}{index}/w", sharding=((), ())) for index, tensor in enumerate(plan.inputs))
    text = str(small_plan(inputs=long, notes=("word " * 60,)))
    assert max(map(len, text.splitlines())) <= 120
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


def test_without_communication_the_plan_says_none():
    assert "Communication  0 collectives in a step\n  none" in str(small_plan(collectives=()))


def test_the_certificate_and_the_budget_are_shown_where_there_are():
    text = " ".join(str(small_plan(lower_bound_s=3.9e-4, gap=0.0256, memory_limit_bytes=2**30)).split())
    assert "nothing below 390 µs in the declared space, gap 2.56 %: every legal split of every op and tensor" in text
    assert "split alike" not in text
    assert "5.00 MiB (likely), 7.25 MiB (safe) of 1.00 GiB peak per device" in text


def test_many_notes_are_cut():
    text = str(small_plan(notes=tuple(f"note {number}" for number in range(50))))
    assert "note 19" in text
    assert "note 20" not in text
    assert "and 30 more, in plan.notes" in text


def test_names_with_brackets_are_no_markup():
    plan = small_plan(notes=("[bold]x[/bold] [data, -]",))
    assert "[bold]x[/bold] [data, -]" in str(plan)


def test_a_console_shows_colours():
    console = Console(file=io.StringIO(), width=120, color_system="standard", force_terminal=True)
    console.print(small_plan())
    assert "\x1b[" in console.file.getvalue()
    assert "\x1b[" not in str(small_plan())
