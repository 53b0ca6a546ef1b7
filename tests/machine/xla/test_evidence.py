"""Every file on what XLA does tells it in one form, and what it names exists."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import spmdctx
from spmdctx.machine.topology import Compiler

PACKAGE = Path(spmdctx.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(path for path in (PACKAGE / "machine" / "xla").rglob("*.py") if path.name != "__init__.py")
HEADINGS = ["What XLA does", "Seen in", "Switch", "Priced by", "Written or prevented by", "Checked by"]
SWITCHES = {field.name for field in dataclasses.fields(Compiler)} - {"version"}
CONSTANTS = {
    "cost/memory/early_updates.py": ["_LEAST_SAVED", "_LEAST_SHARE"],
    "lowering/scheduler_limit.py": ["_SLACK"],
    "machine/presets.py": ["_V5E_GATHER_OVERLAP", "_GPU_SHARE"],
    "machine/xla/collectives/placing.py": ["MOST_HIDING", "PRODUCTS_WAITED"],
    "machine/xla/fusion.py": ["_MOST_SOURCES"],
    "machine/xla/fusion_work.py": ["_COSTLY_FLOPS"],
    "machine/xla/late_products.py": ["LARGEST_UPDATE"],
    "machine/xla/memory/on_chip.py": ["_FILLED_ON", "_CHIP_SHARE_ON", "_SHORT"],
    "machine/xla/memory/scheduler_limit.py": ["OWN_PERCENT", "MOST_RERUNS"],
    "machine/xla/schedule.py": ["_PART_PASSED"],
}


def parts_of(path):
    """The docstring's sentence, and what stands under each heading."""
    head, *rest = re.split(rf"^({'|'.join(HEADINGS)}): ", ast.get_docstring(ast.parse(path.read_text())), flags=re.MULTILINE)
    return head, rest[::2], dict(zip(rest[::2], map(str.strip, rest[1::2]), strict=True))


def modules_in(text):
    return [word.replace(".", "/") for word in re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+\b", text)]


def is_there(text):
    paths = [path.strip() for path in text.split(",")]
    return paths and all((ROOT / path).is_file() and path.startswith(("tests/", "benchmarks/")) for path in paths)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_file_on_what_xla_does_has_the_six_headings_in_order(path):
    head, headings, parts = parts_of(path)
    assert headings == HEADINGS
    assert re.fullmatch(r"[^\n]+\.\n\n", head)
    assert all(parts.values())
    assert is_there(parts["Checked by"])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_switches_and_modules_that_it_names_exist(path):
    _, _, parts = parts_of(path)
    switches = re.findall(r"`Compiler\.(\w+)`", parts["Switch"])
    assert set(switches) <= SWITCHES
    assert switches or parts["Switch"].startswith("none: ")
    for heading in ("Priced by", "Written or prevented by"):
        named = modules_in(parts[heading])
        assert named or parts[heading].startswith("nothing")
        assert [name for name in named if not ((PACKAGE / f"{name}.py").is_file() or (PACKAGE / name).is_dir())] == []


def test_every_switch_is_told_of():
    told = {name for path in MODULES for name in re.findall(r"`Compiler\.(\w+)`", parts_of(path)[2]["Switch"])}
    assert told | {"runs_barriers_in_order"} == SWITCHES


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in CONSTANTS.items() for name in names])
def test_a_calibrated_constant_names_its_measurement_and_what_repeats_it(path, name):
    body = ast.parse((PACKAGE / path).read_text()).body
    index = next(place for place, node in enumerate(body) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    found = re.search(r"^Measured on: (.+)\nChecked by: (.+)", ast.literal_eval(body[index + 1].value), flags=re.MULTILINE)
    assert found
    assert is_there(found[2])
