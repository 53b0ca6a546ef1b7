"""A collective of a plan, the reason why it runs, and the ways in which compilers write it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from spmdctx.errors import Sentence, read_gaps
from spmdctx.ir.sharding import AxisNames

COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


class CauseForm(Enum):
    """The reasons why collectives run, each with its sentence.

    Plan files keep the sentence: a form that gets new words no longer reads the causes of older files.
    """

    OPERAND = "operand {position} of {primitive}: {path} {source} -> {target}"
    RESULT = "result of {primitive}: {path} {source} -> {target}"
    SUM = "partial result of {primitive}"
    LOOP_SUM = "partial result of {primitive}, added up by a loop"
    BUCKET = "bucket {bucket} of gradients: partial result of {primitive}"
    LOOP_BUCKET = "bucket {bucket} of gradients: partial result of {primitive}, added up by a loop"
    LOSS = "joined by value_and_grad"
    WRITTEN = "{primitive} written in shard_map"
    BROADCAST = "result of {primitive}, which runs on one device"
    OTHER = "{text}"


MOVES = frozenset({CauseForm.OPERAND, CauseForm.RESULT})
"""Causes of collectives that change the sharding of a value, which the gap `path` names."""

SUMS = frozenset({CauseForm.SUM, CauseForm.LOOP_SUM})
"""Causes of collectives that reduce the partial result of one op or loop."""

_SHARDING = r"\[[^\]]*\]"

_PATTERNS = {"position": r"\d+", "bucket": r"\d+", "primitive": r"\S+", "path": ".*", "source": _SHARDING, "target": _SHARDING}


class Cause(Sentence):
    """The reason why a collective runs."""

    form: CauseForm

    @classmethod
    def read(cls, text: str) -> Cause:
        """Returns the cause whose sentence a plan file holds; any other text is a cause of the form `OTHER`."""
        for form in CauseForm:
            gaps = read_gaps(text, form, _PATTERNS)
            if gaps is not None:
                return cls(form, **gaps)
        return cls(CauseForm.OTHER, text=text)

    @classmethod
    def move(cls, position: int | None, primitive: str, path: str, source: str, target: str) -> Cause:
        """Returns the cause of a change of sharding, for an operand of an op or for its result (`position` None)."""
        ends = {"primitive": primitive, "path": path or "value", "source": source, "target": target}
        return cls(CauseForm.RESULT, **ends) if position is None else cls(CauseForm.OPERAND, position=position, **ends)

    @classmethod
    def sum(cls, primitive: str, bucket: int | None = None, *, in_loop: bool = False) -> Cause:
        """Returns the cause of the reduction of an op's partial result, with the bucket of the gradient if it has one."""
        if bucket is None:
            return cls(CauseForm.LOOP_SUM if in_loop else CauseForm.SUM, primitive=primitive)
        return cls(CauseForm.LOOP_BUCKET if in_loop else CauseForm.BUCKET, bucket=bucket, primitive=primitive)

    def along(self, path: str) -> Cause:
        """Returns the same cause for a value of another path."""
        return type(self)(self.form, **{**self.gaps, "path": path})


LOSS_REDUCTION = Cause(CauseForm.LOSS)
"""The cause of collectives that combine the results of losses which each device computes for itself."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One planned or compiled collective.

    `payload_bytes` is per device and per execution: the operand of an all_reduce, reduce_scatter, all_to_all or
    collective_permute, the result of an all_gather. `time_s` is one execution's; `repeats` counts executions in a step.
    """

    kind: str
    axes: AxisNames
    payload_bytes: int
    time_s: float
    repeats: int
    cause: Cause
    source: str = ""


class Way(NamedTuple):
    """One way in which a compiler writes a planned kind.

    `compiled` is the compiled kind, and `ratio` its payload over the planned one. `dtypes` has its types, if they tell the way. A payload
    that `is_padded` may be larger.
    """

    planned: str
    compiled: str
    ratio: float
    dtypes: tuple[str, ...]
    name: str
    is_padded: bool = False


AS_PLANNED = "as planned"
"""The name of the way in which nothing differs."""
