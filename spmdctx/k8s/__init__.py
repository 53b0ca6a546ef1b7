"""Kubernetes: manifests for the operators JobSet, Kubeflow Trainer and KubeRay, and the client's side of a job on a cluster."""

from spmdctx.k8s.job.options import JobOptions, SecretVariable
from spmdctx.k8s.manifest import manifests

__all__ = ["JobOptions", "SecretVariable", "manifests"]
