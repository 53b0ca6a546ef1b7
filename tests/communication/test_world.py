"""The world of one process with eight devices."""

import jax
import pytest

from spmdctx import communication
from spmdctx.communication.groups import ranks_of
from spmdctx.errors import CommunicationError, ContextError, UnsupportedError

NEEDS_INIT = {
    "create_group": ("pair", [0, 1]),
    "destroy_group": ("pair",),
    "get_rank": (),
    "get_group_size": (),
    "get_local_rank": (),
    "get_local_rank_size": (),
    "get_world_rank_from_group_rank": ("world", 0),
    "get_group_rank_from_world_rank": (0, "world"),
    "release": (),
}


@pytest.fixture
def world(monkeypatch):
    for name in ("SPMDCTX_NUM_PROCESSES", "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    communication.init()
    yield
    if communication.is_initialized():
        communication.release()


@pytest.mark.parametrize("name", NEEDS_INIT)
def test_before_init_every_question_is_an_error_that_says_so(name):
    with pytest.raises(CommunicationError, match=rf"{name} is called before spmdctx.communication.init\(\)") as caught:
        getattr(communication, name)(*NEEDS_INIT[name])
    assert isinstance(caught.value, RuntimeError)


def test_one_process_is_a_world_of_its_devices(world):
    assert (communication.get_rank(), communication.get_group_size()) == (0, 8)
    assert (communication.get_local_rank(), communication.get_local_rank_size()) == (0, 8)


def test_a_second_init_changes_nothing(world):
    communication.create_group("pair", [2, 0])
    communication.init("gloo")
    assert communication.get_rank("pair") == 1


def test_ranks_of_groups(world):
    communication.create_group("odd", [7, 5, 3, 1])
    assert communication.get_group_size("odd") == 4
    assert communication.get_world_rank_from_group_rank("odd", 1) == 5
    assert communication.get_group_rank_from_world_rank(3, "odd") == 2
    assert communication.get_rank("odd") == 3  # rank 1 is this process's first device in it
    assert communication.get_local_rank_size("odd") == 4


@pytest.mark.parametrize("name", ["world", "nccl_world_group", "hccl_world_group"])
def test_the_world_is_a_group_by_all_its_names(world, name):
    assert communication.get_group_size(name) == 8
    with pytest.raises(CommunicationError, match="cannot be destroyed"):
        communication.destroy_group(name)


def test_release_forgets_the_groups(world):
    communication.create_group("pair", [0, 1])
    communication.release()
    assert not communication.is_initialized()
    communication.init()
    with pytest.raises(CommunicationError, match="no group 'pair'"):
        communication.get_rank("pair")


def test_a_group_is_destroyed_once(world):
    communication.create_group("pair", [0, 1])
    communication.destroy_group("pair")
    with pytest.raises(CommunicationError, match="no group 'pair'"):
        communication.destroy_group("pair")


def test_groups_may_be_several_lists(world):
    communication.create_group("pairs", [[0, 1], [2, 3]])
    assert ranks_of("pairs", 8) == ((0, 1), (2, 3))
    assert communication.get_group_rank_from_world_rank(3, "pairs") == 1
    with pytest.raises(CommunicationError, match="rank 3, but there are 2 devices"):
        ranks_of("pairs", 2)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: communication.create_group("", []), CommunicationError, "cannot be used"),
        (lambda: communication.create_group("g", [0, 0]), CommunicationError, "none twice"),
        (lambda: communication.create_group("g", [-1]), CommunicationError, "none negative"),
        (lambda: communication.create_group("g", [0, 8]), CommunicationError, "rank 8, but there are 8 devices"),
        (lambda: communication.create_group("g", [[0, 1], [2]]), CommunicationError, "lists of one length"),
        (lambda: communication.create_group("g", [[0, 1], [1, 2]]), CommunicationError, "none twice"),
        (lambda: communication.create_group("g", 3), TypeError, "must be ints"),
        (lambda: communication.create_group("g", [0, True]), TypeError, "must be ints"),
        (lambda: communication.create_group(3, [0]), TypeError, "named by a string"),
        (lambda: communication.create_group("world", [0]), CommunicationError, "a group 'world' already"),
        (lambda: communication.get_rank("nobody"), CommunicationError, "create_group"),
        (lambda: communication.get_rank(3), TypeError, "named by a string"),
        (lambda: communication.get_world_rank_from_group_rank("world", 8), CommunicationError, "no rank 8"),
        (lambda: communication.get_world_rank_from_group_rank("world", "0"), TypeError, "must be an int"),
        (lambda: communication.get_group_rank_from_world_rank(9, "world"), CommunicationError, "not in group"),
    ],
)
def test_what_makes_no_sense_is_refused(world, call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("backend", "error", "text"),
    [
        ("hccl", UnsupportedError, "communication of Ascend devices"),
        ("HCCL", UnsupportedError, "communication of Ascend devices"),
        ("mpi", ContextError, "no backend 'mpi'"),
        ("nccl", CommunicationError, "for GPUs, but the devices are CPUs"),
        (3, TypeError, "named by a string"),
    ],
)
def test_backends_that_are_not_there_are_refused(backend, error, text):
    with pytest.raises(error, match=text):
        communication.init(backend)
    assert not communication.is_initialized()


def test_a_job_has_to_be_joined_before_a_device_is_used():
    jax.devices()
    with pytest.raises(CommunicationError, match="init is called after JAX has used a device"):
        communication.init(address="127.0.0.1:1", num_processes=2, process_id=0)


def test_half_of_the_arguments_are_refused():
    with pytest.raises(ContextError, match="told num_processes, but not address and process_id"):
        communication.init(num_processes=2)
