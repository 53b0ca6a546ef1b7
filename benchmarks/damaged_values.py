"""Ways to damage bytes, text and data, drawn by chance."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

ODD: tuple[Callable[[], Any], ...] = tuple(
    (lambda value=value: copy.deepcopy(value))
    for value in (
        *(None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63, 2**64 + 1, 10**400, -(10**400), 10**4000),
        *(0.5, -0.0, 1e308, -1e308, 1e-320, 1e16),
        *("", " ", "x", "\0", "ä", "数据", "a\\b", "a\nb", "8", "-1", "1e3", "nan", "../../etc/passwd", "/etc/passwd", "x" * 5000),
        *([], {}, [[]], [None], [1, 2, 3], ["a"], [[1, 2], [3]], {"a": 1}, {"": {}}, [True], [1.5], [-1], [10**30], ["x" * 1000] * 50),
    )
)
"""Values that no part expects, or that it expects elsewhere."""
TOKENS = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"null",
    b"[",
    b"{",
    b'"',
    b"\\ud800",
    b"\x00",
    b"\xff\xfe",
    b"9" * 5000,
    b"[" * 3000,
    b"\xef\xbb\xbf",
)


def any_value(chance: random.Random, depth: int = 0) -> Any:
    """Returns a value, sometimes a nested one."""
    if depth < 3 and chance.random() < 0.15:
        parts = [any_value(chance, depth + 1) for _ in range(chance.randint(0, 4))]
        return parts if chance.random() < 0.5 else {f"k{index}": part for index, part in enumerate(parts)}
    return chance.choice(ODD)()


def damaged_bytes(chance: random.Random, data: bytes) -> tuple[str, bytes]:
    """Returns what was done to bytes, and the bytes."""
    place = chance.randrange(len(data) + 1)
    end = min(len(data), place + chance.choice((1, 2, 8, 100, 1000)))
    kind = chance.choice(("cut", "flip", "flips", "insert", "drop", "twice", "swap", "token", "zeros", "empty", "append", "digit"))
    if kind == "cut":
        return kind, data[:place]
    if kind == "empty":
        return kind, b""
    if kind in ("flip", "flips"):
        found = bytearray(data)
        for _ in range(1 if kind == "flip" else chance.randint(2, 40)):
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
        return kind, bytes(found)
    if kind == "digit":
        places = [index for index, one in enumerate(data) if 48 <= one < 58]
        if places:
            at = chance.choice(places)
            return kind, data[:at] + str(chance.randrange(10)).encode() + data[at + 1 :]
    if kind == "swap":
        other = chance.randrange(len(data) + 1)
        first, second = sorted((place, other))
        return kind, data[:first] + data[second:] + data[first:second]
    new = {
        "insert": chance.randbytes(chance.randint(1, 20)),
        "drop": b"",
        "twice": data[place:end] * 2,
        "zeros": bytes(end - place),
        "append": data[place:] + chance.randbytes(5),
    }.get(kind, chance.choice(TOKENS))
    return kind, data[:place] + new + data[place if kind in ("insert", "token") else end :]


def damaged_data(chance: random.Random, data: Any, times: int = 1) -> tuple[str, Any]:
    """Returns what was done to data of lists and dicts, and a copy with that done."""
    found = copy.deepcopy(data)
    said = []
    for _ in range(times):
        said.append(_damage_once(chance, found))
    return "; ".join(said), found


def _damage_once(chance: random.Random, data: Any) -> str:
    path: list[str] = []
    node = data
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return "nothing"
        key = chance.choice(keys)
        path.append(str(key)[:30])
        deeper = isinstance(node[key], list | dict) and len(node[key]) and chance.random() < 0.85
        if not deeper:
            break
        node = node[key]
    where = "/".join(path)
    kind = chance.choice(("value", "value", "value", "near", "drop", "swap", "twice", "rename", "type"))
    old = node[key]
    if kind == "drop":
        del node[key]
    elif kind == "near" and isinstance(old, int | float):
        node[key] = chance.choice((old + 1, old - 1, -old, old * 2, old * 10**9))
    elif kind == "swap":
        other = chance.choice(keys)
        node[key], node[other] = node[other], old
    elif kind == "twice" and isinstance(node, list):
        node.insert(key, copy.deepcopy(old))
    elif kind == "rename" and isinstance(node, dict):
        node[f"{key}x"] = node.pop(key)
    elif kind == "type":
        node[key] = str(old) if not isinstance(old, str) else len(old)
    else:
        kind, node[key] = "value", any_value(chance)
    return f"{kind} at {where}"
