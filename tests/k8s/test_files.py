"""What the docs give for a cluster: accepted by the schemas of its kinds, and true of what the package writes."""

import re

import pytest
import yaml
from kubeflow_trainer_api import models

from spmdctx.cli.parser.commands import command_parser
from spmdctx.k8s import JobOptions, manifests
from spmdctx.k8s.operators.jobset import DEFAULT_RESTARTS, failure_policy, pod_failure_policy
from tests.k8s.schemas import strict_faults
from tests.tree import ROOT

FOLDER = ROOT / "docs" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
KUSTOMIZATIONS = [path for path in FILES if path.stem == "kustomization"]
OBJECTS = [path for path in FILES if path.parent.name == "base" and path.stem != "kustomization"]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def objects(path):
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_a_kustomization_names_what_stands_beside_it(path):
    (found,) = objects(path)
    assert sorted(found["resources"]) == sorted(one.name for one in path.parent.glob("*.yaml") if one != path)


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.stem)
def test_an_object_of_a_core_kind_fits_its_schema(path):
    assert [strict_faults(one) for one in objects(path)] == [[]] * len(objects(path))


def test_the_runtime_starts_jobs_again_as_a_jobset_does():
    (found,) = objects(FOLDER / "trainer" / "runtime.yaml")
    read = models.TrainerV1alpha1ClusterTrainingRuntime.from_dict(found).to_dict()
    assert read["spec"]["template"]["spec"]["failurePolicy"] == failure_policy(DEFAULT_RESTARTS)
    (node,) = found["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["spec"]["podFailurePolicy"] == pod_failure_policy()
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "t", **node["template"]["metadata"]},
        "spec": node["template"]["spec"],
    }
    assert strict_faults(job) == []


def test_the_policy_of_the_network_is_for_pods_of_jobs():
    (manifest,) = manifests(JobOptions("t", "i:1", ("t.py",), processes=2))
    labels = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]["labels"]
    selectors = [one["spec"]["podSelector"]["matchLabels"] for one in objects(FOLDER / "base" / "network-policy.yaml")]
    assert selectors[0].items() <= labels.items()


def test_the_role_allows_what_the_client_asks_for():
    (role,) = objects(FOLDER / "base" / "role.yaml")
    allowed = {
        (group, kind, verb) for rule in role["rules"] for group in rule["apiGroups"] for kind in rule["resources"] for verb in rule["verbs"]
    }
    jobs = (("jobset.x-k8s.io", "jobsets"), ("trainer.kubeflow.org", "trainjobs"), ("ray.io", "rayjobs"))
    assert allowed == {(*job, verb) for job in jobs for verb in ("create", "get", "delete")} | {
        ("", "pods", "list"),
        ("", "pods/log", "get"),
    }


def test_the_images_user_is_that_of_the_pods():
    text = (FOLDER / "Dockerfile").read_text()
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == [f"{JobOptions('t', 'i', ()).pods.user}:1000"]


def commands():
    text = PAGE.replace("\\\n", " ")
    return [line.partition("#")[0].partition(" > ")[0].split()[1:] for line in text.splitlines() if line.startswith("spmdctx k8s")]


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words[1:4]))
def test_a_command_of_the_page_is_one(words):
    end = words.index("--") if "--" in words else len(words)
    told = command_parser().parse_args(words[:end])
    told.arguments = words[end + 1 :]
    if words[1] == "manifest":
        from spmdctx.cli.k8s.arguments import job_options

        assert manifests(job_options(told))


def test_the_page_says_that_nothing_ran_on_a_cluster():
    assert "**No manifest of spmdctx was ever run on a real cluster.**" in PAGE
