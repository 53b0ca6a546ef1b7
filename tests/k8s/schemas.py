"""How the tests judge a manifest: the operators' schemas, typed models of two of them, and the schemas of the core kinds.

`schemas.json` holds what manifests have of the CustomResourceDefinitions of kubernetes-sigs/jobset (commit 08dfbdfd),
kubeflow/trainer (8c0f5059b) and ray-project/kuberay (feeaf72fa), all under the Apache License 2.0. It is made by

    python -m benchmarks.k8s_schemas FOLDER --compact tests/k8s/schemas.json

`SPMDCTX_CRDS=FOLDER` has the tests use the whole of them.
"""

import json
import os
from functools import cache
from pathlib import Path

import kubernetes_validate
from kubeflow_trainer_api import models

from benchmarks.k8s_schemas import faults, read_definitions

VERSION = "1.37"

# Each call would read all schemas of the version again.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
kubernetes_validate.utils.all_versions = cache(kubernetes_validate.utils.all_versions)


@cache
def schemas():
    folder = os.environ.get("SPMDCTX_CRDS")
    return read_definitions(Path(folder)) if folder else json.loads((Path(__file__).parent / "schemas.json").read_text())


def schema_faults(manifest):
    return faults(schemas(), manifest)


def model_faults(manifest):
    """What the typed models lose or refuse; there are none for RayJob."""
    model = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}.get(manifest["kind"])
    if model is None:
        return []
    try:
        back = model.from_dict(json.loads(json.dumps(manifest))).to_dict()
    except ValueError as error:
        return [str(error)]
    return list(_lost(manifest, back, ""))


def _lost(given, back, path):
    if isinstance(given, dict) and isinstance(back, dict):
        for name, value in given.items():
            if name not in back:
                yield f"{path}.{name}: is unknown"
            else:
                yield from _lost(value, back[name], f"{path}.{name}")
    elif isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        for index, (one, other) in enumerate(zip(given, back, strict=True)):
            yield from _lost(one, other, f"{path}[{index}]")
    elif given != back:
        yield f"{path}: {given!r} is read as {back!r}"


def core_faults(manifest):
    """What is wrong with the pods and jobs in a manifest, by the schemas of the core kinds."""
    return [fault for one in core_objects(manifest) for fault in strict_faults(one)]


def strict_faults(one):
    try:
        kubernetes_validate.validate(one, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


def core_objects(manifest):
    """The objects of core kinds that an operator makes of a manifest's own parts."""
    spec, about = manifest["spec"], {"name": manifest["metadata"]["name"]}
    if manifest["kind"] == "JobSet":
        for job in spec["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, **job["template"]}
    elif manifest["kind"] == "RayJob":
        cluster = spec["rayClusterSpec"]
        groups = (cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"]))
        for template in (*groups, spec["submitterPodTemplate"]):
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {**about, **template["metadata"]}, "spec": template["spec"]}
    else:
        for job in spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            template = job["template"]["spec"]["template"]
            main, *others = (dict(one) for one in template["spec"]["containers"])
            main |= {name: spec["trainer"][name] for name in ("image", "command", "env")}
            main["resources"] = spec["trainer"].get("resourcesPerNode", {})
            pod = {**template["spec"], "containers": [main, *others]}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {**about, **template["metadata"]}, "spec": pod}
