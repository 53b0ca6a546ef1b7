"""Reads JSON and YAML text of unknown origin: every fault is one kind of error, and no text stands for more than a million values."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import yaml

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MOST_NODES = 1_000_000
"""The values that a YAML text may stand for, each alias counted as all that it names."""


def read_json_text(text: str | bytes) -> Any:
    """Reads JSON text. Python's own reader also takes NaN, Infinity and half of a character, and ends in other errors for deep nesting.

    Raises:
        ValueError: the text is no JSON, or nested too deeply.
    """
    try:
        found = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply") from error
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
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


def read_yaml_text(text: bytes) -> Any:
    """Reads YAML text, which JSON is too.

    Raises:
        ValueError: the text is no YAML, a value is none of its type, it is nested too deeply, or its aliases stand for too much.
    """
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
        raise ValueError(f"{getattr(error, 'problem', None) or error}{f', line {mark.line + 1}' if mark else ''}") from error
    except RecursionError as error:
        raise ValueError("lists or mappings are nested too deeply, or hold themselves") from error
    except (TypeError, OverflowError, IndexError, AttributeError) as error:  # PyYAML, for values that are none of their tag
        raise ValueError(str(error)) from error
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns how many values a node stands for."""
    count = known.get(id(node))
    if count is None:
        parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
        count = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(_count(part, known) for part in parts))
        if count > _MOST_NODES:
            raise ValueError(f"its aliases stand for more than {_MOST_NODES} values")
        known[id(node)] = count
    return count
