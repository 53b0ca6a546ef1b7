"""What is refused before anything is written, and in which words."""

import random
from dataclasses import replace

import pytest

from spmdctx.errors import ContextError, SpmdctxError, UnsupportedError
from spmdctx.k8s import JobOptions, SecretVariable, manifests
from spmdctx.k8s.job.options import GPU, RAY, TPU, TRAINER, Pods, Servers
from spmdctx.k8s.job.topology import read_slice
from tests.k8s.schemas import core_faults, schema_faults

JOB = JobOptions("t", "i:1", ("t.py",))
SERVED = replace(JOB, servers=Servers(1, 1), pods=Pods(claim="c"))
SLICE = replace(JOB, device=TPU, topology="v5e-16", processes=4, devices=4)

WRONG = {
    "name": [
        ("", "--name"),
        ("7b", "from a letter on"),
        ("Train", "--name"),
        ("a_b", "--name"),
        ("a" * 46, "names of its pods"),
        ("é", "--name"),
    ],
    "image": [
        *(
            (text, "--image")
            for text in ("", "a b", "-x", "a;b", "Train:1", "train:", "a//b", "a/", "a:1:2", "https://r/a", "a@sha256:xyz")
        ),
        ("a:" + "t" * 129, "--image"),
    ],
    "command": [((), "needs a script"), (("",), "needs a script"), (("a\0",), "zero byte"), (("a", "\ud800"), "no text")],
    "processes": [(0, "--processes"), (4097, "--processes"), (True, "--processes"), (1.5, "--processes")],
    "devices": [(0, "--devices-per-process")],
    "device": [("gpu", "--device"), ("huawei.com/Ascend910", "--device")],
    "topology": [("v5e-16", "Only TPUs")],
    "operator": [("volcano", "--operator"), (RAY, "has servers and workers")],
    "namespace": [("A", "--namespace"), ("a.b", "--namespace")],
    "queue": [("a b", "--queue")],
    "restarts": [(-1, "--max-restarts")],
    "ttl_s": [(-1, "--ttl")],
    "deadline_s": [(0, "--deadline")],
    "containers": [(2, "dealt out evenly")],
}
WRONG_PODS = {
    "cpu": [
        *((text, "--cpu") for text in ("four", "-1", "\u0664", "4.", "1 ")),
        ("0", "more than nothing"),
        *((text, "thousandths") for text in ("0.5m", "0.0001", "16Gi", "1E")),
    ],
    "memory": [
        *((text, "--memory") for text in ("16GB", "16gi", "64K", "\u0664Gi")),
        *((text, "whole bytes") for text in ("1e3", "16", "500m", "0.5", "16E")),
        ("0Gi", "more than nothing"),
    ],
    "claim": [("A", "--claim")],
    "checkpoint_path": [
        *(
            (path, "--checkpoint-path")
            for path in ("relative", "/", "/tmp/", "//tmp", "/tmp/../tmp", "/dev/./shm", "/a:b", "/a\nb", "/a\0")
        ),
        *((path, "--checkpoint-path") for path in ("/a/..", "/etc", "/usr/", "/dev", "/proc/x", "/" + "a" * 2000)),
    ],
    "variables": [
        ((("A B", ""),), "--env"),
        ((("1A", ""),), "no digit first"),
        ((("A", "b\0"),), "zero byte"),
        ((("A", "\ud800"),), "no text"),
        ((("SPMDCTX_ADDRESS", "x:1"),), "where a process belongs"),
        ((("RAY_ADDRESS", "x"),), "where a process belongs"),
        ((("A", "1"), ("A", "2")), "twice"),
    ],
    "secrets": [((SecretVariable("A", "B", "k"),), "--secret-env"), ((SecretVariable("A", "b", "k/l"),), "--secret-env")],
    "token": [(("", "token"), "--secret-env")],
    "user": [(0, "--user")],
    "grace_s": [(0, "--grace")],
    "labels": [
        ((("a b", ""),), "--label"),
        ((("a", "b c"),), "--label"),
        ((("a" * 64, ""),), "--label"),
        ((("a.b/" + "a" * 64, ""),), "--label"),
        ((("a..b/c", ""),), "--label"),
        ((("a.-b/c", ""),), "--label"),
        (((".".join(["a" * 60] * 5) + "/c", ""),), "before /"),
        ((("a", "1"), ("a", "2")), "twice"),
        *(
            (((name, "x"),), "the manifest or the operator")
            for name in ("app.kubernetes.io/name", "batch.kubernetes.io/job-name", "job-name")
        ),
    ],
    "service_account": [("a/b", "--service-account")],
    "pull_secret": [("a/b", "--pull-secret")],
    "priority_class": [("a/b", "--priority-class")],
}


