"""Reports as plain data: one form for `to_dict`, `to_json` and the `--json` of the command line, with one versioned field."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, ClassVar

VERSION = 1
"""Of the form of all reports. A new field leaves it as it is; a field that goes, or means something else, raises it."""


class Report:
    """What can give its figures as plain data; a subclass names its kind and gives the figures."""

    __slots__ = ()

    kind: ClassVar[str]
    """The middle of the field "schema"."""

    @abstractmethod
    def _figures(self) -> dict[str, Any]:
        """Returns the figures, of any types that `plain` knows."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dictionaries, lists, text and numbers, in seconds and bytes; "schema" names kind and version."""
        return stamped(self.kind, self._figures())

    def to_json(self) -> str:
        """Returns `to_dict` as JSON text."""
        return json_text(self.to_dict())


def stamped(kind: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns figures as plain data under their schema, "spmdctx.KIND/VERSION"."""
    found: dict[str, Any] = plain({"schema": f"spmdctx.{kind}/{VERSION}", **figures})
    return found


def json_text(data: Mapping[str, Any]) -> str:
    """Returns plain data as JSON text."""
    return json.dumps(data, indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """Returns a value as JSON holds it, so that reading it back gives the same.

    Reports, named tuples and dataclasses become dictionaries, other collections lists, and numbers that are not finite text.
    """
    if isinstance(value, Report):
        return value.to_dict()
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Collection):
        return [plain(item) for item in value]
    return plain(value.item()) if hasattr(value, "item") else str(value)
