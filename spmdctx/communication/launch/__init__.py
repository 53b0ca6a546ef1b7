"""Starts the processes of a job on one machine: `spmdctx launch`."""

from spmdctx.communication.launch.job import Job, run_job

__all__ = ["Job", "run_job"]
