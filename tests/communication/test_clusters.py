"""Who a process is, read from the environment of each launcher."""

import pytest

from spmdctx.communication.clusters import Cluster, detect, first_host
from spmdctx.errors import ContextError

BY_HAND = {"SPMDCTX_ADDRESS": "127.0.0.1:4000", "SPMDCTX_NUM_PROCESSES": "4", "SPMDCTX_PROCESS_ID": "3"}
LAUNCHED = {**BY_HAND, "SPMDCTX_LAUNCHER": "17"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "423231489",
    "OMPI_MCA_orte_hnp_uri": "423231488.0;tcp://10.1.2.3,192.168.0.2:38599;tcp6://[fd00::2]:56405",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[007-009,12],other",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
JOB_SET = {
    "JOBSET_NAME": "train",
    "REPLICATED_JOB_NAME": "workers",
    "JOB_COMPLETION_INDEX": "1",
    "NUM_PROCESSES": "4",
}
KUBEFLOW = {"COORDINATOR_ADDRESS": "job-worker-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "3", "PROCESS_ID": "2"}
POD = {"SPMDCTX_ADDRESS": "t-workers-0-0.t:55527", "SPMDCTX_NUM_PROCESSES": "16", "SPMDCTX_POD_INDEX": "1"}
SLICES = {**POD, "SPMDCTX_JOB_INDEX": "2", "SPMDCTX_PODS_PER_JOB": "4"}
CONTAINERS = {**POD, "SPMDCTX_CONTAINERS_PER_POD": "8", "SPMDCTX_CONTAINER_INDEX": "3"}
TRAINER = {"JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        (LAUNCHED, Cluster("spmdctx launch", "127.0.0.1:4000", 4, 3)),
        (BY_HAND, Cluster("the SPMDCTX_ variables", "127.0.0.1:4000", 4, 3)),
        (
            {**LAUNCHED, "SPMDCTX_LOCAL_DEVICE_IDS": "6,7"},
            Cluster("spmdctx launch", "127.0.0.1:4000", 4, 3, (6, 7)),
        ),
        (TRAINER, Cluster("the JAX_ variables", "job-node-0-0.job:1234", 2, 1)),
        (
            {**TRAINER, "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job", "JAX_COORDINATOR_PORT": "6666"},
            Cluster("the JAX_ variables", "job-node-0-0.job:6666", 2, 1),
        ),
        (POD, Cluster("the SPMDCTX_ variables", "t-workers-0-0.t:55527", 16, 1)),
        (SLICES, Cluster("the SPMDCTX_ variables", "t-workers-0-0.t:55527", 16, 9)),
        (CONTAINERS, Cluster("the SPMDCTX_ variables", "t-workers-0-0.t:55527", 16, 11)),
        (KUBEFLOW, Cluster("Kubeflow", "job-worker-0:6666", 3, 2)),
        (JOB_SET, Cluster("JobSet", "train-workers-0-0.train:55527", 4, 1)),
        ({**JOB_SET, "JOB_INDEX": "1", "PODS_PER_JOB": "2"}, Cluster("JobSet", "train-workers-0-0.train:55527", 4, 3)),
        ({**SLURM, **LAUNCHED}, Cluster("spmdctx launch", "127.0.0.1:4000", 4, 3)),
    ],
    ids=[
        "nothing",
        "batch script of Slurm",
        "launch",
        "by hand",
        "launch on GPUs",
        "Trainer",
        "Trainer with a port of its own",
        "pod",
        "pod of the third job",
        "container of a pod",
        "JAXJob",
        "JobSet",
        "JobSet of two jobs",
        "launch first",
    ],
)
def test_a_job_is_read_from_the_environment(environ, expected):
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({**SLICES, "SPMDCTX_POD_INDEX": "4"}, "pod 4 of 4"),
        ({**CONTAINERS, "SPMDCTX_CONTAINER_INDEX": "8"}, "container 8 of 8"),
        ({**POD, "SPMDCTX_JOB_INDEX": "1"}, "SPMDCTX_PODS_PER_JOB is not set"),
        ({**POD, "SPMDCTX_POD_INDEX": "16"}, "process 16 of 16"),
        ({**POD, "SPMDCTX_POD_INDEX": ""}, "must be a number"),
    ],
)
def test_indices_of_a_container_have_to_fit_to_the_job(wrong, words):
    with pytest.raises(ContextError, match=words):
        detect(wrong)


