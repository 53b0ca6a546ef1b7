"""Manifests of all options: accepted by the operators' schemas, and safe in what they ask for."""

import json
from itertools import combinations, product

import pytest
import yaml

from benchmarks.k8s_mutants import mutants
from benchmarks.k8s_options import covering_jobs, covering_rows, dimensions
from spmdctx.k8s import JobOptions, SecretVariable, manifests
from spmdctx.k8s.job.options import GPU, JOBSET, OPERATORS, TPU, TRAINER, Pods, Servers
from spmdctx.k8s.render import objects_of, text_of
from tests.k8s.msjobs import converted_manifests
from tests.k8s.schemas import core_faults, core_objects, model_faults, schema_faults

ALL = [pytest.param(manifests(job)[0], id=name) for name, job in covering_jobs()]
ALL += [pytest.param(one, id=f"MSJob {name}") for name, one in converted_manifests()]


@pytest.mark.parametrize("operator", OPERATORS)
def test_any_two_values_of_options_stand_together(operator):
    values = dimensions(operator)
    rows = covering_rows(values)
    for first, second in combinations(values, 2):
        found = {json.dumps([row[first], row[second]]) for row in rows}
        assert found == {json.dumps(pair) for pair in product(values[first], values[second])}


@pytest.mark.parametrize("manifest", ALL)
def test_a_manifest_fits_its_operators_schema(manifest):
    assert schema_faults(manifest) == []
    assert model_faults(manifest) == []
    assert core_faults(manifest) == []


@pytest.mark.parametrize("mutant", [pytest.param(one, id=name) for name, one in mutants()])
def test_a_manifest_with_a_fault_is_refused(mutant):
    assert schema_faults(mutant) != []


def test_typed_models_refuse_all_but_three_of_them():
    """They do not know values of enums, nor all fields that must be there; and there is none of a RayJob."""
    accepted = [name for name, one in mutants() if one["kind"] != "RayJob" and not model_faults(one)]
    assert accepted == [f"JobSet, {fault}" for fault in ("missing: the name of the role", "enum: an action", "enum: the policy of success")]


def pods_in(manifest):
    return [one["spec"]["template"] if one["kind"] == "Job" else one for one in core_objects(manifest)]


@pytest.mark.parametrize("manifest", [param for param in ALL if not param.id.startswith("MSJob")])
def test_no_container_has_rights(manifest):
    for pod in pods_in(manifest):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] > 0
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod["spec"])
        for one in pod["spec"]["containers"]:
            own = one["securityContext"]
            assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "/tmp" in {mount["mountPath"] for mount in one["volumeMounts"]}


def only(*, pods=None, **more):
    (manifest,) = manifests(JobOptions("t", "i:1", ("t.py",), pods=pods or Pods(), **more))
    return manifest


def main_of(manifest):
    return pods_in(manifest)[-1 if manifest["kind"] != "RayJob" else 2]["spec"]["containers"][0]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_secret_is_named_and_never_written(operator):
    key = "auth_token" if operator == "ray" else "token"
    pods = Pods(claim="c", secrets=(SecretVariable("KEY", "store", "k"),), token=("train", key))
    manifest = only(operator=operator, pods=pods, servers=Servers(1, 1) if operator == "ray" else Servers())
    variables = {one["name"]: one for one in main_of(manifest)["env"]}
    assert variables["KEY"]["valueFrom"] == {"secretKeyRef": {"name": "store", "key": "k"}}
    if operator == "ray":
        assert manifest["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token", "secretName": "train"}
    else:
        assert variables["SPMDCTX_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "train", "key": "token"}}


@pytest.mark.parametrize("operator", [JOBSET, TRAINER])
def test_a_slice_of_tpus_selects_its_nodes(operator):
    manifest = only(operator=operator, processes=4, devices=4, device=TPU, topology="v5e-16")
    (pod,) = pods_in(manifest)
    assert pod["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert main_of(manifest)["resources"]["limits"] == {"google.com/tpu": "4"}


def test_slices_are_jobs_of_their_own_on_pools_of_their_own():
    manifest = only(processes=8, devices=4, device=TPU, topology="v6e:4x4", slices=2)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert (replicated["replicas"], replicated["template"]["spec"]["completions"]) == (2, 4)
    assert manifest["metadata"]["annotations"] == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}


def test_what_was_preempted_or_has_saved_does_not_count_as_failed():
    manifest = only(restarts=3)
    assert manifest["spec"]["failurePolicy"] == {
        "maxRestarts": 3,
        "rules": [{"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    conditions = [rule.get("onPodConditions", rule.get("onExitCodes")) for rule in job["podFailurePolicy"]["rules"]]
    assert conditions == [[{"type": "DisruptionTarget", "status": "True"}], {"operator": "In", "values": [75]}]
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")


def test_servers_and_workers_are_groups_that_scale_apart():
    manifest = only(device=GPU, devices=2, servers=Servers(2, 4), pods=Pods(claim="c", cpu="4"))
    ps, worker = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [(one["groupName"], one["replicas"]) for one in (ps, worker)] == [("ps", 2), ("worker", 4)]
    limits = [one["template"]["spec"]["containers"][0]["resources"]["limits"] for one in (ps, worker)]
    assert limits == [{"cpu": "4"}, {"cpu": "4", "nvidia.com/gpu": "2"}]
    assert "tolerations" not in ps["template"]["spec"]


@pytest.mark.parametrize("manifest", ALL[::9])
def test_yaml_is_read_as_it_was_meant(manifest):
    text = text_of([manifest])
    assert list(yaml.safe_load_all(text)) == [manifest]
    assert objects_of("--file", text) == [manifest]
    assert "&id" not in text


NUMBERS = ("1e3", "1e-3", "08", "0x1f", "0o17", "1_000", "12:30", ".5", "1.", "+1", "-1", "2026-01-01", ".inf")
WORDS = ("y", "N", "on", "Yes", "true", "null", "~", "=", "<<", "")
MARKS = ("a: b", "- a", "# a", "a #b", "{a}", "a\nb", "'", '"', "ü", " a", "@a", "%a", "&a", "*a", "!a", "|", ">")


@pytest.mark.parametrize("text", [*NUMBERS, *WORDS, *MARKS])
def test_a_text_that_some_reader_takes_for_another_thing_stands_in_quotes(text):
    """The cluster's reader follows other rules than Python's: 1e3, 08 and y are no texts to it."""
    written = text_of([{"value": text}])
    assert yaml.safe_load(written) == {"value": text}
    *_, found = (event for event in yaml.parse(written) if isinstance(event, yaml.ScalarEvent))
    assert found.style in ("'", '"')
