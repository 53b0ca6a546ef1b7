"""The library of strategies: found in a checkout, in an editable install and in a wheel, and read."""

import email
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spmdctx.errors import PlanError, PlanFormatError
from spmdctx.plan import library as shipped
from spmdctx.plan.library import read_library, strategies_folder

ROOT = Path(__file__).parents[2]
TABLE = "program: {}\nsearch_mode: dynamic_programming\ntopology: tpu-v5p\nmax_device_memory: 88GB\nrows:\n"
ASK = "from spmdctx.plan.library import strategies_folder; print(strategies_folder())"


def test_a_checkout_has_its_library_beside_the_package():
    assert strategies_folder() == ROOT / "strategies"


def test_a_wheel_has_its_library_inside_the_package(tmp_path):
    wheel = _built("wheel", tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert _asked(tmp_path / "site") == tmp_path / "site" / "spmdctx" / "strategies"
    shipped = tmp_path / "site" / "spmdctx" / "strategies"
    kept = ROOT / "strategies"
    assert {path.relative_to(shipped) for path in shipped.rglob("*.*")} == {path.relative_to(kept) for path in kept.rglob("*.*")}


def test_a_wheel_has_types_licence_and_metadata(tmp_path):
    wheel = _built("wheel", tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))))
        assert "spmdctx/py.typed" in names
        licence = archive.read(next(name for name in names if name.endswith(".dist-info/licenses/LICENSE")))
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Author"] or metadata["Author-Email"]
    assert "jax" in metadata["Keywords"].split(",")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata.get_payload().startswith("# spmdctx")


def test_an_editable_install_uses_the_library_of_the_checkout(tmp_path):
    wheel = _built("editable", tmp_path)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    lines = next(site.glob("*.pth")).read_text().splitlines()
    # Python reads such files in folders of packages only; their lines come after the folder itself.
    assert _asked(site, *lines) == ROOT / "strategies"


def _built(kind, folder):
    """A wheel of the project, standard or editable, made with hatchling alone."""
    hook = "build_wheel" if kind == "wheel" else "build_editable"
    command = f"import hatchling.build; print(hatchling.build.{hook}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


def _asked(*path):
    """The library's folder as a fresh process finds it with this search path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", ASK], cwd=path[0], env=environment, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def test_an_installation_without_the_library_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "_PLACES", (tmp_path / "one", tmp_path / "two"))
    with pytest.raises(PlanError, match="not installed"):
        strategies_folder()


def test_a_row_is_found_by_model_and_device_count():
    row = read_library().row("llama2-70b", 64)
    assert row.hand == ((16, 4), (8, 8))
    assert row.hand_file(8, 8).as_posix() == "llama2-70b/64/hand_dp8_mp8.yaml"


def test_a_pipeline_is_a_row_of_its_own_with_files_of_its_own():
    row = read_library().row("llama2-70b", 64, 8)
    assert (row.hand, row.pipeline_stages, row.micro_batch_num) == (((2, 4),), 8, 128)
    assert row.hand_file(2, 4).as_posix() == "llama2-70b/64/hand_dp2_mp4_pp8.yaml"
    assert row.searched_file.as_posix() == "llama2-70b/64/searched_pp8.json"
    with pytest.raises(PlanError, match="8 devices and 4 pipeline stages"):
        read_library().row("llama2-70b", 8, 4)


@pytest.mark.parametrize(("model", "devices", "words"), [("llama2-70b", 7, "8, 64 devices"), ("gpt-9", 8, "one of llama2-7b")])
def test_a_row_that_is_not_there_is_named(model, devices, words):
    with pytest.raises(PlanError, match=words):
        read_library().row(model, devices)


@pytest.mark.parametrize("text", ["rows: 3", "- 1", "rows: [", TABLE + "- {model: tiny}", TABLE + "- {model: tiny, hand: [[1]]}"])
def test_a_damaged_table_is_refused(text, tmp_path):
    (tmp_path / "rows.yaml").write_text(text)
    with pytest.raises(PlanFormatError, match="table of strategies"):
        read_library(tmp_path)
