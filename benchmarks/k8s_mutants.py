"""Manifests with one fault each: a typo, a wrong type, a missing field, a value that is none, a wrong role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from spmdctx.k8s import JobOptions, manifests
from spmdctx.k8s.job.options import GPU, TRAINER, Pods, Servers

Manifest = dict[str, Any]
Change = Callable[[Manifest], object]


def _jobset() -> Manifest:
    return manifests(JobOptions("t", "i:1", ("train.py",), processes=4, devices=8, device=GPU, pods=Pods(claim="c")))[0]


def _trainjob() -> Manifest:
    return manifests(JobOptions("t", "i:1", ("train.py",), processes=4, devices=8, device=GPU, operator=TRAINER))[0]


def _rayjob() -> Manifest:
    return manifests(JobOptions("t", "i:1", ("train.py",), servers=Servers(2, 4), pods=Pods(claim="c")))[0]


def _renamed(data: Manifest, old: str, new: str) -> None:
    data[new] = data.pop(old)


def _pods(manifest: Manifest) -> Manifest:
    """The template of the pods of a JobSet."""
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


_JOBSET: dict[str, Change] = {
    "typo: replicatedJob": lambda one: _renamed(one["spec"], "replicatedJobs", "replicatedJob"),
    "typo: maxRestart": lambda one: _renamed(one["spec"]["failurePolicy"], "maxRestarts", "maxRestart"),
    "typo: backofLimit in the job": lambda one: _renamed(
        one["spec"]["replicatedJobs"][0]["template"]["spec"], "backoffLimit", "backofLimit"
    ),
    "typo: readOnlyRootFileSystem": lambda one: _renamed(
        _pods(one)["spec"]["containers"][0]["securityContext"], "readOnlyRootFilesystem", "readOnlyRootFileSystem"
    ),
    "type: replicas as text": lambda one: one["spec"]["replicatedJobs"][0].update(replicas="1"),
    "type: a grace period as text": lambda one: _pods(one)["spec"].update(terminationGracePeriodSeconds="120s"),
    "type: a variable that is a number": lambda one: _pods(one)["spec"]["containers"][0]["env"][1].update(value=4),
    "missing: the name of the role": lambda one: one["spec"]["replicatedJobs"][0].pop("name"),
    "missing: the containers": lambda one: _pods(one)["spec"].pop("containers"),
    "enum: an action": lambda one: one["spec"]["failurePolicy"]["rules"][0].update(action="Restart"),
    "enum: the policy of success": lambda one: one["spec"]["successPolicy"].update(operator="Most"),
    "role: workers as a mapping": lambda one: one["spec"].update(replicatedJobs={"workers": one["spec"]["replicatedJobs"][0]}),
}
_TRAINJOB: dict[str, Change] = {
    "typo: numNode": lambda one: _renamed(one["spec"]["trainer"], "numNodes", "numNode"),
    "type: numNodes as text": lambda one: one["spec"]["trainer"].update(numNodes="4"),
    "type: a command as text": lambda one: one["spec"]["trainer"].update(command="python train.py"),
    "missing: the runtime": lambda one: one["spec"].pop("runtimeRef"),
    "missing: who patches": lambda one: one["spec"]["runtimePatches"][0].pop("manager"),
    "role: launcher in place of trainer": lambda one: _renamed(one["spec"], "trainer", "launcher"),
    "role: a volume in the trainer itself": lambda one: one["spec"]["trainer"].update(volumes=[]),
}
_RAYJOB: dict[str, Change] = {
    "typo: workerGroupSpec": lambda one: _renamed(one["spec"]["rayClusterSpec"], "workerGroupSpecs", "workerGroupSpec"),
    "type: replicas as text": lambda one: one["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(replicas="2"),
    "type: resources as a mapping": lambda one: one["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["rayStartParams"].update(resources={}),
    "missing: the name of a group": lambda one: one["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
    "missing: the head": lambda one: one["spec"]["rayClusterSpec"].pop("headGroupSpec"),
    "enum: the mode of authentication": lambda one: one["spec"]["rayClusterSpec"]["authOptions"].update(mode="none"),
    "role: Scheduler in place of the head": lambda one: _renamed(one["spec"]["rayClusterSpec"], "headGroupSpec", "schedulerGroupSpec"),
    "role: servers as a field": lambda one: one["spec"]["rayClusterSpec"].update(ps=one["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]),
}


def mutants() -> Iterator[tuple[str, Manifest]]:
    """Yields each mutant with its name."""
    for make, changes in ((_jobset, _JOBSET), (_trainjob, _TRAINJOB), (_rayjob, _RAYJOB)):
        for name, change in changes.items():
            made = make()
            change(made)
            yield f"{made['kind']}, {name}", made
