"""Reads JSON and YAML text of unknown origin: every fault is one kind of error, and work and memory are bounded.

A name that stands twice in one object or mapping is a fault: readers differ in which of its values they take.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from spmdctx.errors import shown
from spmdctx.wording import bytes_text

if TYPE_CHECKING:
    import yaml

MOST_YAML_BYTES = 128 << 10
"""The bytes of a YAML text, which PyYAML reads at some 100 KiB a second."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MOST_MARKS = 2_500_000
"""The commas, colons, brackets and braces of a JSON text, which bound how many values it holds."""
_MOST_NODES = 100_000
"""The values that a YAML text may stand for, each alias counted as all that it names."""
_MOST_DIGITS = 400
"""The characters of a number in YAML, whose readers take more than linear time."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"


def read_json_text(text: str | bytes) -> Any:
    """Reads JSON text. Python's own reader also takes NaN, Infinity and half of a character, and ends in other errors for deep nesting.

    Raises:
        ValueError: the text is no JSON, nested too deeply, or holds too many values or a name twice.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if sum(map(data.count, (b",", b":", b"[", b"{"))) > _MOST_MARKS:
        raise ValueError(f"the text has more than {_MOST_MARKS} commas, colons and brackets")
    try:
        found = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_without_twins)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error
    if _SURROGATE.search(data):
        json.dumps(found, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, for half of a character
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twin = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {shown(twin)} stands twice in one object")
    return found


def read_yaml_text(text: bytes) -> Any:
    """Reads YAML text, which JSON is too.

    Raises:
        ValueError: the text is no YAML, a value is none of its type, it is nested too deeply, it is too large, its aliases stand for too
            much, or a mapping has a key twice.
    """
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"the text has more than {bytes_text(MOST_YAML_BYTES)}")
    import yaml  # most programs read none

    try:
        loader = yaml.SafeLoader(text.decode())
    except yaml.YAMLError as error:  # a character that YAML does not have
        raise ValueError(str(error)) from error
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error)
        raise ValueError(f"{problem[:200]}{f', line {mark.line + 1}' if mark else ''}") from error
    except RecursionError as error:
        raise ValueError("lists or mappings are nested too deeply, or hold themselves") from error
    except (TypeError, OverflowError, LookupError, AttributeError) as error:  # PyYAML, for values that are none of their tag
        raise ValueError(str(error)[:200]) from error
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns how many values a node stands for; checks its numbers and its keys."""
    import yaml

    count = known.get(id(node))
    if count is None:
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _NUMBERS and len(node.value) > _MOST_DIGITS:
                raise ValueError(f"a number of {len(node.value)} characters, line {node.start_mark.line + 1}")
            count = 1
        else:
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
            parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
            count = 1 + sum(_count(part, known) for part in parts)
        if count > _MOST_NODES:
            raise ValueError(f"the text and its aliases stand for more than {_MOST_NODES} values")
        known[id(node)] = count
    return count


def _check_keys(node: yaml.MappingNode) -> None:
    import yaml

    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            own = key.tag, key.value
            if own in seen:
                raise ValueError(f"the key {shown(key.value)} stands twice in one mapping, line {key.start_mark.line + 1}")
            seen.add(own)
