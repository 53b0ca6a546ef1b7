"""MSJobs of MindSpore's operator become JobSets and RayJobs, or errors name what they cannot be."""

import contextlib
import copy
import random

import pytest

from spmdctx.communication.clusters import detect
from spmdctx.errors import ContextError, SpmdctxError, UnsupportedError
from spmdctx.k8s.mindspore.convert import Changes, convert
from tests.k8s.msjobs import CONVERTED, FOLDER, REFUSED, converted, read
from tests.k8s.replay import containers_of


def workers_of(manifest):
    if manifest["kind"] == "JobSet":
        return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][1]["template"]


def test_every_file_is_converted_or_refused():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*CONVERTED, *REFUSED}
    assert len(CONVERTED) + len(REFUSED) >= 10


@pytest.mark.parametrize("name", CONVERTED)
def test_a_job_is_converted_with_its_numbers_and_its_pods(name):
    (manifest,), notes = converted(name)
    worker = {str(role).lower(): one for role, one in read(name)["spec"]["msReplicaSpecs"].items()}["worker"]
    assert manifest["kind"] == CONVERTED[name][0]
    made = [one for one in containers_of(manifest) if one.role in ("workers", "worker")]
    assert len(made) == worker.get("replicas", 1)
    if manifest["kind"] == "JobSet":
        assert [detect(one.environ).process_id for one in made] == list(range(len(made)))
        (given,) = [one for one in worker["template"]["spec"]["containers"] if one["name"] == "mindspore"]
        assert made[0].command == given["command"]
    else:
        servers = {str(role).lower(): one for role, one in read(name)["spec"]["msReplicaSpecs"].items()}["ps"]
        assert manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == servers.get("replicas", 1)
    assert "The script must use JAX: scripts for MindSpore do not run as they are." in notes


@pytest.mark.parametrize(("name", "words"), REFUSED.items())
def test_what_a_job_cannot_be_is_named(name, words):
    with pytest.raises(SpmdctxError, match=words):
        convert(read(name))


def test_devices_that_jax_does_not_run_on_are_named_and_replaced_when_asked():
    with pytest.raises(UnsupportedError, match=r"huawei\.com/Ascend910: 8"):
        convert(read("ascend"))
    (manifest,), notes = converted("ascend")
    limits = workers_of(manifest)["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "8"}
    assert "Worker: 8 huawei.com/Ascend910 become 8 nvidia.com/gpu." in notes
    assert "Worker: nodeSelector stays as it is; see that such nodes have nvidia.com/gpu." in notes


@pytest.mark.parametrize(
    ("name", "script"),
    [("parameter_server", "/srv/ctr/train.py --batch 16000"), ("parameter_server_one_worker", "-m rec.train --dim 64")],
)
def test_the_workers_command_goes_to_the_launcher(name, script):
    assert converted(name).objects[0]["spec"]["entrypoint"].endswith(f" {script}")


def test_the_claim_that_workers_mount_keeps_the_state():
    (manifest,), _ = converted("parameter_server")
    assert " --folder /state/ctr " in manifest["spec"]["entrypoint"]
    spec = workers_of(manifest)["spec"]
    assert [volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume] == [
        "ctr-state"
    ]
    assert [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]].count("/state") == 1
    assert spec["containers"][0]["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "8Gi"}}


def test_servers_without_a_claim_need_one():
    with pytest.raises(SpmdctxError, match="--claim"):
        convert(read("parameter_server_one_worker"))


def test_what_a_policy_says_is_kept_or_named():
    (manifest,), notes = converted("queue")
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "day"
    assert (manifest["spec"]["ttlSecondsAfterFinished"], manifest["spec"]["suspend"]) == (600, True)
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 5
    assert workers_of(manifest)["spec"]["priorityClassName"] == "low"
    for part in ("annotations", "minAvailable", "minResources", "schedulerName", "ExitCode"):
        assert any(part in note for note in notes), part


def test_a_job_that_is_never_started_again_stays_so():
    (manifest,), _ = converted("data_parallel")
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 0}
    assert converted("dynamic").objects[0]["spec"]["failurePolicy"]["maxRestarts"] == 10


def test_a_container_beside_the_process_ends_with_it():
    (manifest,), notes = converted("beside")
    spec = workers_of(manifest)["spec"]
    assert [one["name"] for one in spec["containers"]] == ["main"]
    assert [(one["name"], one.get("restartPolicy")) for one in spec["initContainers"]] == [("fetch", None), ("watcher", "Always")]
    assert spec["containers"][0]["workingDir"] == "/srv"
    assert {"name": "words", "mountPath": "/words"} in spec["containers"][0]["volumeMounts"]
    assert [one["key"] for one in spec["tolerations"]] == ["nvidia.com/gpu", "gpu"]
    for part in ("tty", "securityContext", "/tmp", "sidecar"):
        assert any(part in note for note in notes), part


