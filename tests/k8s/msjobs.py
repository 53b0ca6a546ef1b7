"""MSJobs as their users write them, and what becomes of each."""

from pathlib import Path

import yaml

from spmdctx.k8s.mindspore.convert import Changes, convert

FOLDER = Path(__file__).parent / "files"

CONVERTED = {
    "data_parallel": ("JobSet", Changes(image="train:1")),
    "single_worker": ("JobSet", Changes()),
    "parameter_server": ("RayJob", Changes(image="train:1")),
    "parameter_server_one_worker": ("RayJob", Changes(claim="state")),
    "ascend": ("JobSet", Changes(device="nvidia.com/gpu")),
    "queue": ("JobSet", Changes(queue="day")),
    "dynamic": ("JobSet", Changes(namespace="other")),
    "beside": ("JobSet", Changes(claim="state", checkpoint_path="/data")),
}
"""The kind of each job that can be converted, and what the user changes for it."""

REFUSED = {
    "parameter_server_shell": "cannot be given to servers and workers",
    "two_devices": "several kinds of devices",
    "wrong_role": "no such role",
    "no_main": "one container with the name mindspore",
}
"""What the error says of jobs that cannot be, whatever the user changes; some of the others can only be with a change."""


def read(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def converted(name):
    return convert(read(name), CONVERTED[name][1])


def converted_manifests():
    return [(name, one) for name in CONVERTED for one in converted(name).objects]
