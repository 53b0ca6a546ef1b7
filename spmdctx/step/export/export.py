"""Exports a planned step as a Python module, and checks that the module writes the program that the step itself runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from spmdctx.errors import UnsupportedError
from spmdctx.ir.graph import LITERAL
from spmdctx.lowering.compile import as_held, jaxpr_to_compile
from spmdctx.step.entry import Entry
from spmdctx.step.export.again import check_unchanged
from spmdctx.step.export.align import align, tagged
from spmdctx.step.export.checked import difference
from spmdctx.step.export.form import Form, form_of
from spmdctx.step.export.listing import Listing
from spmdctx.step.export.losses import marked_trace
from spmdctx.step.export.module import Tables, module_text
from spmdctx.step.export.runtime import Numbered, digest, filled, type_text
from spmdctx.step.planning.planner import Planned
from spmdctx.trace.capture.arguments import Static
from spmdctx.trace.capture.target import Target
from spmdctx.trace.specs import partition_spec


@dataclass(frozen=True)
class Exporter:
    """Exports the plan of one entry of a step."""

    entry: Entry
    target: Target
    static: Static

    def __call__(self) -> str:
        """Returns the source of the module, which was run to see that it writes the step's own program.

        Raises:
            PlanError: the step has changed since it was planned.
            UnsupportedError: something that a module without spmdctx cannot say, by name.
        """
        entry, planned = self.entry, self.entry.planned
        _check_supported(entry)
        form = form_of(entry, self.target, self.static)
        check_unchanged(entry, self.target, self.static, form.given)
        own, tree = form.traced()
        marked_own = marked_trace(form, own, entry.captured.name) if entry.captured.is_rewritten else own
        captured = tagged(planned.program.jaxpr)
        align(captured, marked_own, form.inputs)
        devices = _devices(entry)
        marked, lowered = (
            jaxpr_to_compile(replace(planned.program, jaxpr=jaxpr), planned.assignment, planned.mesh, devices, planned.directives)
            for jaxpr in (captured, planned.program.jaxpr)
        )
        listing, results = Listing(), form.results(own)
        listing.program(marked, marked_own, form.inputs, results)
        text = module_text(self._tables(form, own, tree, listing))
        _check(text, own, lowered, form, results, entry.captured.name, devices)
        return text

    def _tables(self, form: Form, own: Any, tree: Any, listing: Listing) -> Tables:
        entry, shardings = self.entry, _specs(self.entry.planned)
        paths = _input_paths(form)
        place = {number: index for index, number in enumerate(form.inputs)}
        inputs = [
            (path, type_text(aval), shardings[0][place[number]])
            for number, (path, aval) in enumerate(zip(paths, own.in_avals, strict=True))
        ]
        outputs = []
        paths_out = jax.tree_util.tree_flatten_with_path(filled(tree, range(len(own.out_avals))))[0]
        marks = [(keys, leaf) for keys, leaf in paths_out if not callable(leaf)]
        for (keys, _), aval, source in zip(marks, own.out_avals, form.results(own), strict=True):
            spec = inputs[int(source.partition(".")[2])][2] if isinstance(source, str) else shardings[1][source]
            outputs.append(("/".join(["out", *[jax.tree_util.keystr((key,), simple=True) for key in keys]]), type_text(aval), spec))
        donated = [paths[number] for number, leaf in zip(form.inputs, entry.captured.inputs, strict=True) if leaf.donated]
        return Tables(
            name=entry.captured.name,
            axes=entry.plan.mesh,
            traced_on=dict(form.axes),
            arguments=form.names,
            objects=form.objects,
            static=form.static,
            inputs=inputs,
            outputs=outputs,
            donated=donated,
            compiler_options=entry.compiler_options,
            digest=digest(Numbered(own.jaxpr)),
            bodies=listing.tables,
            has_losses=entry.captured.is_rewritten,
        )


def _input_paths(form: Form) -> list[str]:
    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(form.call)[0]:
        if callable(leaf):
            continue
        positional, argument, *inner = keys
        text = [jax.tree_util.keystr((key,), simple=True) for key in inner]
        first = form.names[argument.idx] if positional.idx == 0 else jax.tree_util.keystr((argument,), simple=True)
        found.append("/".join([first, *text]))
    return found


def _check_supported(entry: Entry) -> None:
    captured = entry.captured
    if captured.is_rewritten and not any(region.is_loss for region in entry.regions):
        raise UnsupportedError(
            'export("jax") cannot write micro-batches of a loss of the whole batch.',
            where=captured.name,
            got="spmdctx.value_and_grad or spmdctx.grad in the step, with grad_accumulation_step",
            fix="export a step that uses jax.value_and_grad, whose loss is that of the whole batch",
        )


def _devices(entry: Entry) -> list[Any]:
    """Returns as many devices as the plan needs; where there are fewer, one stands for those that are missing, as nothing is compiled."""
    count = entry.planned.mesh.num_devices
    found = list(entry.environment.devices[:count])
    return [*found, *found[-1:] * (count - len(found))]


def _specs(planned: Planned) -> tuple[list[Any], list[Any]]:
    """Returns the PartitionSpecs of the program's arguments and results."""
    graph, values, directives = planned.program.graph, planned.assignment.values, planned.directives
    sides = ([values[value] if value != LITERAL else () for value in side] for side in (graph.inputs, graph.outputs))
    held = [
        [as_held(value, own, directives) for value, own in zip(*pair, strict=True)]
        for pair in zip((graph.inputs, graph.outputs), sides, strict=True)
    ]
    return [partition_spec(own) for own in held[0]], [partition_spec(own) for own in held[1]]


def _check(text: str, own: Any, lowered: Any, form: Form, results: Sequence[Any], name: str, devices: Sequence[Any]) -> None:
    """Runs the module's own code on the step's trace, and compares what it writes with the program that the step runs.

    Raises:
        UnsupportedError: the two differ.
    """
    module: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "<export>", "exec"), module)
    made = module["rewritten"](own, module["mesh"](devices)).jaxpr
    found = difference(_in_order(lowered.jaxpr, form, results, made), made)
    if found:
        raise UnsupportedError('export("jax") cannot write this step: its module would not run the same program.', where=name, got=found)


def _in_order(jaxpr: Any, form: Form, results: Sequence[Any], made: Any) -> Any:
    """Returns the lowered program with inputs and results in the order of the module's."""
    place = {number: index for index, number in enumerate(form.inputs)}
    invars = [jaxpr.invars[place[number]] for number in range(len(made.invars))]
    outvars = [invars[int(one.partition(".")[2])] if isinstance(one, str) else jaxpr.outvars[one] for one in results]
    return jaxpr.replace(invars=invars, outvars=outvars)
