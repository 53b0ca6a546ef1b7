"""The key of a job: where it is from, who shares it, and that it is shown to nobody."""

import os
import stat
import threading

import pytest

from spmdctx.communication.clusters import Cluster, detect
from spmdctx.communication.launch.environment import new_token, process_environment
from spmdctx.communication.meeting.key import is_loopback, job_key, key_file
from spmdctx.communication.meeting.place import listen
from spmdctx.communication.rendezvous import gather, join
from spmdctx.errors import CommunicationError, ContextError
from tests.communication.test_clusters import OPEN_MPI, SLURM

MPI_KEY = {"OMPI_MCA_orte_precondition_transports": "0123456789abcdef-fedcba9876543210"}
HERE = Cluster("the SPMDCTX_ variables", "127.0.0.1:4000", 2, 0)
FAR = Cluster("the SPMDCTX_ variables", "head.cluster:4000", 2, 0)


@pytest.fixture
def home(tmp_path):
    """An environment whose keys are kept in a new folder."""
    return {"XDG_STATE_HOME": str(tmp_path)}


def by_hand(port, number):
    return {"SPMDCTX_ADDRESS": f"127.0.0.1:{port}", "SPMDCTX_NUM_PROCESSES": "2", "SPMDCTX_PROCESS_ID": str(number)}


def launched(port, number, token):
    return process_environment({}, port, 2, number, 1, token)


def under_mpirun(port, number):
    own = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(number)}
    return {**OPEN_MPI, **own, **MPI_KEY, "OMPI_COMM_WORLD_RANK": str(number), "SPMDCTX_ADDRESS": f"127.0.0.1:{port}"}


def under_srun(port, number, step="0"):
    own = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_ID": step}
    return {**SLURM, **own, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number), "SPMDCTX_ADDRESS": f"127.0.0.1:{port}"}


def without(environ, name):
    return {key: text for key, text in environ.items() if key != name}


TOKEN = new_token()
JOBS = {
    "launch": (
        lambda port, number: launched(port, number, TOKEN),
        [
            lambda port: launched(port, 1, new_token()),
            lambda port: without(launched(port, 1, TOKEN), "SPMDCTX_TOKEN"),
            lambda port: under_srun(port, 1),
        ],
    ),
    "mpirun": (
        under_mpirun,
        [
            lambda port: without(under_mpirun(port, 1), *MPI_KEY),
            lambda port: {**under_mpirun(port, 1), **dict.fromkeys(MPI_KEY, "0" * 16 + "-" + "0" * 16)},
            lambda port: by_hand(port, 1),
        ],
    ),
    "srun": (
        under_srun,
        [
            lambda port: by_hand(port, 1),
            lambda port: under_srun(port, 1, step="1"),
            lambda port: {**under_srun(port, 1), "XDG_STATE_HOME": "/nonexistent"},
        ],
    ),
    "srun with a token": (
        lambda port, number: {**under_srun(port, number), "SPMDCTX_TOKEN": TOKEN},
        [lambda port: under_srun(port, 1), lambda port: {**under_srun(port, 1), "SPMDCTX_TOKEN": TOKEN[:-1]}],
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_stranger_without_the_token_joins_no_job(job, home):
    """Another user's stranger has another home, or cannot read this one."""
    environ_of, strangers = JOBS[job]
    with listen(0, "127.0.0.1") as server:
        port = server.getsockname()[1]
        links = []

        def first():
            environ = {**home, **environ_of(port, 0)}
            links.append(gather(detect(environ), job_key(environ, detect(environ)), [server], 20))

        gathering = threading.Thread(target=first)
        gathering.start()
        for stranger in strangers:
            environ = {**home, **stranger(port)}
            with pytest.raises(CommunicationError, match="as if it had another key"):
                join(detect(environ), job_key(environ, detect(environ)), 0.3)
        environ = {**home, **environ_of(port, 1)}
        links.append(join(detect(environ), job_key(environ, detect(environ)), 10).link)
        gathering.join(30)
    assert len(links) == 2
    for link in links:
        link.close()


@pytest.mark.parametrize("environ", [under_mpirun(4000, 1), launched(4000, 1, TOKEN), {**under_srun(4000, 1), "SPMDCTX_TOKEN": TOKEN}])
def test_a_jobs_token_is_secret_and_in_no_text(environ):
    key = job_key(environ, detect(environ))
    assert key.is_secret
    for text in (repr(key), str(key), repr(detect(environ))):
        assert TOKEN not in text
        assert repr(key.secret) not in text


def test_each_job_of_the_launcher_has_a_token_of_its_own():
    assert new_token() != new_token()
    assert len(new_token()) == 64
    assert launched(4000, 0, TOKEN)["SPMDCTX_TOKEN"] == TOKEN


def test_a_short_token_is_refused_without_showing_it():
    with pytest.raises(ContextError, match="at least 16") as caught:
        job_key({"SPMDCTX_TOKEN": "hunter2hunter2"}, HERE)
    assert "hunter" not in str(caught.value)


def test_on_one_machine_the_key_is_a_file_that_only_the_user_can_read(home):
    first, second = (job_key(home, HERE) for _ in range(2))
    assert first == second
    assert first.is_secret
    about = key_file(home).stat()
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert stat.S_IMODE(key_file(home).parent.stat().st_mode) == 0o700
    assert [path.name for path in key_file(home).parent.iterdir()] == ["key"]


def test_processes_that_make_the_file_at_once_get_one_key(home):
    found = []
    threads = [threading.Thread(target=lambda: found.append(job_key(home, HERE).secret)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


def _open_to_all(path):
    path.write_bytes(b"0" * 64)
    path.chmod(0o644)


def _short(path):
    path.touch(0o600)


def _linked(path):
    target = path.with_name("target")
    target.write_bytes(b"0" * 64)
    target.chmod(0o600)
    path.symlink_to(target)


def _pipe(path):
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize("made", [_open_to_all, _short, _linked, _pipe])
def test_a_file_that_others_could_have_made_or_read_is_no_key(home, made):
    key_file(home).parent.mkdir()
    made(key_file(home))
    assert not job_key(home, HERE).is_secret


@pytest.mark.parametrize("environ", [{}, {"XDG_STATE_HOME": "/proc/nowhere"}])
def test_where_nothing_is_secret_the_key_says_so(environ):
    assert not job_key(environ, FAR).is_secret
    assert job_key(environ, FAR) == job_key(environ, FAR)
    assert not job_key({"XDG_STATE_HOME": "/proc/nowhere"}, HERE).is_secret


@pytest.mark.parametrize(
    ("host", "expected"), [("127.8.8.8", True), ("[::1]", True), ("LocalHost", True), ("10.0.0.1", False), ("vm", False)]
)
def test_loopback_is_what_is_written_as_such(host, expected):
    assert is_loopback(host) is expected


def test_a_step_of_slurm_on_one_machine_stays_on_it():
    assert detect(without(under_srun(4000, 1), "SPMDCTX_ADDRESS")).address.startswith("127.0.0.1:")
