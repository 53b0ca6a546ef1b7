"""The builder of the graph as the handlers of calls and control flow see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from spmdctx.ir.graph import Mark, Role
from spmdctx.ir.rule import OpRule
from spmdctx.trace.build.program import LossOperand, ManualRegion, Program, UserPin

Env = dict[Any, int]
"""The value id of each variable of a jaxpr."""


ReadRegion = Callable[[Sequence[bool]], ManualRegion]
"""Reads a shard_map, given which of its results the step uses."""


class Around(NamedTuple):
    """What is around an equation: how often it runs in a step, and the name scope of the enclosing calls."""

    repeats: int
    prefix: str


class Builder(Protocol):
    """Takes values and ops while a jaxpr is walked; `trace.build.build.GraphBuilder` is one."""

    inputs: frozenset[int]
    ties: list[tuple[int, int]]
    marks: list[Mark]
    user_pins: list[UserPin]
    manual: dict[int, ReadRegion]
    loss_operands: list[LossOperand]
    notes: list[str]

    @property
    def num_ops(self) -> int:
        """Added so far."""

    def add_value(self, aval: Any, role: Role = Role.INTERMEDIATE, path: str = "") -> int:
        """Adds a value with the shape and dtype of `aval`; returns its id."""

    def add_like(self, value: int) -> int:
        """Adds a value with the shape, dtype and role of another; returns its id."""

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a value."""

    def read(self, env: Env, atoms: Sequence[Any]) -> tuple[int, ...]:
        """Returns the value ids of an equation's operands."""

    def add_op(self, primitive: str, operands: tuple[int, ...], results: tuple[int, ...], rule: OpRule, info: Any, around: Around) -> int:
        """Adds an op that is no equation, or one whose rule the caller knows; returns its id."""

    def walk(self, jaxpr: Any, env: Env, around: Around) -> None:
        """Adds the ops of `jaxpr`, whose inputs `env` already knows."""

    def body(self, *, is_inlined: bool = False) -> AbstractContextManager[None]:
        """Gives the ops added inside a computation of their own, which the compiler may inline into the caller's."""

    def program_of(self, body: Any) -> Program:
        """Builds the program of a body that runs on one device by itself."""
