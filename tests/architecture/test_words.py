"""One word for one thing: names of classes and constants, notes as values, and what XLA does in one place and one form."""

import ast
import re
from collections import defaultdict

import pytest

from tests.architecture.tree import MODULES, PACKAGE, ROOT, functions_of, lines_of, own_imports_of, place_of, tree_of, unit_of

ONE_VOCABULARY = {"search", "cost", "machine", "ir"}
COLLECTIONS = {"frozenset", "set", "tuple", "list", "dict"}
READS_A_SENTENCE = re.compile(r"""note.*startswith|cause\.startswith|\.find\("no rule""")
NAMES_THE_COMPILER = {"machine/presets.py", "lowering/compile_only.py", "lowering/scheduler_limit.py"}
XLA = PACKAGE / "machine" / "xla"
HEADINGS = ("What XLA does:", "Seen in:", "Switch:", "Priced by:", "Written or prevented by:", "Checked by:")
LONGEST_TEST_NAME = 80
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}


def is_private(name):
    """Tells a name with one leading underscore, without those that every named tuple has."""
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def is_collection(value):
    """Whether an expression is written as a collection: `(...)`, `{...}`, `frozenset(...)`."""
    written = isinstance(value, ast.Tuple | ast.List | ast.Set | ast.Dict)
    return written or (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in COLLECTIONS)


def members_of(value):
    """The members of a collection as text, the same for a tuple and for a set of the same things."""
    if isinstance(value, ast.Call):
        return frozenset().union(*map(members_of, value.args))
    if isinstance(value, ast.Dict):
        return frozenset((ast.unparse(key) if key else "**", ast.unparse(one)) for key, one in zip(value.keys, value.values, strict=True))
    return frozenset(map(ast.unparse, getattr(value, "elts", [value])))


def constants_of(path):
    """The collections that a module names in capitals, without leading underscores."""
    for node in tree_of(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and target.id.isupper() and is_collection(node.value):
                yield target.id.lstrip("_"), members_of(node.value)


def test_no_two_classes_of_the_planner_have_one_name():
    places = defaultdict(list)
    for path in MODULES:
        if unit_of(path) in ONE_VOCABULARY:
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(place_of(path))
    twice = [f"{name} in {found}" for name, found in places.items() if len(found) > 1]
    assert not twice, "\n".join(twice)


def test_no_two_constants_of_one_name_have_different_members():
    members = defaultdict(dict)
    for path in MODULES:
        for name, value in constants_of(path):
            members[name][place_of(path)] = value
    twice = [f"{name} in {list(found)}" for name, found in members.items() if len(set(found.values())) > 1]
    assert not twice, "\n".join(twice)


@pytest.mark.parametrize("path", MODULES, ids=place_of)
def test_nothing_is_decided_by_how_a_sentence_reads(path):
    assert [line for line in lines_of(path) if READS_A_SENTENCE.search(line)] == []


def test_the_tpu_compiler_is_named_where_its_behaviour_is_kept():
    named = {place_of(path) for path in MODULES if "libtpu" in path.read_text()}
    assert {place for place in named if not place.startswith("machine/xla/")} <= NAMES_THE_COMPILER


@pytest.mark.parametrize("path", [path for path in MODULES if XLA in path.parents and path.stem != "__init__"], ids=place_of)
def test_a_behaviour_of_xla_comes_with_its_evidence_and_its_switch(path):
    text = ast.get_docstring(tree_of(path)) or ""
    missing = [heading for heading in HEADINGS if heading not in text]
    assert not missing, ", ".join(missing)


@pytest.mark.parametrize("path", MODULES, ids=place_of)
def test_a_private_name_stays_in_its_module(path):
    modules = {name for *_, name in own_imports_of(path)}
    read = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules and is_private(node.attr)
    }
    imported = {".".join(names) for names in own_imports_of(path) if any(is_private(name) and name != "_compat" for name in names)}
    assert imported | read == set()


def test_the_name_of_a_test_is_a_short_sentence():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in files
        for node in functions_of(path)
        if node.name.startswith("test_") and len(node.name) > LONGEST_TEST_NAME
    ]
    assert files
    assert not long, "\n".join(long)
