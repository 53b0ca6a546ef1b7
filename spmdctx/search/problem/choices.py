"""The choices of a node: the meaning of its states, as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spmdctx.ir.arrays import FloatArray, IntArray
from spmdctx.search.problem.states import OpSplits, States, among


class Choices(NamedTuple):
    """The meaning of the states of one node. Only op nodes have `split` and `states`; all nodes have `stored` and `taken`.

    `unreduced` are the axes, as bits, over which a slot is unreduced, if it may be handed on so.
    """

    stored: tuple[IntArray, ...]
    taken: tuple[IntArray, ...]
    seconds: FloatArray
    split: OpSplits | None = None
    states: States | None = None
    unreduced: IntArray | None = None

    @property
    def given(self) -> IntArray | None:
        """The axes over which results are handed on unreduced; None if the node has none."""
        return self.unreduced if self.states is None else self.states.unreduced_out

    @property
    def asked(self) -> IntArray | None:
        """The axes over which operands are taken unreduced; None if the node has none."""
        return self.unreduced if self.states is None else self.states.unreduced_in

    @property
    def layout(self) -> tuple[int, ...]:
        """The identities of all arrays but the seconds. Equal ones mean equal states, as long as the arrays live."""
        states = self.states
        own = [*self.stored, *self.taken, self.unreduced, self.split]
        if states is not None:
            own += [states.split, states.unreduced_in, states.unreduced_out, states.follows]
        return (len(self.stored), *map(id, own))

    def among(self, places: IntArray) -> Choices:
        """Returns the choices at some places."""
        stored, taken = (tuple(own[places] for own in side) for side in (self.stored, self.taken))
        states = None if self.states is None else among(self.states, places)
        return Choices(stored, taken, self.seconds[places], self.split, states, None if self.unreduced is None else self.unreduced[places])


class EdgeChoices(NamedTuple):
    """The choices of the two nodes of an edge."""

    source: Choices
    target: Choices


class Alike:
    """Arrays of choices by their contents. Many ops have equal states but for the seconds; these then share arrays, hence tables."""

    def __init__(self) -> None:
        self._arrays: dict[bytes, IntArray] = {}
        self._known: dict[int, Choices] = {}
        self._held: list[Choices] = []

    def of(self, every: Iterable[Choices]) -> list[Choices]:
        """Returns equal choices that share equal arrays; choices that are one object stay one."""
        return [self._shared(choices) for choices in every]

    def _shared(self, choices: Choices) -> Choices:
        found = self._known.get(id(choices))
        if found is None:
            stored, taken = (tuple(map(self._array, side)) for side in (choices.stored, choices.taken))
            states, unreduced = choices.states, choices.unreduced
            if states is not None:
                split, follows, given, asked = map(self._array, (states.split, states.follows, states.unreduced_out, states.unreduced_in))
                states = states._replace(split=split, wanted=taken, stored=stored, unreduced_in=asked, unreduced_out=given, follows=follows)
            unreduced = None if unreduced is None else self._array(unreduced)
            found = choices._replace(stored=stored, taken=taken, states=states, unreduced=unreduced)
            self._known[id(choices)] = found
            # If an object dies, another one may get its address.
            self._held.append(choices)
        return found

    def _array(self, array: IntArray) -> IntArray:
        return self._arrays.setdefault(array.tobytes(), array)
