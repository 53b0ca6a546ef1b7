"""Gives arrays to servers: the largest first, each to the server that has the fewest bytes."""

from __future__ import annotations

from collections.abc import Mapping


def balanced(num_bytes: Mapping[str, int], num_servers: int) -> dict[str, int]:
    """Returns the server of each array by name; the same for the same names and sizes, on every process.

    Args:
        num_bytes: of each array.
        num_servers: at least 1.
    """
    loads = [0] * num_servers
    found = {}
    for name in sorted(num_bytes, key=lambda own: (-num_bytes[own], own)):
        server = min(range(num_servers), key=lambda number: (loads[number], number))
        loads[server] += num_bytes[name]
        found[name] = server
    return found