@pytest.mark.parametrize(("name", "value", "words"), [(name, *one) for name, rows in WRONG.items() for one in rows])
def test_a_wrong_option_is_named(name, value, words):
    with pytest.raises((ContextError, UnsupportedError), match=words):
        manifests(replace(JOB, **{name: value}))


@pytest.mark.parametrize(("name", "value", "words"), [(name, *one) for name, rows in WRONG_PODS.items() for one in rows])
def test_a_wrong_option_of_pods_is_named(name, value, words):
    with pytest.raises(ContextError, match=words):
        manifests(replace(JOB, pods=Pods(**{name: value})))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (replace(JOB, servers=Servers(2, 0)), "--servers N --workers N"),
        (replace(JOB, servers=Servers(0, 2)), "--servers N --workers N"),
        (replace(JOB, servers=Servers(2, 2)), "--claim"),
        (replace(SERVED, operator="jobset"), "no servers and workers"),
        (replace(SERVED, processes=2), "counts workers"),
        (replace(SERVED, device=TPU), "CPUs or GPUs"),
        (replace(SERVED, name="a" * 48), "too long for a RayJob"),
        (replace(SERVED, servers=Servers(1, 1, mode="lazy")), "--mode"),
        (replace(SERVED, servers=Servers(1, 1, max_staleness=1)), "never late"),
        (replace(SERVED, servers=Servers(1, 1, ray_version="latest")), "--ray-version"),
        (replace(SERVED, servers=Servers(1, 1, save_every=0)), "--save-every"),
        (replace(SERVED, servers=Servers(1, 1, mode="async", max_staleness=-1)), "--max-staleness"),
        (replace(SERVED, command=("t.py", "--text", "two words")), "passes shells"),
        (replace(SERVED, pods=Pods(claim="c", token=("t", "token"))), "t:auth_token"),
        (replace(JOB, servers=Servers(mode="async")), "Only a job with servers"),
        (replace(JOB, operator=TRAINER, restarts=1), "as its runtime says"),
        (replace(JOB, operator=TRAINER, ttl_s=1), "not removed"),
        (replace(JOB, operator=TRAINER, processes=2, slices=2), "one job"),
        (replace(SLICE, devices=8), "--processes 4 --devices-per-process 4"),
        (replace(SLICE, processes=2, devices=8), "No host"),
        (replace(SLICE, containers=2), "belong to one process"),
        (replace(SLICE, slices=2), "--processes 8 --devices-per-process 4"),
        (replace(JOB, device=GPU, topology="v5e-16"), "Only TPUs"),
    ],
)
def test_options_that_contradict_each_other_are_named(job, words):
    with pytest.raises((ContextError, UnsupportedError), match=words):
        manifests(job)


@pytest.mark.parametrize(
    ("text", "topology", "chips"),
    [
        ("v5e-1", "1x1", 1),
        ("v5e-256", "16x16", 256),
        ("v5p-16", "2x2x2", 8),
        ("v4-8", "2x2x1", 4),
        ("V6E-8", "2x4", 8),
        ("tpu-v5p:4x4x8", "4x4x8", 128),
        ("v5litepod-16", "4x4", 16),
        ("v4-4096", "8x16x16", 2048),
        ("v5p:8x12x16", "8x12x16", 1536),
    ],
)
def test_a_slice_is_found_by_its_name(text, topology, chips):
    assert read_slice(text)[1:3] == (topology, chips)


