"""Text of unknown origin: what is no JSON or YAML is one kind of error, in little time and memory."""

from __future__ import annotations

import pytest

from spmdctx.errors import shown
from spmdctx.wording.text_data import read_json_text, read_yaml_text

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    "text", ["{", "[NaN]", "[-Infinity]", "[1e999]", "[" * 100_000, '{"\\ud800": 1}', '["\\uDFFF"]', b"\xff", "9" * 5000]
)
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        read_json_text(text)


@pytest.mark.parametrize(
    ("text", "value"), [("[1.5, null]", [1.5, None]), ('"\\ud83d\\ude00"', "\N{GRINNING FACE}"), (b'{"a": 1e3}', {"a": 1000.0})]
)
def test_json_is_read(text, value):
    assert read_json_text(text) == value


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "a: 2020-99-99",
        "a: !!int abc",
        "a: !!int _",
        "a: !!timestamp x",
        "a: !!python/object/apply:os.getcwd []",
        "[" * 5000,
        "a: " + "9" * 5000,
        "a: &x [*x]",
        "? [1]\n: 2",
        "a: 1\n b: 2",
        "a: \x01",
        "a: \x1b[31m",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_yaml_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        read_yaml_text(text.encode())


def test_latin_1_is_a_value_error():
    with pytest.raises(ValueError, match="utf-8"):
        read_yaml_text(b"mode: \xe9")


@pytest.mark.parametrize(
    ("text", "value"), [("", None), ("a: &x [1, 2]\nb: *x", {"a": [1, 2], "b": [1, 2]}), ("a: 1\nb: {c: [x]}", {"a": 1, "b": {"c": ["x"]}})]
)
def test_yaml_is_read(text, value):
    assert read_yaml_text(text.encode()) == value


def _nested(width: int, depth: int) -> object:
    value: object = ["x"] * width
    for _ in range(depth):
        value = [value] * width
    return value


@pytest.mark.parametrize(
    "value", [_nested(10, 12), "x" * 10**7, 10**10**5, list(range(10**6)), {"a": _nested(3, 30)}, [b"y" * 10**6]], ids=lambda _: "large"
)
def test_a_large_value_is_cut_in_messages(value):
    assert len(shown(value)) < 1000


@pytest.mark.parametrize("value", [None, True, -3, 2.5, "text", [1, 2], {"mode": "auto", "config": None}, (("a", 1),) * 20])
def test_a_small_value_is_shown_whole(value):
    assert shown(value) == repr(value)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"": 1, "x": 2, "": 3}}]', '{"\\u0061": 1, "a": 2}'])
def test_a_name_that_stands_twice_in_json_is_a_value_error(text):
    with pytest.raises(ValueError, match="stands twice in one object"):
        read_json_text(text)


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 1", "x: {a: 1, 'a': 2}", "- {1: a, 1: b}"])
def test_a_key_that_stands_twice_in_yaml_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"stands twice in one mapping, line \d"):
        read_yaml_text(text.encode())


def test_a_key_may_override_a_merged_one():
    assert read_yaml_text(b"a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {1: x, '1': y}")["b"] == {"x": 3, "y": 2}


@pytest.mark.parametrize("text", ["[" + "[]," * 2_000_000 + "[]]", "[" + '{"a":1},' * 900_000 + "1]"])
def test_json_of_too_many_values_is_a_value_error(text):
    with pytest.raises(ValueError, match="commas, colons and brackets"):
        read_json_text(text)


@pytest.mark.parametrize("number", ["9" * 5000, "1" + ":1" * 3000, "0x" + "f" * 5000, "1" + "_" * 5000 + ".", "-" + "1" * 401])
def test_a_number_of_many_digits_in_yaml_is_a_value_error(number):
    with pytest.raises(ValueError, match=r"a number of \d+ characters, line 2"):
        read_yaml_text(f"a: 1\nb: {number}".encode())


def test_large_yaml_is_a_value_error():
    with pytest.raises(ValueError, match=r"more than 128 KiB"):
        read_yaml_text(b"#\n" * 70_000)


def test_merges_that_stand_for_much_are_a_value_error():
    rows = ["a0: &a0 {x: 1}", *(f"a{at}: &a{at} {{<<: [{', '.join([f'*a{at - 1}'] * 9)}]}}" for at in range(1, 9))]
    with pytest.raises(ValueError, match="stand for more than"):
        read_yaml_text("\n".join(rows).encode())
