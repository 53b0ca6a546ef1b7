"""The Plan: every decision about one step on one mesh, with its predicted cost.

What compares, explains, draws and saves a plan is imported by the first call that needs it: most plans are only run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from spmdctx.errors import ContextError, UnsupportedError, message, shown
from spmdctx.plan.data import PlanData
from spmdctx.wording import bytes_text, counted, mesh_text, seconds_text
from spmdctx.wording.files import write_file
from spmdctx.wording.reports import stamped

if TYPE_CHECKING:
    from rich.console import Group

    from spmdctx.plan.diff import OtherPlan
    from spmdctx.plan.pareto import Progress
    from spmdctx.plan.show.diff import PlanDiff
    from spmdctx.plan.show.explanation import Explanation
    from spmdctx.plan.show.pareto import Pareto
    from spmdctx.plan.summary.rates import Rates


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanData):
    """The plan of one step on one mesh; the attributes are those of `PlanData`.

    A plan compares, explains, draws and saves itself.
    """

    def __repr__(self) -> str:
        cost = f"{seconds_text(self.cost.total_s)}, {bytes_text(self.cost.memory_bytes)} per device"
        return f"<spmdctx.Plan {mesh_text(self.logical_mesh)} on {self.topology}: {cost}>"

    @cached_property
    def summary(self) -> str:
        """What the plan is, such as "ZeRO-1 over 8 devices, embedding split by features, MLP tensor-parallel over 4".

        It is read off the shardings. Names come from the paths of parameters; small parts that differ from the rest are left out.
        """
        from spmdctx.plan.summary.sentence import sentence_of

        return sentence_of(self)

    @property
    def rates(self) -> Rates:
        """Planned samples and tokens a second, and the part of the data sheet's rate of a device (MFU); None where it is not known."""
        from spmdctx.plan.summary.rates import rates_of

        return rates_of(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, and makes the file's folder: the same bytes for equal plans, no timing, no absolute path.

        Raises:
            FileError: the file cannot be written; a former one is as it was.
        """
        from spmdctx.plan.file import write_plan

        write_plan(self, path)

    def save_mindspore(self, path: str | os.PathLike[str], *, only_parameters: bool = True, several_axes: bool = False) -> None:
        """Writes the parameters' layouts and the strategies of the ops that read them as MindSpore's strategy JSON.

        Args:
            path: a file whose name ends in `.json`.
            only_parameters: leave out optimizer state and other state.
            several_axes: allow what only newer versions of MindSpore read: a dimension over axes that do not lie side by side.

        Raises:
            UnsupportedError: shardings that the format cannot hold, by name.
            FileError: the file cannot be written; a former one is as it was.
        """
        from spmdctx.plan.mindspore.file import write_mindspore

        write_mindspore(self, path, only_parameters=only_parameters, several_axes=several_axes)

    def export(self, kind: str, path: str | os.PathLike[str]) -> None:
        """Writes what runs the step in the same way without spmdctx.

        Args:
            kind: "jax" for a Python module that imports only JAX: mesh, shardings, constraints, and `parallel(step)`, whose compiled
                collectives are those of this plan. "rules" for logical axis rules, as Flax and MaxText read them.
            path: the file, whose folder is made.

        Raises:
            ContextError: another kind.
            UnsupportedError: what cannot be said in that form, by name, such as a plan of servers.
            PlanError: "jax" of a plan that does not hold its step, such as one from a file.
            FileError: the file cannot be written; a former one is as it was.
        """
        from spmdctx.plan.export.kinds import export_text

        write_file(path, export_text(self, kind))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads what `save` wrote; the plan of a pipeline comes back as a PipelinePlan.

        Raises:
            PlanFormatError: the file is no plan, is damaged, or has another format version.
            OSError: the file cannot be read.
        """
        from spmdctx.plan.file import read_plan

        found: Plan = read_plan(path, cls)
        return found

    def to_json(self) -> str:
        """Returns the text of the plan's file, which `load` reads; `to_dict` gives what the table says."""
        from spmdctx.plan.file import plan_json

        return plan_json(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns what the table says as plain data, in seconds and bytes, with its versioned "schema"."""
        from spmdctx.plan.show.plain import plan_figures

        made_for = {"step": self.about.step, "model": self.about.model, "versions": dict(self.about.versions)}
        return stamped("plan", {"summary": self.summary, **plan_figures(self), "rates": self.rates, "made_for": made_for})

    def __reduce__(self) -> Any:
        from spmdctx.plan.file import plan_json, plan_state, restored

        return restored, (type(self), plan_json(self), plan_state(self))

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def diff(self, other: Plan | OtherPlan) -> PlanDiff:
        """Returns the changes from this plan to `other`, which may be the plan of a pipeline."""
        from spmdctx.plan.diff import OtherPlan, diff_plans

        if isinstance(other, OtherPlan):
            found: PlanDiff = other.changes_from(self)
            return found
        from spmdctx.plan.show.diff import PlanDiff

        return diff_plans(self, other, PlanDiff)

    def explain(self, pattern: str) -> Explanation:
        """Explains why the arguments or ops that match `pattern` are split as they are, with the runner-up and what would make it win.

        Args:
            pattern: part of a path ("layers/3/attn/q"), a glob over whole paths ("*/attn/*"), or an op's primitive
                ("dot_general"), name scope or source line ("model.py:41").
        """
        from spmdctx.plan.explain import explain_plan
        from spmdctx.plan.show.explanation import Explanation

        return explain_plan(self, pattern, Explanation)

    def certify(self) -> Plan:
        """Returns this plan with its certificate: `lower_bound_s`, below which no plan of the declared space is counted, and `gap`.

        A plan that has one is returned as it is.

        Raises:
            UnsupportedError: the plan is from a file, or was not searched for; plan the step again.
        """
        if self.lower_bound_s is not None:
            return self
        if self.certifier is None:
            searched = self.mode == "auto_parallel" and self.logical_mesh.num_devices > 1
            what = "it does not hold the step that it was made for" if searched else "nothing was searched for it"
            raise UnsupportedError(
                f"This plan cannot be certified: {what}.",
                got=f"a plan of parallel_mode {self.mode!r} on {counted(self.logical_mesh.num_devices, 'device')}",
                fix="plan the step again in auto_parallel on several devices, and certify that plan",
            )
        certified = self.certifier()
        return certified if self.exporter is None else replace(certified, exporter=self.exporter)

    def pareto(
        self, memory_bytes: Sequence[int] = (), num_devices: Sequence[int] = (), *, progress: Progress | None = None
    ) -> Pareto[Plan]:
        """Weighs time against memory: plans the step again under each budget, and under none, on each number of devices.

        Little work is spent on proofs, and notes say what was left out. In a terminal a line shows what is being planned. An
        interrupt (Ctrl-C) ends it with the points found so far.

        Args:
            memory_bytes: budgets per device; empty for this plan's memory and fractions of it, down to where nothing fits.
            num_devices: device counts; empty for half as many, as many and twice as many.
            progress: called with each point and each budget that no plan meets, as it is found, in place of that line.

        Raises:
            UnsupportedError: the plan is from a file; plan the step again.
            TypeError: budgets or counts that are no numbers, or a progress that cannot be called.
            ContextError: a budget or count that is not positive.
        """
        return weighed(self.replan, self.logical_mesh.num_devices, memory_bytes, num_devices, progress)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as one self-contained page, and makes the file's folder; a reader never sees half of it.

        Raises:
            FileError: the file cannot be written; a former one is as it was.
        """
        from spmdctx.plan.show.page import plan_document

        write_file(path, plan_document(self))

    def __rich__(self) -> Group:
        from spmdctx.plan.show.table import plan_table

        return plan_table(self)

    def __str__(self) -> str:
        from spmdctx.plan.show.terminal import plain_text

        return plain_text(self)

    def _repr_html_(self) -> str:
        from spmdctx.plan.show.page import plan_page

        return plan_page(self)


def weighed(
    replan: Callable[..., Any] | None,
    own: int,
    memory_bytes: Sequence[int],
    num_devices: Sequence[int],
    progress: Progress | None,
) -> Pareto[Any]:
    """Answers `Plan.pareto`, also for the plan of a pipeline; see there.

    Args:
        replan: plans the step again; None if the plan does not hold it.
        own: the number of devices of the plan.
        memory_bytes: see there.
        num_devices: see there.
        progress: see there.
    """
    if replan is None:
        raise UnsupportedError(
            "This plan cannot be planned again: it does not hold the step that it was made for.",
            fix="plan the step again in auto_parallel, and ask that plan",
        )
    for name, values in (("memory_bytes", memory_bytes), ("num_devices", num_devices)):
        if not isinstance(values, Iterable):
            raise TypeError(message(f"{name} must be a list.", got=shown(values)))
    if any(isinstance(count, bool) or not isinstance(count, int) for count in num_devices):
        raise TypeError(message("num_devices must hold ints.", got=shown(list(num_devices))))
    if any(count < 1 for count in num_devices):
        raise ContextError("num_devices must hold ints of at least 1.", got=shown(list(num_devices)))
    if progress is not None and not callable(progress):
        raise TypeError(message("progress must be a function of what is found.", got=shown(progress)))
    from spmdctx.plan.pareto import Ask, Brief, plan_again
    from spmdctx.plan.show.pareto import Pareto, showing

    brief = replan.briefly() if isinstance(replan, Brief) else replan
    with showing(progress) as tell:
        return plan_again(Ask(brief, own, memory_bytes, num_devices, tell, is_brief=brief is not replan), Pareto)