NO_SLICES = ["", "v5e", "v3-8", "v5e-17", "v5p-7", "v5e:2x2x2", "v5p:4x4", "v5e:0x4", "v5e-16 ", "v5e:4x4x", "h100-8"]
NO_SHAPES = ["v5e:16x1", "v5e:3x4", "v5e:32x32", "v5e:4x2", "v5p:2x2x3", "v5p:4x2x2", "v5p:8x4x4", "v5p:1x1x1", "v5e-\u0661\u0666"]


@pytest.mark.parametrize("text", [*NO_SLICES, *NO_SHAPES])
def test_a_slice_that_there_is_not_is_refused(text):
    with pytest.raises(ContextError):
        read_slice(text)


@pytest.mark.parametrize("image", ["r.io:5000/a/b_c/d--e:v1.2@sha256:" + "a" * 64, "localhost/x", "gcr.io/p-1/x:V1_2"])
def test_any_image_of_a_registry_can_be_named(image):
    assert not schema_faults(*manifests(replace(JOB, image=image)))


@pytest.mark.parametrize(
    "amounts", [("4", "16Gi"), ("1.5", "1.5Ti"), ("500m", "64000k"), ("1e1", "1e9"), ("4k", "1P"), ("1m", "100000000000")]
)
def test_amounts_are_written_as_they_are_given(amounts):
    (job,) = manifests(replace(JOB, pods=Pods(cpu=amounts[0], memory=amounts[1])))
    assert not core_faults(job)
    container = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert tuple(container["resources"]["limits"].values()) == amounts


def test_a_queue_may_have_dots():
    (job,) = manifests(replace(JOB, queue="team.small"))
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team.small"


def test_the_longest_name_is_counted_with_its_pods():
    room = 63 - len("-workers-0-3-abcde")
    manifests(replace(JOB, name="a" * room, processes=4))
    with pytest.raises(ContextError, match="at least 1 letters fewer"):
        manifests(replace(JOB, name="a" * (room + 1), processes=4))


def test_whatever_stands_in_an_option_a_manifest_fits_or_an_error_is_documented():
    chance, made = random.Random(0), 0
    texts = [
        "",
        "a",
        "A",
        "a.b",
        "a-",
        "-a",
        "0",
        "1Gi",
        "1e3",
        "/x",
        "/x/../y",
        "$(A)",
        "a\nb",
        "é",
        "a" * 70,
        "a: b",
        "{}",
        "'",
        "\0",
        "true",
        "1",
    ]
    numbers = [-1, 0, 1, 2, 3, 8, 10**9, 10**30, True, 1.0, None]
    for _ in range(1000):
        job = chance.choice([JOB, SERVED, SLICE, replace(JOB, operator=TRAINER)])
        text, number = chance.choice(texts), chance.choice(numbers)
        pods = dict.fromkeys(("cpu", "memory", "claim", "checkpoint_path", "service_account", "pull_secret", "priority_class"), text)
        pods |= {"variables": ((text, "x"),), "labels": ((text, "x"),), "token": (text, "token"), "user": number, "grace_s": number}
        pods |= {"secrets": (SecretVariable("A", text, "k"),)}
        whole = dict.fromkeys(("name", "image", "namespace", "queue", "topology", "runtime", "operator"), text) | {
            "command": ("t.py", text)
        }
        whole |= dict.fromkeys(("processes", "devices", "slices", "containers", "restarts", "ttl_s", "deadline_s"), number)
        names = chance.sample([*pods, *whole], 2)
        more = {name: whole[name] for name in names if name in whole}
        own = {name: pods[name] for name in names if name in pods}
        try:
            (manifest,) = manifests(replace(job, **more, pods=replace(job.pods, **own)))
        except SpmdctxError:
            continue
        made += 1
        assert schema_faults(manifest) == []
        assert core_faults(manifest) == []
    assert made > 50
