"""Jobs are handed to a cluster, asked for, read and deleted by the official client, against a double of the API server."""

import json
import sys

import pytest
import yaml

from spmdctx.cli.main import main
from spmdctx.k8s.cluster import Cluster
from tests.k8s.double import ApiServer, pod, serving

JOB = ["train.py", "--name", "t", "--image", "i:1", "--processes", "2"]
JOBSETS, TRAINJOBS, RAYJOBS = "apis/jobset.x-k8s.io/v1alpha2", "apis/trainer.kubeflow.org/v1alpha1", "apis/ray.io/v1"
INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"


@pytest.fixture
def server(tmp_path, monkeypatch):
    made = ApiServer()
    with serving(made, tmp_path) as config:
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield made


@pytest.fixture
def run(capsys):
    def called(*words):
        code = main(["k8s", *words])
        written = capsys.readouterr()
        return code, written.out, " ".join(written.err.split())

    return called


def worker(number, **more):
    annotations = {"batch.kubernetes.io/job-completion-index": str(number)}
    return pod(f"t-workers-0-{number}-x", {INSTANCE: "t", COMPONENT: "worker"}, annotations=annotations, **more)


@pytest.mark.parametrize(
    ("more", "api", "kind"),
    [
        ([], JOBSETS, "JobSet"),
        (["--operator", "trainer"], TRAINJOBS, "TrainJob"),
        (["--servers", "1", "--workers", "2", "--claim", "c", "--processes", "1"], RAYJOBS, "RayJob"),
    ],
)
def test_a_job_is_submitted_found_and_deleted(server, run, more, api, kind):
    assert run("submit", *JOB, *more)[:2] == (0, f"created {kind} default/t\n")
    assert server.objects[api, "default", "t"]["kind"] == kind
    assert run("status", "t")[:2] == (0, f"{kind} t: waiting, started again 0 times\n")
    assert run("delete", "t") == (0, f"deleted {kind} default/t\n", "")
    assert server.objects == {}
    assert server.asked[-1][2]["propagationPolicy"] == ["Foreground"]


def test_the_arguments_of_the_script_arrive(server, run):
    assert run("submit", *JOB, "--", "--lr", "1e-3", "--name", "other")[0] == 0
    made = server.objects[JOBSETS, "default", "t"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert made["command"] == ["python", "train.py", "--lr", "1e-3", "--name", "other"]


def test_a_written_manifest_is_submitted_as_it_is(server, run, tmp_path):
    assert run("manifest", *JOB, "--out", str(tmp_path / "made"))[0] == 0
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"t-jobset.yaml", "kustomization.yaml"}
    assert run("submit", "--file", str(tmp_path / "made" / "t-jobset.yaml"))[0] == 0
    assert (JOBSETS, "default", "t") in server.objects


def test_a_dry_run_is_checked_and_kept_nowhere(server, run):
    assert run("submit", *JOB, "--dry-run")[:2] == (0, "would create JobSet default/t\n")
    assert server.objects == {}
    assert server.asked[-1][2] == {"dryRun": ["All"], "fieldValidation": ["Strict"]}


def test_a_field_that_the_server_does_not_know_is_refused(server, run, tmp_path):
    assert run("manifest", *JOB, "--out", str(tmp_path))[0] == 0
    path = tmp_path / "t-jobset.yaml"
    path.write_text(path.read_text().replace("maxRestarts", "maxRestart"))
    code, _, err = run("submit", "--file", str(path))
    assert code == 2
    assert "The cluster refuses this object." in err
    assert "maxRestart: is unknown" in err


def test_a_context_and_its_namespace_are_used(server, run):
    assert run("submit", *JOB, "--context", "research")[0] == 0
    assert (JOBSETS, "research", "t") in server.objects
    assert run("status", "t")[0] == 2
    assert run("status", "t", "--namespace", "research")[0] == 0


