"""Lets a plan export its step; what writes the module is imported when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from spmdctx.plan.plan import Plan
from spmdctx.step.entry import Entry
from spmdctx.trace.capture.arguments import Static
from spmdctx.trace.capture.target import Target


def exportable(entry: Entry, target: Target, static: Static) -> Plan:
    """Returns the plan of an entry, which can export itself; those of pipelines and servers cannot."""
    if type(entry) is Entry and entry.plan.exporter is None:
        entry.planned = replace(entry.planned, plan=replace(entry.plan, exporter=partial(_exported, entry, target, static)))
    return entry.plan


def _exported(entry: Entry, target: Target, static: Static) -> str:
    from spmdctx.step.export.export import Exporter

    return Exporter(entry, target, static)()