@pytest.mark.parametrize(
    ("text", "is_noted"),
    [("python t.py", False), ("cd /srv && python t.py", True), ("cd /srv && exec python t.py", False), ("python t.py | tee log", True)],
)
def test_a_shell_that_keeps_sigterm_to_itself_is_noted(text, is_noted):
    job = read("single_worker")
    job["spec"]["msReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0] |= {"command": ["/bin/sh", "-c", text], "args": []}
    assert any("SIGTERM" in note for note in convert(job).notes) == is_noted


def test_the_operators_own_variables_are_left_out():
    (manifest,), notes = converted("dynamic")
    assert not [one for one in workers_of(manifest)["spec"]["containers"][0]["env"] if one["name"].startswith("MS_")]
    assert any("MS_ROLE" in note for note in notes)
    assert manifest["metadata"]["namespace"] == "other"


def places_in(data, path=()):
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places_in(value, (*path, key))


def test_whatever_stands_in_a_job_the_error_is_documented():
    chance, changes = random.Random(0), Changes(image="train:1", claim="c", device="nvidia.com/gpu")
    for name in (*CONVERTED, *REFUSED):
        good = read(name)
        places = [place for place in places_in(good) if place]
        for _ in range(60):
            bad = copy.deepcopy(good)
            *path, last = chance.choice(places)
            node = bad
            for key in path:
                node = node[key]
            node[last] = chance.choice([None, "", "x", "ü\0", -1, 1e9, True, [], {}, [None], ["x"], {"x": None}, [{"name": "x"}], [[]]])
            with contextlib.suppress(SpmdctxError):
                convert(bad, changes)


def _amount(name, amount):
    return lambda pod: pod["containers"][0].setdefault("resources", {}).setdefault("limits", {}).update({name: amount})


WRONG_PARTS = {
    "memory in other units": (_amount("memory", "16GB"), "Worker: limits.memory"),
    "half a byte": (_amount("memory", "500m"), "Worker: limits.memory is no amount"),
    "no memory": (_amount("memory", None), "Worker: limits.memory"),
    "CPUs in words": (_amount("cpu", "four"), "Worker: limits.cpu"),
    "CPUs in bytes": (_amount("cpu", "4Gi"), "Worker: limits.cpu is no number"),
    "a number as a variable": (lambda pod: pod["containers"][0].update(env=[{"name": "A", "value": 3}]), "Worker: the value of a variable"),
    "a list of labels of nodes": (lambda pod: pod.update(nodeSelector=["a"]), "nodeSelector of the pod must be a mapping"),
    "one toleration": (lambda pod: pod.update(tolerations={"key": "a"}), "tolerations of the pod must be a list"),
}


@pytest.mark.parametrize(("change", "words"), WRONG_PARTS.values(), ids=WRONG_PARTS.keys())
def test_what_a_cluster_would_refuse_is_named_with_its_role(change, words):
    job = copy.deepcopy(read(next(name for name in CONVERTED if CONVERTED[name][0] == "JobSet")))
    roles = {str(role).lower(): one for role, one in job["spec"]["msReplicaSpecs"].items()}
    pod = roles["worker"]["template"]["spec"]
    pod["containers"] = [one for one in pod["containers"] if one["name"] == "mindspore"]
    change(pod)
    with pytest.raises(ContextError, match=words):
        convert(job, Changes(image="x:1", device="nvidia.com/gpu"))


def _with_labels(labels):
    job = copy.deepcopy(read(next(name for name in CONVERTED if CONVERTED[name][0] == "JobSet")))
    roles = {str(role).lower(): one for role, one in job["spec"]["msReplicaSpecs"].items()}
    roles["worker"]["template"]["metadata"] = {"labels": labels}
    return convert(job, Changes(image="x:1", device="nvidia.com/gpu"))


WRONG_LABELS = {
    "a space in its name": {"my team": "a"},
    "a slash too many": {"a/b/c": "d"},
    "a long name": {"a" * 64: "b"},
    "a long prefix": {"a" * 254 + "/b": "c"},
    "a space": {"team": "red blue"},
    "a hyphen at the end": {"team": "red-"},
    "a long value": {"team": "r" * 64},
}


@pytest.mark.parametrize("labels", WRONG_LABELS.values(), ids=WRONG_LABELS.keys())
def test_labels_that_a_cluster_would_refuse_are_named(labels):
    with pytest.raises(ContextError, match=r"Worker: the label .* cannot be used as it is"):
        _with_labels(labels)


def test_labels_are_kept_but_for_those_of_the_manifest():
    made = _with_labels({"team": "red", "example.com/version": 3, "empty": None, "job-name": "mine", "app.kubernetes.io/name": "bert"})
    labels = made.objects[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]["labels"]
    assert {"team": "red", "example.com/version": "3", "empty": ""}.items() <= labels.items()
    assert "job-name" not in labels
    assert labels["app.kubernetes.io/name"] != "bert"
    named = [note for note in made.notes if "the manifest or the operator sets it" in note]
    assert [note.split()[3] for note in named] == ["job-name", "app.kubernetes.io/name"]
