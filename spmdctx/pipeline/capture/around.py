"""What a step does around its loss, by stage: each equation runs where its arrays are, so that little more than scalars crosses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.extend.core as jexc

from spmdctx.errors import UnsupportedError
from spmdctx.pipeline.capture.conds import divided
from spmdctx.pipeline.capture.marker import loss_p
from spmdctx.pipeline.cut.inline import inlined
from spmdctx.pipeline.cut.line import is_array, needed, num_bytes, variables
from spmdctx.trace.build.origins import source_line

EVERYWHERE = -1
"""The stage of what needs scalars alone: every stage computes it."""

SPREAD = -2
"""The stage of what all stages share by layers: their devices compute it together."""


@dataclass(frozen=True, eq=False)
class Program:
    """Equations that one stage, or for SPREAD all together, run at once. Inputs and outputs are variables of the whole step.

    `built` keeps what was built from them, by the names and roles of the inputs.
    """

    stage: int
    jaxpr: jexc.ClosedJaxpr
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    built: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)


@dataclass(frozen=True)
class Around:
    """A step's program around the equation of its loss.

    Attributes:
        jaxpr: the whole program, without nested calls.
        loss: the equation of the loss.
        before: equations that the loss depends on.
        after: all others, conditionals divided.
        num_selected: conditionals among these whose branches are all computed.
    """

    jaxpr: jexc.ClosedJaxpr
    loss: Any
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    num_selected: int = 0


def around_of(closed: jexc.ClosedJaxpr) -> Around:
    """Splits the program of a pipelined step."""
    flat = inlined(closed)
    (loss,) = (eqn for eqn in flat.jaxpr.eqns if eqn.primitive is loss_p)
    before = needed([eqn for eqn in flat.jaxpr.eqns if eqn is not loss], variables(loss.invars))
    early = set(map(id, before))
    after, num_selected = divided([eqn for eqn in flat.jaxpr.eqns if eqn is not loss and id(eqn) not in early])
    whole = jexc.ClosedJaxpr(flat.jaxpr.replace(eqns=[*before, loss, *after]), flat.consts)
    return Around(whole, loss, tuple(before), tuple(after), num_selected)


class Placement:
    """Finds the stage of each array around the loss.

    Args:
        around: the step's program.
        known: the stages of inputs and of the loss's results, as far as they are known.
        names: of inputs, for messages.
        early: equations before the loss that make what all stages share by layers.
        next_of: for inputs, the variable of the next value.

    Raises:
        UnsupportedError: an equation combines arrays that all stages share with those of one, or the next value of an input would change
            its stage from or to all of them.
    """

    def __init__(
        self, around: Around, known: Mapping[Any, int], names: Mapping[Any, str], early: Sequence[Any], next_of: Mapping[Any, Any]
    ) -> None:
        self.stage_of = {var: stage for var, stage in known.items() if is_array(var)}
        self._names = names
        eqns = (*early, *around.after)
        self._spread(eqns)
        body = around.jaxpr.jaxpr
        left = [var for var in body.invars if is_array(var) and var not in self.stage_of]
        # What meets no parameter lies on the first stage, unless all stages share its next value.
        self.stage_of.update({var: SPREAD if self.stage_of.get(next_of.get(var)) == SPREAD else 0 for var in left})
        renewed = [new for var, new in next_of.items() if self.stage_of.get(var) == SPREAD and is_array(new)]
        for var in renewed:
            self.stage_of.setdefault(var, SPREAD)
        self._spread(eqns)
        source_of = {new: var for var, new in next_of.items()}
        for eqn in around.after:
            self._settle(eqn, source_of)
        for var, new in next_of.items():
            self._check_same(var, new)
        self.stages = [self._stage(eqn) for eqn in around.after]

    def _spread(self, eqns: Sequence[Any]) -> None:
        """Gives arrays the stage of those that they meet in an equation, until nothing changes."""
        changes = True
        while changes:
            changes = False
            for eqn in (*eqns, *reversed(eqns)):
                arrays = [var for var in (*variables(eqn.invars), *eqn.outvars) if is_array(var)]
                found = {self.stage_of[var] for var in arrays if var in self.stage_of}
                if len(found) == 1:
                    (stage,) = found
                    new = [var for var in arrays if var not in self.stage_of]
                    self.stage_of.update(dict.fromkeys(new, stage))
                    changes = changes or bool(new)

    def _settle(self, eqn: Any, source_of: Mapping[Any, Any]) -> None:
        """Gives the results of an equation a stage where its operands lie on several: others than those of that stage cross.

        It is the stage of the input whose next value a result is, or that of the most bytes.

        Raises:
            UnsupportedError: one of the operands is shared by layers.
        """
        operands = [var for var in variables(eqn.invars) if var in self.stage_of]
        results = [var for var in eqn.outvars if is_array(var)]
        stages = {self.stage_of[var] for var in (*operands, *results) if var in self.stage_of}
        if len(stages) > 1 and SPREAD in stages:
            described = [self._described(var) for var in (*operands, *results) if var in self.stage_of]
            raise UnsupportedError(
                "What follows the loss combines arrays that all stages share by layers with those of one stage.",
                where=source_line(eqn.source_info) or eqn.primitive.name,
                got=", ".join(dict.fromkeys(described)),
                fix="combine their sums or norms, or leave pipeline_stages out",
            )
        new = [var for var in results if var not in self.stage_of]
        if not new or not stages:
            return
        homes = [self.stage_of[source_of[var]] for var in new if source_of.get(var) in self.stage_of]
        self.stage_of.update(dict.fromkeys(new, homes[0] if homes else self._heaviest(eqn)))

    def _stage(self, eqn: Any) -> int:
        """Returns the stage of an equation: that of its results, or of most bytes of its operands if these are scalars."""
        return next((self.stage_of[var] for var in eqn.outvars if var in self.stage_of), self._heaviest(eqn))

    def _heaviest(self, eqn: Any) -> int:
        """Returns the stage that has the most bytes of an equation's operands; EVERYWHERE if no stage has any."""
        bytes_on: Counter[int] = Counter()
        for var in variables(eqn.invars):
            if var in self.stage_of:
                bytes_on[self.stage_of[var]] += num_bytes(var)
        return max(sorted(bytes_on), key=lambda own: bytes_on[own], default=EVERYWHERE)

    def _check_same(self, var: Any, renewed: Any) -> None:
        """Refuses an input that all stages share if its next value lies on one of them, and the other way round."""
        stages = {self.stage_of[own] for own in (var, renewed) if own in self.stage_of}
        if len(stages) > 1 and SPREAD in stages:
            raise UnsupportedError(
                "All stages share an input of the step by layers, and its next value lies on one of them, or the other way round.",
                where=self._names.get(var, ""),
                got=f"{self._described(var)}, its next value {self._described(renewed)}",
                fix="leave pipeline_stages out",
            )

    def _described(self, var: Any) -> str:
        stage = self.stage_of[var]
        return f"{self._names.get(var, var.aval.str_short())} on {'all stages' if stage == SPREAD else f'stage {stage}'}"


