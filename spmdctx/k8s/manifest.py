"""The manifest of a job: one object for the operator that is to run it."""

from __future__ import annotations

from typing import Any

from spmdctx.k8s.job.check import checked
from spmdctx.k8s.job.options import JOBSET, TPU, TRAINER, JobOptions
from spmdctx.k8s.operators.jobset import jobset
from spmdctx.k8s.operators.rayjob import rayjob
from spmdctx.k8s.operators.trainjob import trainjob

Manifest = dict[str, Any]


def advice(options: JobOptions) -> list[str]:
    """Returns what a user may have forgotten: nothing of it keeps a job from running."""
    options, found = options.settled(), []
    if options.processes > 1 and options.pods.token is None:
        found.append("Without --token-secret, whatever reaches the pods can join the job.")
    if not options.pods.claim:
        found.append("Without --claim, checkpoints are gone with their pods.")
    if options.device == TPU and not options.topology:
        found.append("Without --topology, no nodes are selected; GKE gives TPUs only to pods that select them.")
    return found


def manifests(options: JobOptions) -> list[Manifest]:
    """Returns the objects of a job, as Kubernetes reads them; no cluster is contacted.

    Raises:
        ContextError: an option is wrong, or two contradict each other.
        UnsupportedError: the operator cannot run such a job.
    """
    options = checked(options)
    if options.operator == JOBSET:
        return [jobset(options)]
    return [trainjob(options) if options.operator == TRAINER else rayjob(options)]
