"""One word for one thing: names of classes and constants, notes as values, and what XLA does in one place and one form."""

import ast
import re
from collections import defaultdict

import pytest

from tests.tree import MODULES, PACKAGE, ROOT, functions_of, lines_of, own_imports_of, place_of, tree_of, unit_of

ONE_VOCABULARY = {"search", "cost", "machine", "ir"}
COLLECTIONS = {"frozenset", "set", "tuple", "list", "dict"}
READS_A_SENTENCE = re.compile(r"""note.*startswith|cause\.startswith|\.find\("no rule""")
A_SENTENCE = re.compile(r"_?(note|cause|reason|warning|message|sentence|summary)")
SENTENCES = re.compile(r"_?(note|cause|reason|warning|message|sentence|summary)s")
TAKES_APART = {
    "count",
    "endswith",
    "find",
    "index",
    "partition",
    "removeprefix",
    "removesuffix",
    "rfind",
    "rpartition",
    "split",
    "startswith",
}
LOOPS = ast.For | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
MATCHES = {"findall", "finditer", "fullmatch", "match", "search"}
NAMES_THE_COMPILER = {"cli/about/environment.py", "machine/presets.py", "lowering/compile_only.py", "lowering/scheduler_limit.py"}
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


def last_name(node):
    """The name that an expression ends in: `note` of `note`, `row.note`, `str(note)` and `note[:3]`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Name(id="str"), args=[inner]) | ast.Subscript(value=inner):
            return last_name(inner)
    return ""


def items_of_sentences(loop):
    """The names that a loop gives to the single ones of several sentences."""
    pairs = [(loop.target, loop.iter)] if isinstance(loop, ast.For) else [(one.target, one.iter) for one in loop.generators]
    return {target.id for target, several in pairs if isinstance(target, ast.Name) and SENTENCES.fullmatch(last_name(several))}


def reads_a_sentence(node, sentences):
    """Tells an expression that looks for words in a sentence, or compares it with one that is written out."""
    match node:
        case ast.Call(func=ast.Attribute(value=text, attr=method), args=args):
            return (method in TAKES_APART and last_name(text) in sentences) or (
                method in MATCHES and any(last_name(arg) in sentences for arg in args)
            )
        case ast.Compare(left=ast.Constant(value=str()), ops=[ast.In() | ast.NotIn() | ast.Eq() | ast.NotEq()], comparators=[text]):
            return last_name(text) in sentences or SENTENCES.fullmatch(last_name(text)) is not None
        case ast.Compare(left=text, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=str(written))]):
            return written != "" and last_name(text) in sentences
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[text]):
            return last_name(text) in sentences
    return False


def reads_of(tree):
    """Where a module looks for words in a sentence."""
    named = {name for name in map(last_name, ast.walk(tree)) if A_SENTENCE.fullmatch(name)}
    places = [(tree, named), *((node, items_of_sentences(node)) for node in ast.walk(tree) if isinstance(node, LOOPS))]
    return [ast.unparse(node) for place, names in places for node in ast.walk(place) if reads_a_sentence(node, names)]


@pytest.mark.parametrize("path", MODULES, ids=place_of)
def test_nothing_is_decided_by_how_a_sentence_reads(path):
    assert [line for line in lines_of(path) if READS_A_SENTENCE.search(line)] == []
    assert reads_of(tree_of(path)) == []


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("row.note.startswith('no rule')", True),
        ("'no rule' in cause", True),
        ("word not in str(message)", True),
        ("'A loop.' in plan.notes", True),
        ("[one for one in plan.notes if one.endswith('turns.')]", True),
        ("PATTERN.search(reason)", True),
        ("note == 'A loop.'", True),
        ("[note for note in after.notes if note not in before.notes]", False),
        ("cause is Cause.PARTIAL", False),
        ("message == ''", False),
        ("name.startswith('no')", False),
        ("[one for one in plan.notes]; one.startswith('no')", False),
    ],
)
def test_the_search_for_such_places_finds_them(code, is_found):
    assert bool(reads_of(ast.parse(code))) == is_found


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
