"""Takes out of a step what stays with workers: parameters without a mark, and all that renews them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax.extend.core as jexc

from spmdctx.errors import UnsupportedError
from spmdctx.pipeline.capture.around import Around, Placement
from spmdctx.pipeline.cut.line import is_array, needed, variables
from spmdctx.server.program.capture import Local, ServedStep, parameter_of
from spmdctx.trace.build.origins import source_line
from spmdctx.wording import counted

_SERVERS, _WORKERS = 0, 1


def with_local(step: ServedStep, parameters: Iterable[int]) -> ServedStep:
    """Returns a step in which parameters stay with workers, and the state of the optimizer that belongs to them.

    Args:
        step: with its tables.
        parameters: inputs by which the loss is differentiated, by number. Those that are scalars lie on servers all the same.

    Raises:
        UnsupportedError: servers would need what workers have.
    """
    own = frozenset(parameters)
    return replace(step, local=_Splitter(step, own).local()) if own else step


def local_notes(step: ServedStep, parameters: Iterable[int]) -> tuple[str, ...]:
    """Returns what a plan says of parameters without a mark, which are given by number."""
    inputs, part = step.captured.inputs, step.local
    scalars = [inputs[number].path for number in sorted(parameters) if part is None or number not in part.held]
    notes = (f"Servers hold scalars without a mark of set_param_ps, too: {', '.join(scalars)}.",) if scalars else ()
    return notes if part is None else (*_arrays_note(step, part), *notes)


def _arrays_note(step: ServedStep, part: Local) -> tuple[str, ...]:
    inputs = step.captured.inputs
    own = [inputs[number].path for number in part.held]
    named = ", ".join(own[:3]) + (" and others" if len(own) > 3 else "")
    found = [f"{counted(len(own), 'array')} without a mark of set_param_ps, or of the optimizer for such, stay with workers: {named}."]
    state = len(own) - len({*part.like.values()})
    if state:
        found.append(
            f"The memory of the plan is that of a part, without {counted(state, 'array')} of the optimizer that stay with workers."
        )
    return tuple(found)


class _Splitter:
    def __init__(self, step: ServedStep, own: frozenset[int]) -> None:
        self._step, self._around = step, (around := step.around)
        self._body = body = around.jaxpr.jaxpr
        self._number_of = {var: number for number, var in enumerate(body.invars)}
        self._output_of = {leaf.carried_from: index for index, leaf in enumerate(step.captured.outputs) if leaf.carried_from is not None}
        wanted = [*(var for eqn in around.after for var in variables(eqn.invars)), *variables(body.outvars)]
        self._eqns = (*needed(around.before, wanted), *around.after)
        self._maker = {var: eqn for eqn in self._eqns for var in eqn.outvars}
        self._parameter_of = parameter_of(step, around)
        self._held = self._state(own)
        self._tainted = self._reached(self._held)
        while (index := self._needs_workers()) is not None:
            self._move(index, own)
            self._tainted = self._reached(self._held)

    def _reached(self, numbers: Iterable[int]) -> set[Any]:
        """Returns the variables that depend on some inputs."""
        found = {self._body.invars[number] for number in numbers}
        for eqn in self._eqns:
            if not found.isdisjoint(variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def _needs_workers(self) -> int | None:
        """Returns a result of the step that is state of servers and depends on what workers hold; None if there is none."""
        own = {self._output_of[number] for number in self._held}
        state = sorted(set(self._output_of.values()) - own)
        return next((index for index in state if self._is_tainted(self._body.outvars[index])), None)

    def _move(self, index: int, own: frozenset[int]) -> None:
        """Leaves state with servers on which they depend, such as sums of gradients, if it does not depend on parameters of workers.

        Raises:
            UnsupportedError: it does.
        """
        moved: set[int] = set()
        wanted = [self._body.outvars[index]]
        while wanted:
            read = {var for eqn in needed(self._eqns, variables(wanted)) for var in variables(eqn.invars)} | set(variables(wanted))
            new = {number for number in self._held if self._body.invars[number] in read} - moved
            moved |= new
            wanted = [self._body.outvars[self._output_of[number]] for number in new]
        if not moved.isdisjoint(own):
            self._refuse(index)
        self._held = tuple(number for number in self._held if number not in moved)

    def _state(self, own: frozenset[int]) -> tuple[int, ...]:
        """Returns the arrays of state that meet parameters of workers in equations rather than others, by number."""
        body, loss = self._body, self._around.loss
        number_of = self._number_of
        known = {body.invars[number]: _WORKERS for number in own}
        known |= {var: _SERVERS for var in self._parameter_of.values() if var not in known}
        known |= {loss.outvars[result]: known[var] for result, var in self._parameter_of.items()}
        known |= {var: _SERVERS for var in loss.outvars if var not in known}
        next_of = {body.invars[number]: body.outvars[index] for number, index in self._output_of.items()}
        next_of = {var: new for var, new in next_of.items() if not isinstance(new, jexc.Literal)}
        stage_of = Placement(self._around, known, {}, (), next_of).stage_of
        found = [number_of[var] for var in body.invars if is_array(var) and stage_of.get(var) == _WORKERS]
        return tuple(number for number in found if number in self._output_of)

    def local(self) -> Local | None:
        """Returns what stays with workers; None if nothing does."""
        if not self._held:
            return None
        body = self._body
        own = {self._output_of[number] for number in self._held}
        results = [
            index
            for index, (leaf, atom) in enumerate(zip(self._step.captured.outputs, body.outvars, strict=True))
            if leaf.carried_from is None and self._is_tainted(atom)
        ]
        others = [index for index in range(len(body.outvars)) if index not in own and index not in results]
        here, there = self._effects()
        wanted = [*variables(body.outvars[index] for index in others), *(var for eqn in there for var in variables(eqn.invars))]
        served = set(map(id, (*needed(self._eqns, wanted), *there)))
        outvars = [body.outvars[index] for index in (*(self._output_of[number] for number in self._held), *results)]
        state = self._output_of.keys() - set(self._held)
        of_state = self._reached(number for number in state if is_array(body.invars[number]))
        program = _Program(served, self._maker, of_state - self._tainted, body.constvars)
        program.want([*variables(outvars), *(var for eqn in here for var in variables(eqn.invars))])
        program.eqns.update((id(eqn), eqn) for eqn in here)
        return self._made(program, served, outvars, tuple(results))

    def _effects(self) -> tuple[list[Any], list[Any]]:
        """Returns the equations after the loss that have effects, such as prints: those of workers, and those of servers."""
        found = [eqn for eqn in self._around.after if eqn.effects]
        here = [any(map(self._is_tainted, eqn.invars)) for eqn in found]
        return [eqn for eqn, own in zip(found, here, strict=True) if own], [eqn for eqn, own in zip(found, here, strict=True) if not own]

    def _carried_by(self, index: int) -> int:
        return int(self._step.captured.outputs[index].carried_from or 0)

    def _made(self, program: _Program, served: set[int], outvars: Sequence[Any], results: tuple[int, ...]) -> Local:
        body, around, state = self._body, self._around, self._output_of.keys()
        held = [body.invars[number] for number in self._held]
        given = tuple(sorted(self._number_of[var] for var in program.read if var in self._number_of and self._number_of[var] not in state))
        taken = tuple(var for var in program.read if var not in held and self._number_of.get(var) not in given)
        self._check_rows(taken)
        invars = [*held, *(body.invars[number] for number in given), *taken]
        eqns = [eqn for eqn in self._eqns if id(eqn) in program.eqns]
        constants = dict(zip(body.constvars, around.jaxpr.consts, strict=True))
        used = {var for eqn in eqns for var in variables(eqn.invars)} | set(variables(outvars))
        own = body.replace(
            constvars=[var for var in constants if var in used],
            invars=invars,
            outvars=list(outvars),
            eqns=eqns,
            effects=frozenset().union(*(eqn.effects for eqn in eqns)),
            debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
        )
        return Local(
            around=self._rest(served, results, taken),
            held=self._held,
            given=given,
            taken=taken,
            jaxpr=jexc.ClosedJaxpr(own, [value for var, value in constants.items() if var in used]),
            results=results,
            like=self._like(invars, eqns),
        )

    def _rest(self, served: set[int], results: Sequence[int], taken: Sequence[Any]) -> Around:
        """Returns the program of what servers hold; what they do not make is in it as an input that it gives back."""
        body, around = self._body, self._around
        outvars = list(body.outvars)
        for number in self._held:
            outvars[self._output_of[number]] = body.invars[number]
        for index in results:
            outvars[index] = body.invars[self._held[0]]
        after = tuple(eqn for eqn in around.after if id(eqn) in served)
        whole = body.replace(
            eqns=[*around.before, around.loss, *after],
            outvars=[*outvars, *taken],
            debug_info=body.debug_info._replace(result_paths=None),
        )
        return replace(around, jaxpr=jexc.ClosedJaxpr(whole, around.jaxpr.consts), after=after)

    def _like(self, invars: Sequence[Any], eqns: Sequence[Any]) -> dict[int, int]:
        """Returns the parameter of each input of the program that meets it, and arrays of its shape, element by element."""
        number_of = {var: self._number_of[var] for var in self._parameter_of.values() if self._number_of[var] in self._held}
        of = dict(number_of)
        of |= {self._around.loss.outvars[result]: of[var] for result, var in self._parameter_of.items() if var in of}
        size = 0
        while size != len(of):
            size = len(of)
            for eqn in (*eqns, *reversed(eqns)):
                near = [var for var in (*variables(eqn.invars), *eqn.outvars) if is_array(var)]
                found = {of[var] for var in near if var in of}
                if len(found) == 1 and len({var.aval.shape for var in near}) == 1:
                    of.update(dict.fromkeys(near, *found))
        return {place: of[var] for place, var in enumerate(invars) if var in of}

    def _is_tainted(self, atom: Any) -> bool:
        return not isinstance(atom, jexc.Literal) and atom in self._tainted

    def _refuse(self, index: int) -> None:
        """Refuses state of servers whose next value depends on what workers hold."""
        atom = self._body.outvars[index]
        eqns = [eqn for eqn in needed(self._eqns, [atom]) if any(map(self._is_tainted, eqn.invars))]
        scalars = [eqn for eqn in eqns if not any(map(is_array, eqn.outvars))]
        lines = [line for eqn in (*scalars, *eqns) if (line := source_line(eqn.source_info))]
        inputs = self._step.captured.inputs
        raise UnsupportedError(
            "Parameters without a mark stay with workers, and the update of what servers hold depends on these parameters or their state.",
            where=lines[0] if lines else self._step.loss.where,
            got=f"{inputs[self._carried_by(index)].path} depends on {inputs[self._held[0]].path} or others of them",
            need="an update that combines only their gradients, such as a global norm of gradients",
            fix='spmdctx.set_param_ps("*"), or no mark at all',
        )

    def _check_rows(self, taken: Sequence[Any]) -> None:
        """Refuses an update that reads a table of servers."""
        tables = () if self._step.tables is None else self._step.tables.tables
        for table in tables:
            if not table.after.isdisjoint(taken):
                raise UnsupportedError(
                    "A parameter without a mark stays with workers, and its update reads a table whose rows lie on servers.",
                    where=self._step.captured.inputs[table.number].path,
                    fix='spmdctx.set_param_ps("*"), or no mark at all',
                )


class _Program:
    """Finds the equations that workers run, and what they read: scalars of servers, and arrays that these make of their state.

    Other arrays are made again.

    Args:
        served: the identities of the equations that servers run.
        maker: the equation of each variable.
        of_state: the variables that depend on arrays of servers' state, and on none of workers.
        constants: of the step.
    """

    def __init__(self, served: set[int], maker: dict[Any, Any], of_state: set[Any], constants: Sequence[Any]) -> None:
        self._served, self._maker, self._of_state, self._constants = served, maker, of_state, set(constants)
        self.eqns: dict[int, Any] = {}
        self.read: dict[Any, None] = {}

    def want(self, wanted: Iterable[Any]) -> None:
        """Adds what makes some variables."""
        left = list(wanted)
        while left:
            var = left.pop()
            eqn = self._maker.get(var)
            if var in self._constants:
                continue
            if eqn is None or (id(eqn) in self._served and (not is_array(var) or var in self._of_state)):
                self.read[var] = None
            elif id(eqn) not in self.eqns:
                self.eqns[id(eqn)] = eqn
                left += variables(eqn.invars)
