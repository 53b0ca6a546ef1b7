"""What `communication.init` finds in the pods of every manifest: address, count, number and devices."""

import pytest

from benchmarks.k8s_options import covering_jobs
from spmdctx.communication import clusters
from spmdctx.communication.clusters import detect
from spmdctx.communication.meeting.key import TOKEN
from spmdctx.communication.sigterm import GRACE
from spmdctx.errors import SAVED
from spmdctx.k8s import JobOptions, manifests
from spmdctx.k8s.job import environment
from spmdctx.k8s.job.check import checked
from spmdctx.k8s.job.options import CPU, JOBSET, TRAINER, Pods, Servers
from spmdctx.k8s.operators import jobset
from spmdctx.server.engine.client import JOB, NUM_WORKERS, WORKER
from spmdctx.server.engine.job import worker_environment
from tests.k8s.replay import containers_of, ray_resources

JOBS = [(name, checked(job)) for name, job in covering_jobs()]
COLLECTIVE = [pytest.param(job, id=name) for name, job in JOBS if not job.has_servers]
SERVED = [pytest.param(job, id=name) for name, job in JOBS if job.has_servers]


@pytest.mark.parametrize("job", COLLECTIVE)
def test_every_process_finds_its_place(job):
    (manifest,) = manifests(job)
    containers = containers_of(manifest)
    places = [detect(one.environ) for one in containers]
    assert sorted(place.process_id for place in places) == list(range(job.processes))
    assert {place.num_processes for place in places} == {job.processes}
    first = next(one for one, place in zip(containers, places, strict=True) if place.process_id == 0)
    assert {place.address.rpartition(":")[0] for place in places} == {first.host}
    assert {place.local_device_ids for place in places} == {None}
    for one in containers:
        if job.device == CPU:
            assert one.environ["JAX_NUM_CPU_DEVICES"] == str(job.devices)
        else:
            assert one.limits[job.device] == str(job.devices)
            assert "JAX_NUM_CPU_DEVICES" not in one.environ


@pytest.mark.parametrize("job", COLLECTIVE)
def test_processes_of_a_slice_are_neighbors(job):
    containers = containers_of(manifests(job)[0])
    numbers = [detect(one.environ).process_id for one in containers]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("job", COLLECTIVE)
def test_variables_and_secrets_come_as_they_were_given(job):
    for one in containers_of(manifests(job)[0]):
        assert {name: one.environ[name] for name, _ in job.pods.variables} == dict(job.pods.variables)
        assert (TOKEN in one.environ) == (job.pods.token is not None)
        assert 0 < float(one.environ[GRACE]) <= job.pods.grace_s


@pytest.mark.parametrize("job", SERVED)
def test_a_pod_of_ray_is_a_world_of_its_own(job):
    (manifest,) = manifests(job)
    containers = containers_of(manifest)
    assert [detect(one.environ) for one in containers] == [None] * len(containers)
    roles = [one.role for one in containers]
    assert {role: roles.count(role) for role in roles} == {"head": 1, "ps": job.servers.servers, "worker": job.servers.workers}
    groups = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [ray_resources(group) for group in groups] == [{"ps": 1}, {"worker": 1}]


@pytest.mark.parametrize("job", SERVED)
def test_the_head_starts_the_job_that_was_asked_for(job):
    from spmdctx.cli.parser.commands import command_parser

    (manifest,) = manifests(job)
    program, *words = manifest["spec"]["entrypoint"].split()
    assert program == "spmdctx"
    told = command_parser().parse_args(words)
    assert (told.servers, told.workers, told.devices_per_process) == (job.servers.servers, job.servers.workers, job.devices)
    assert told.folder.startswith(job.pods.checkpoint_path)
    assert (["-m"] if told.module else []) + [told.script, *told.arguments] == list(job.command)
    head = containers_of(manifest)[0].environ
    for number in range(job.servers.workers):
        environ = {**head, **worker_environment(head, number, job.servers.workers, job.devices), JOB: "{}"}
        assert detect(environ) is None
        assert (environ[WORKER], environ[NUM_WORKERS], environ["JAX_NUM_CPU_DEVICES"]) == (
            str(number),
            str(job.servers.workers),
            str(job.devices),
        )


def test_a_restarted_job_finds_the_same_places():
    (manifest,) = manifests(JobOptions("t", "i:1", ("t.py",), processes=4, slices=2))
    assert [detect(one.environ) for one in containers_of(manifest)] == [detect(one.environ) for one in containers_of(manifest)]


def test_a_container_beside_the_process_is_no_process():
    (manifest,) = manifests(JobOptions("t", "i:1", ("t.py",), processes=2))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"].append({"name": "watcher", "image": "w:1"})
    found = [detect(one.environ) for one in containers_of(manifest)]
    assert [place and place.process_id for place in found] == [0, None, 1, None]


def test_what_trainer_says_of_its_count_is_believed():
    """A TrainJob whose number of nodes the cluster has changed: nothing in the manifest contradicts it."""
    (manifest,) = manifests(JobOptions("t", "i:1", ("t.py",), processes=4, operator=TRAINER))
    manifest["spec"]["trainer"]["numNodes"] = 3
    assert [detect(one.environ)[2:4] for one in containers_of(manifest)] == [(3, 0), (3, 1), (3, 2)]


def test_a_wrong_role_leads_to_no_pod():
    (manifest,) = manifests(JobOptions("t", "i:1", ("t.py",), processes=2))
    manifest["spec"]["replicatedJobs"][0]["name"] = "servers"
    containers = containers_of(manifest)
    assert detect(containers[0].environ).address.rpartition(":")[0] not in {one.host for one in containers}


def test_names_are_those_that_are_read():
    """Manifests are written where JAX is not imported, so that the names stand in two places."""
    names = ("ADDRESS", "NUM_PROCESSES", "PROCESS_ID", "JOB_INDEX", "PODS_PER_JOB", "POD_INDEX", "CONTAINERS_PER_POD", "CONTAINER_INDEX")
    assert [getattr(environment, name) for name in names] == [getattr(clusters, name) for name in names]
    assert (environment.TOKEN, environment.GRACE, environment.PORT) == (TOKEN, GRACE, clusters.KUBERNETES_PORT)
    assert jobset.SAVED == SAVED


def test_the_pods_of_one_job_of_each_kind():
    options = JobOptions("demo", "i:1", ("t.py",), processes=2, devices=2, operator=JOBSET, pods=Pods(token=("train", "token")))
    assert [detect(one.environ)[1:4] for one in containers_of(manifests(options)[0])] == [
        ("demo-workers-0-0.demo:55527", 2, 0),
        ("demo-workers-0-0.demo:55527", 2, 1),
    ]
    served = JobOptions("ps", "i:1", ("t.py",), servers=Servers(2, 3), pods=Pods(claim="c"))
    assert [one.role for one in containers_of(manifests(served)[0])] == ["head", "ps", "ps", "worker", "worker", "worker"]