@pytest.mark.parametrize(
    ("words", "spoilt", "said"),
    [
        (["submit", *JOB], "twice", "There is such a job already."),
        (["submit", *JOB], "uninstalled", "install JobSet, or choose another --operator"),
        (["submit", *JOB], "forbidden", "403 you may not do this"),
        (["status", "t"], "", "There is no such job."),
        (["delete", "t"], "", "There is no such job."),
        (["logs", "t"], "", "There is no such job."),
        (["status", "../../pods/t"], "", "The name cannot be used as it is."),
        (["delete", "t,app=other"], "", "The name cannot be used as it is."),
        (["status", "t", "--context", "other"], "", "Nothing says where the cluster is."),
        (["submit"], "", "submit takes a script or --file."),
    ],
)
def test_what_a_cluster_refuses_is_said(server, run, words, spoilt, said):
    if spoilt == "twice":
        assert run(*words)[0] == 0
    server.forbidden = spoilt == "forbidden"
    server.installed -= {JOBSETS} if spoilt == "uninstalled" else set()
    code, _, err = run(*words)
    assert code == 2
    assert said in err


def test_a_cluster_that_is_not_there_is_said(tmp_path, run, monkeypatch):
    with serving(ApiServer(), tmp_path) as config:
        monkeypatch.setenv("KUBECONFIG", str(config))
    code, _, err = run("status", "t")
    assert code == 2
    assert "The cluster is not reached." in err


def test_without_the_client_the_error_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    code, _, err = run("status", "t")
    assert code == 2
    assert "pip install 'spmdctx[k8s]'" in err


