"""The audit: compares the collectives and the memory of a compiled program with its plan."""

from spmdctx.audit.collectives import CompiledCollective, parse_collectives
from spmdctx.audit.data import AuditRow, MemoryUse
from spmdctx.audit.report import AuditReport, audit_program, audit_text, peak_bytes

__all__ = [
    "AuditReport",
    "AuditRow",
    "CompiledCollective",
    "MemoryUse",
    "audit_program",
    "audit_text",
    "parse_collectives",
    "peak_bytes",
]
