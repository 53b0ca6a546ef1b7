"""How a step is copied and pickled: as its function and its options. Plans, programs and timings belong to the step that made them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any, Self


class CopyMethods:
    """What `copy`, `pickle` and their like call. A step that a module has under its own name stays that one, as functions do."""

    _given: tuple[Callable[..., Any], dict[str, Any]]

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Returns the name of the step in its module, else what makes another one."""
        fn, options = self._given
        return self._own_name or (type(self), (fn, options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies what a function is bound to; devices and other options are shared."""
        fn, options = self._given
        return self if self._own_name else type(self)(copy.deepcopy(fn, memo), options)  # type: ignore[call-arg]  # the step's own

    @property
    def _own_name(self) -> str:
        name = str(getattr(self, "__qualname__", ""))
        found: Any = sys.modules.get(self.__module__)
        try:
            found = reduce(getattr, name.split("."), found)
        except AttributeError:
            return ""
        return name if found is self else ""