def test_open_mpi_gives_the_address_of_its_launcher_and_one_gpu_per_process():
    found = detect(OPEN_MPI)
    host, _, port = found.address.rpartition(":")
    assert (host, found.num_processes, found.process_id, found.local_device_ids) == ("10.1.2.3", 8, 5, (1,))
    assert int(port) > 61000
    assert detect({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).address == found.address
    assert detect({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "5"}).address != found.address


@pytest.mark.parametrize(
    ("uri", "host"),
    [("1.0;tcp6://[fd00::2]:56405", "[fd00::2]"), ("1.0;tcp://10.0.0.9:4000", "10.0.0.9")],
)
def test_open_mpi_names_its_launcher_in_several_ways(uri, host):
    assert detect({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": uri}).address.rpartition(":")[0] == host


def test_open_mpi_on_one_machine_needs_no_address():
    environ = {name: text for name, text in OPEN_MPI.items() if name != "OMPI_MCA_orte_hnp_uri"} | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    assert detect(environ).address.startswith("127.0.0.1:")


def test_an_open_mpi_that_does_not_say_where_takes_the_address_from_the_user():
    environ = {name: text for name, text in OPEN_MPI.items() if name != "OMPI_MCA_orte_hnp_uri"}
    with pytest.raises(ContextError, match="where process 0 runs"):
        detect(environ)
    assert detect({**environ, "SPMDCTX_ADDRESS": "head:7000"}) == Cluster("Open MPI", "head:7000", 8, 5, (1,))


def test_slurm_gives_the_first_machine_of_the_step():
    found = detect(SLURM)
    assert found.address.startswith("node007:")
    assert (found.num_processes, found.process_id, found.local_device_ids) == (16, 9, (1,))
    assert detect({**SLURM, "SLURM_STEP_ID": "1"}).address != found.address


@pytest.mark.parametrize("name", ["\ud800", "ä"])
def test_a_job_may_have_any_text_for_its_name(name):
    assert detect({**SLURM, "SLURM_JOB_ID": name}).address.startswith("node007:")
    assert detect({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": name}).num_processes == 8


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "16"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (1,)),
    ],
    ids=["one process per machine has all GPUs", "several share them", "Slurm has dealt them out", "all are visible"],
)
def test_gpus_are_dealt_out_where_processes_share_a_machine(more, expected):
    assert detect({**SLURM, **more}).local_device_ids == expected


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("rack[3-4]-eth0,b", "rack3-eth0"),
    ],
)
def test_the_first_host_of_slurms_list(hosts, expected):
    assert first_host(hosts) == expected


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"SPMDCTX_NUM_PROCESSES": "2", "SPMDCTX_PROCESS_ID": "0"}, "SPMDCTX_ADDRESS is not"),
        ({"SPMDCTX_ADDRESS": "head:7000"}, "nothing says how many processes"),
        ({"SPMDCTX_ADDRESS": "head:7000", "SPMDCTX_PROCESS_ID": "1"}, "SPMDCTX_NUM_PROCESSES is not"),
        ({"JAX_PROCESS_ID": "1"}, "JAX_NUM_PROCESSES is not"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID is not"),
        ({**LAUNCHED, "SPMDCTX_PROCESS_ID": "4"}, "process 4 of 4"),
        ({**LAUNCHED, "SPMDCTX_NUM_PROCESSES": "many"}, "SPMDCTX_NUM_PROCESSES must be a number"),
        ({**LAUNCHED, "SPMDCTX_ADDRESS": "here"}, "no address of process 0"),
        ({**LAUNCHED, "SPMDCTX_ADDRESS": "head:99999"}, "no address of process 0"),
        ({**LAUNCHED, "SPMDCTX_ADDRESS": "head:0"}, "no address of process 0"),
        ({**LAUNCHED, "SPMDCTX_ADDRESS": "two heads:7000"}, "no address of process 0"),
        ({**LAUNCHED, "SPMDCTX_ADDRESS": "he\udcffd:7000"}, "no address of process 0"),
        ({**LAUNCHED, "SPMDCTX_ADDRESS": "head,tail:7000"}, "no address of process 0"),
        ({**JOB_SET, "REPLICATED_JOB_NAME": "a/b"}, "no address of process 0"),
        ({**SLURM, "SLURM_STEP_NODELIST": "h h"}, "no address of process 0"),
        ({**LAUNCHED, "SPMDCTX_NUM_PROCESSES": "9" * 5000}, "SPMDCTX_NUM_PROCESSES must be a number"),
        ({**LAUNCHED, "SPMDCTX_NUM_PROCESSES": "\u0664"}, "SPMDCTX_NUM_PROCESSES must be a number"),
        ({**LAUNCHED, "SPMDCTX_ADDRESS": "head:\u0667000"}, "no address of process 0"),
        ({**LAUNCHED, "SPMDCTX_NUM_PROCESSES": "1" + "0" * 50}, "SPMDCTX_NUM_PROCESSES must be a number"),
        ({**LAUNCHED, "SPMDCTX_LOCAL_DEVICE_IDS": "0,x"}, "SPMDCTX_LOCAL_DEVICE_IDS must be a number"),
        ({**JOB_SET, "JOB_INDEX": "4x"}, "JOB_INDEX must be a number"),
        ({**JOB_SET, "PODS_PER_JOB": ""}, "PODS_PER_JOB must be a number"),
        ({"JOBSET_NAME": "train", "JOB_COMPLETION_INDEX": "0"}, "REPLICATED_JOB_NAME and NUM_PROCESSES is not"),
        ({name: text for name, text in SLURM.items() if name != "SLURM_PROCID"}, "SLURM_PROCID is not set"),
    ],
)
def test_half_a_description_is_refused(environ, text):
    with pytest.raises(ContextError, match=text):
        detect(environ)
