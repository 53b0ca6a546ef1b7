"""Jobs of several processes in the tests: with a hard limit, and killed as a whole."""

import io

from spmdctx.communication.launch import Job, run_job


def run_module(module, arguments, processes, devices=1, *, timeout_s, succeeds=True):
    """Runs a module of the tests as a job; returns its exit code and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    outcome = run_job(Job(["-m", module, *arguments], processes, devices, timeout_s), out, err)
    written = out.getvalue(), err.getvalue() + outcome.trouble
    if succeeds:
        assert outcome.code == 0, "\n".join(written)
    return outcome.code, *written