def programs_of(around: Around, placement: Placement, num_stages: int) -> list[list[Program]]:
    """Returns the programs after the loss in rounds; what they read of other stages crosses between one round and the next.

    A round has at most one program for each stage, before these one for all together if some arrays are shared by layers.
    """
    stages = placement.stages
    rounds = _rounds(around, stages)
    found = []
    for number in range(max(rounds, default=-1) + 1):
        programs = []
        for stage in (*([SPREAD] if SPREAD in stages else []), *range(num_stages)):
            eqns = [eqn for eqn, own, at in zip(around.after, rounds, stages, strict=True) if own == number and at in (stage, EVERYWHERE)]
            program = _program(around, eqns, stage)
            programs += [program] if program.outputs else []
        found.append(programs)
    return found


def _rounds(around: Around, stages: Sequence[int]) -> list[int]:
    """Returns the round of each equation after the loss.

    It is the last one that is early enough for its readers: so arrays do not wait between rounds, and state is read where it is renewed.
    """
    earliest: list[int] = []
    maker: dict[Any, int] = {}
    readers: dict[Any, list[int]] = {}
    for place, eqn in enumerate(around.after):
        own = 0
        for var in variables(eqn.invars):
            if var in maker:
                own = max(own, earliest[maker[var]] + _crosses(stages[maker[var]], stages[place]))
                readers.setdefault(var, []).append(place)
        earliest.append(own)
        maker.update(dict.fromkeys(eqn.outvars, place))
    rounds = list(earliest)
    for place in reversed(range(len(rounds))):
        later = [other for var in around.after[place].outvars for other in readers.get(var, ())]
        if later:
            rounds[place] = min(rounds[other] - _crosses(stages[place], stages[other]) for other in later)
    return rounds


def _crosses(source: int, target: int) -> int:
    """Returns 1 if what is made on a stage is read on another one, or everywhere, else 0."""
    return int(source not in (target, EVERYWHERE))


def _program(around: Around, eqns: Sequence[Any], stage: int) -> Program:
    """Returns the program of some equations; it gives what anything outside of them may read."""
    body = around.jaxpr.jaxpr
    inside, own = set(map(id, eqns)), {var for eqn in eqns for var in eqn.outvars}
    read_outside = {var for eqn in around.after if id(eqn) not in inside for var in variables(eqn.invars)} | set(variables(body.outvars))
    outputs = tuple(var for eqn in eqns for var in eqn.outvars if var in read_outside)
    read = list(dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars) if var not in own))
    constants = dict(zip(body.constvars, around.jaxpr.consts, strict=True))
    inputs = tuple(var for var in read if var not in constants)
    jaxpr = body.replace(
        constvars=[var for var in read if var in constants],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(eqns),
        effects=_effects(eqns),
        debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
    )
    return Program(stage, jexc.ClosedJaxpr(jaxpr, [constants[var] for var in read if var in constants]), inputs, outputs)


def _effects(eqns: Iterable[Any]) -> frozenset[Any]:
    return frozenset().union(*(eqn.effects for eqn in eqns))
