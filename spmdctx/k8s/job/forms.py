"""The forms that Kubernetes wants of names, images, labels, paths and amounts."""

from __future__ import annotations

import posixpath
import re
from fractions import Fraction

from spmdctx.errors import ContextError

LONGEST_LABEL, LONGEST_OBJECT = 63, 253
_LONGEST_IMAGE, _LONGEST_PATH = 1024, 1024

_OBJECT_TEXT = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
OBJECT = re.compile(_OBJECT_TEXT)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_KEY = re.compile(r"[-._A-Za-z0-9]+")
_LABEL_KEY = re.compile(rf"(({_OBJECT_TEXT})/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*(:[0-9]{1,5})?"
_IMAGE = re.compile(rf"({_HOST}/)?{_PART}(/{_PART})*(:[A-Za-z0-9_][-A-Za-z0-9_.]{{0,127}})?(@[a-z0-9]+:[0-9a-f]+)?")
"""As the grammar of the distribution project (github.com/distribution/reference) has it, with digests of any length."""

_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(m|k|[MGTPE]|[KMGTPE]i|[eE][0-9]{1,2})?")
_FACTORS = {"": Fraction(1), "m": Fraction(1, 1000), "k": Fraction(1000)}
_FACTORS |= {letter: Fraction(1000**power) for power, letter in enumerate("MGTPE", 2)}
_FACTORS |= {f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", 1)}
_MOST_CPUS, _LEAST_MEMORY, _MOST_MEMORY = 1 << 16, 1 << 20, 1 << 62

_OWN_VARIABLES = ("SPMDCTX_", "JAX_COORDINATOR_", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES", "RAY_", "FQ_RAY_IP")
_OWN_LABELS = ("app.kubernetes.io/", "jobset.sigs.k8s.io/", "batch.kubernetes.io/", "ray.io/", "trainer.kubeflow.org/")
_OWN_LABEL_NAMES = ("kueue.x-k8s.io/queue-name", "job-name", "controller-uid")
_OF_THE_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/var")
_OF_THE_MANIFEST = ("/tmp", "/dev/shm")


def match(option: str, text: str, form: re.Pattern[str], need: str, longest: int = LONGEST_LABEL) -> None:
    """Checks that a text has a form.

    Raises:
        ContextError: it has not.
    """
    if not isinstance(text, str) or len(text) > longest or not form.fullmatch(text):
        raise ContextError(f"{option} cannot be used as it is.", got=ascii(text)[:80], need=f"{need}, at most {longest} characters")


def check_object(option: str, text: str, need: str) -> None:
    """Checks the name of an object of the cluster.

    Raises:
        ContextError: there can be no such object.
    """
    match(option, text, OBJECT, need, LONGEST_OBJECT)


def check_image(image: str) -> None:
    """Checks the name of an image.

    Raises:
        ContextError: no registry has such an image.
    """
    match("--image", image, _IMAGE, "an image such as registry.example/train:1, in small letters up to its tag", _LONGEST_IMAGE)


def check_text(option: str, text: str) -> None:
    """Checks that a process can be given a text.

    Raises:
        ContextError: it holds a zero byte, or half a character.
    """
    if "\0" in text:
        raise ContextError(f"{option} holds a zero byte.", got=ascii(text[:80]))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ContextError(f"{option} holds bytes that are no text.", got=ascii(text[:80]), need="UTF-8") from None


def check_variable(name: str) -> None:
    """Checks the name of a variable.

    Raises:
        ContextError: it is none, or the manifest sets it.
    """
    match("--env", name, VARIABLE, "letters, digits and underscores, no digit first", LONGEST_OBJECT)
    if name.startswith(_OWN_VARIABLES):
        raise ContextError("--env sets a variable that says where a process belongs.", got=name, fix="leave it to the manifest")


def check_label(name: str, value: str) -> None:
    """Checks a label.

    Raises:
        ContextError: Kubernetes does not take it, or the manifest or the operator sets it.
    """
    check_label_form("--label", name, value)
    if is_own_label(name):
        raise ContextError("--label sets a label that the manifest or the operator sets.", got=name)


def check_label_form(option: str, name: str, value: str) -> None:
    """Checks the forms of a label's name and value.

    Raises:
        ContextError: Kubernetes does not take it.
    """
    need = "a label such as team or example.com/team, with at most 63 characters after the slash"
    match(option, name, _LABEL_KEY, need, LONGEST_OBJECT + 1 + LONGEST_LABEL)
    match(option, value, _LABEL_VALUE, "a value of letters, digits, '-', '_' and '.', with a letter or digit at both ends")
    if len(name.rpartition("/")[0]) > LONGEST_OBJECT:
        raise ContextError(f"{option} cannot be used as it is.", got=ascii(name)[:80], need=f"at most {LONGEST_OBJECT} characters before /")


def is_own_label(name: str) -> bool:
    """Returns whether the manifest or the operator sets a label."""
    return name.startswith(_OWN_LABELS) or name in _OWN_LABEL_NAMES


def check_folder(path: str) -> None:
    """Checks where checkpoints are mounted.

    Raises:
        ContextError: it is no absolute path, or hides a folder that the pods need.
    """
    whole = posixpath.normpath(f"/{path.lstrip('/')}")
    is_own = whole == "/" or whole in _OF_THE_SYSTEM or whole in _OF_THE_MANIFEST
    is_own = is_own or any(whole.startswith(f"{folder}/") for folder in ("/dev", "/proc", "/sys"))
    plain = path.startswith("/") and ":" not in path and path.isprintable() and ".." not in path.split("/")
    if is_own or not plain or len(path) > _LONGEST_PATH:
        raise ContextError("--checkpoint-path must be a folder of its own.", got=ascii(path[:80]), need="such as /checkpoints")


def check_cpu(text: str, option: str = "--cpu") -> None:
    """Checks a number of CPUs.

    Raises:
        ContextError: it is no number of thousandths, or more than any machine has.
    """
    amount = _amount(option, text, "a number of CPUs such as 4, 1.5 or 500m")
    if (amount * 1000).denominator != 1 or amount > _MOST_CPUS:
        raise ContextError(f"{option} is no number of CPUs.", got=text, need=f"thousandths, from 1m to {_MOST_CPUS}")


def check_memory(text: str, option: str = "--memory") -> None:
    """Checks an amount of memory.

    Raises:
        ContextError: it is no number of bytes that a container could run in.
    """
    amount = _amount(option, text, "an amount such as 16Gi, 500M or 1.5Ti")
    if amount.denominator != 1 or not _LEAST_MEMORY <= amount <= _MOST_MEMORY:
        raise ContextError(
            f"{option} is no amount of memory.", got=text, need="whole bytes, from 1Mi to 4Ei; without a unit it counts bytes"
        )


def _amount(option: str, text: str, need: str) -> Fraction:
    match(option, text, _AMOUNT, need)
    found = _AMOUNT.fullmatch(text)
    assert found is not None, text
    unit = found[2] or ""
    amount = Fraction(found[1]) * (Fraction(10 ** int(unit[1:])) if unit[:1] in "eE" and unit[1:].isdecimal() else _FACTORS[unit])
    if not amount:
        raise ContextError(f"{option} must be more than nothing.", got=text)
    return amount
