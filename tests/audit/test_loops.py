import pytest

from spmdctx.audit.hlo import read_module
from spmdctx.audit.loops import trip_count

PLAIN = """HloModule m

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  %v = f32[4]{0} get-tuple-element(%s), index=1
  ROOT %t = (s32[], f32[4]{0}) tuple(%next, %v)
}

%cond (s.1: (s32[], f32[4])) -> pred[] {
  %s.1 = (s32[], f32[4]{0}) parameter(0)
  %bound = s32[]{:T(128)} constant(BOUND)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  ROOT %lt = pred[] compare(SIDES), direction=DIRECTION
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %start = s32[] constant(START)
  %copied = s32[] copy(%start)
  %init = (s32[], f32[4]{0}) tuple(%copied, %x)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%bodyKNOWN
  ROOT %out = f32[4]{0} get-tuple-element(%loop), index=1
}
"""
FUSED = (
    PLAIN.replace(
        "%cond (s.1",
        "%test (p.0: s32[]) -> pred[] {\n  %p.0 = s32[] parameter(0)\n  %b = s32[] constant(BOUND)\n"
        "  ROOT %c = pred[] compare(%p.0, %b), direction=DIRECTION\n}\n\n%cond (s.1",
    )
    .replace("compare(SIDES), direction=DIRECTION\n}\n\nENTRY", "fusion(%i.1), kind=kLoop, calls=%test\n}\n\nENTRY")
    .replace("constant(BOUND)\n  %i.1", "constant(99)\n  %i.1")
)


def count(text, start=0, step=1, bound=6, direction="LT", sides="%i.1, %bound", known=""):
    values = {"START": start, "STEP": step, "BOUND": bound, "SIDES": sides, "DIRECTION": direction, "KNOWN": known}
    for name, value in values.items():
        text = text.replace(name, str(value))
    module = read_module(text)
    main = module.computations["main"]
    return trip_count(main.instructions["loop"], main, module)


@pytest.mark.parametrize("text", [PLAIN, FUSED], ids=["plain", "fused"])
@pytest.mark.parametrize(
    ("start", "step", "bound", "direction", "expected"),
    [
        (0, 1, 6, "LT", 6),
        (2, 1, 6, "LT", 4),
        (0, 2, 5, "LT", 3),
        (0, 1, 6, "LE", 7),
        (5, -1, 0, "GT", 5),
        (5, -1, 0, "GE", 6),
        (9, 1, 6, "LT", 0),
    ],
)
def test_the_count_is_read_from_the_condition(text, start, step, bound, direction, expected):
    assert count(text, start, step, bound, direction) == expected


def test_the_compilers_own_count_comes_first():
    assert count(PLAIN, known=', backend_config={"known_trip_count":{"n":"11"}}') == 11


def test_a_bound_on_the_left_is_read_mirrored():
    assert count(PLAIN, sides="%bound, %i.1", direction="GT") == 6


def test_a_bound_that_is_data_gives_no_count():
    assert count(PLAIN, sides="%i.1, %i.1") is None


def test_a_counter_that_runs_away_from_its_bound_gives_no_count():
    assert count(PLAIN, step=-1) is None