@pytest.mark.parametrize(
    ("api", "status", "word", "code"),
    [
        (JOBSETS, {}, "running", 0),
        (JOBSETS, {"conditions": [{"type": "Completed", "status": "True", "reason": "AllJobsCompleted"}]}, "succeeded", 0),
        (JOBSETS, {"restarts": 3, "conditions": [{"type": "Failed", "status": "True", "message": "too often"}]}, "failed", 1),
        (JOBSETS, {"conditions": [{"type": "Suspended", "status": "True"}]}, "suspended", 0),
        (JOBSETS, {"conditions": [{"type": "Suspended", "status": "False"}]}, "running", 0),
        (TRAINJOBS, {"conditions": [{"type": "Complete", "status": "True"}]}, "succeeded", 0),
        (RAYJOBS, {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running"}, "running", 0),
        (RAYJOBS, {"jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "failed": 4}, "failed", 1),
        (RAYJOBS, {"jobStatus": "FAILED", "jobDeploymentStatus": "Retrying", "failed": 1}, "waiting", 0),
        (RAYJOBS, {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete"}, "succeeded", 0),
    ],
)
def test_the_state_of_a_job_is_one_of_five_words(server, run, api, status, word, code):
    server.objects[api, "default", "t"] = {"metadata": {"name": "t"}, "status": status}
    server.pods = [worker(0), worker(1, phase="Failed", code=75)]
    found = run("status", "t", "--json")
    assert found[0] == code
    data = json.loads(found[1])
    assert (data["word"], data["restarts"]) == (word, status.get("restarts", status.get("failed", 0)))
    assert [(one["phase"], one["exit_codes"]) for one in data["pods"]] == [("Running", []), ("Failed", [75])]


def test_the_lines_of_a_process_are_printed(server, run):
    server.objects[JOBSETS, "default", "t"] = {"metadata": {"name": "t"}}
    server.pods = [worker(0), worker(1)]
    server.logs = {(f"t-workers-0-{number}-x", "main"): [f"step {step} of {number}" for step in range(3)] for number in range(2)}
    assert run("logs", "t")[:2] == (0, "step 0 of 0\nstep 1 of 0\nstep 2 of 0\n")
    assert run("logs", "t", "--process", "1", "--tail", "1")[:2] == (0, "step 2 of 1\n")
    assert run("logs", "t", "--process", "2")[0] == 2


def test_lines_that_are_followed_come_one_by_one(server):
    server.objects[JOBSETS, "default", "t"] = {"metadata": {"name": "t"}}
    server.pods = [worker(0)]
    server.logs = {("t-workers-0-0-x", "main"): ["first", "second"]}
    lines = Cluster().logs("t", follow=True)
    assert next(lines).line == "first"
    assert not server.more.is_set()
    server.more.set()
    assert [one.line for one in lines] == ["second"]


def test_a_process_is_found_by_its_job_its_pod_and_its_container(server, run):
    server.objects[JOBSETS, "default", "t"] = {"metadata": {"name": "t"}}
    env = [{"name": "SPMDCTX_PODS_PER_JOB", "value": "2"}, {"name": "SPMDCTX_CONTAINERS_PER_POD", "value": "2"}]
    containers = [
        {"name": name, "env": [*env, {"name": "SPMDCTX_CONTAINER_INDEX", "value": index}]}
        for name, index in (("main", "0"), ("main-1", "1"))
    ]
    places = {"batch.kubernetes.io/job-completion-index": "0", "jobset.sigs.k8s.io/job-index": "1"}
    server.pods = [pod("second", {INSTANCE: "t", COMPONENT: "worker"}, annotations=places, containers=[*containers, {"name": "watcher"}])]
    server.logs = {("second", "main-1"): ["here"]}
    assert run("logs", "t", "--process", "5")[:2] == (0, "here\n")


def test_of_several_attempts_the_last_is_read(server, run):
    server.objects[JOBSETS, "default", "t"] = {"metadata": {"name": "t"}}
    late = worker(0, created="2026-01-02T00:00:00Z")
    late["metadata"]["name"] = "again"
    server.pods = [late, worker(0)]
    server.logs = {("again", "main"): ["second"], ("t-workers-0-0-x", "main"): ["first"]}
    assert run("logs", "t")[1] == "second\n"


def test_with_servers_the_launchers_lines_are_printed(server, run):
    server.objects[RAYJOBS, "default", "t"] = {"metadata": {"name": "t"}}
    server.pods = [
        pod("submits", {INSTANCE: "t", COMPONENT: "submitter"}, containers=[{"name": "ray-job-submitter"}]),
        pod("w0", {INSTANCE: "t", COMPONENT: "worker"}, containers=[{"name": "ray-worker"}]),
    ]
    server.logs = {("submits", "ray-job-submitter"): ["all"], ("w0", "ray-worker"): ["ray"]}
    assert run("logs", "t")[1] == "all\n"
    assert run("logs", "t", "--process", "0")[1] == "ray\n"


def test_an_msjob_is_converted_and_notes_go_to_standard_error(run, tmp_path):
    from tests.k8s.msjobs import FOLDER

    code, out, err = run("convert", str(FOLDER / "single_worker.yaml"), "--image", "train:1")
    assert (code, "kind: JobSet" in out) == (0, True)
    assert "note: The script must use JAX" in err
    code, out, _ = run("convert", str(FOLDER / "single_worker.yaml"), "--json")
    assert json.loads(out)["objects"][0]["kind"] == "JobSet"
    assert json.loads(out)["notes"]


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "this is no YAML"), ("- 1", "no object of Kubernetes"), ("", "no object"), ("kind: [", "no YAML")]
)
def test_a_file_that_is_no_manifest_is_said(run, tmp_path, text, said):
    (tmp_path / "bad.yaml").write_text(text)
    for words in (["convert", str(tmp_path / "bad.yaml")], ["submit", "--file", str(tmp_path / "bad.yaml")]):
        code, _, err = run(*words)
        assert code == 2
        assert said in err


def test_a_manifest_is_written_as_yaml_or_json_and_nobody_is_asked(server, run):
    code, out, _ = run("manifest", *JOB)
    assert (code, server.asked) == (0, [])
    assert json.loads(run("manifest", *JOB, "--json")[1])["objects"] == list(yaml.safe_load_all(out))


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ([], ["--token-secret", "--claim"]),
        (["--token-secret", "t"], ["--claim"]),
        (["--token-secret", "t", "--claim", "c"], []),
        (["--device", "google.com/tpu", "--claim", "c"], ["--token-secret", "--topology"]),
    ],
)
def test_what_may_be_forgotten_is_noted(run, more, options):
    code, out, _ = run("manifest", *JOB, *more, "--json")
    assert code == 0
    assert [note.split()[1].rstrip(",") for note in json.loads(out)["notes"]] == options


@pytest.mark.parametrize("words", [["train.py"], ["train.py", "--name", "t"], ["--name", "t", "--image", "i"]])
def test_what_a_job_needs_is_said(run, words):
    code, _, err = run("manifest", *words)
    assert code == 2
    assert "A job" in err


@pytest.mark.parametrize("words", [["--env", "A"], ["--secret-env", "A=b"], ["--label", "a"]])
def test_a_pair_that_is_none_is_said(run, words):
    code, _, err = run("manifest", *JOB, *words)
    assert code == 2
    assert f"{words[0]} takes pairs." in err
