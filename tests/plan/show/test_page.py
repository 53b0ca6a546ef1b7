"""The plan as a page: well formed, self-contained, folded."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from spmdctx.ir.mesh import LogicalMesh
from tests.plan import small_plan

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Collects the text and complains about tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"collectives": (), "reshards": (), "notes": ()},
        {"inputs": ()},
        {"lower_bound_s": 1e-4, "gap": 3.0, "memory_limit_bytes": 2**20},
        {"logical_mesh": LogicalMesh.of({"data": 512})},
        {"logical_mesh": LogicalMesh.of({"data": 8, "model": 1})},
    ],
)
def test_the_page_is_well_formed(changes):
    read(small_plan(**changes)._repr_html_())


def test_the_page_needs_nothing_from_elsewhere():
    page = small_plan()._repr_html_()
    assert not re.search(r"https?:|src=|@import|url\(|<script", page)
    assert "light-dark(" in page


def test_equal_layers_are_folded_and_their_paths_are_inside():
    page = small_plan()._repr_html_()
    assert re.search(r'<details class="fold"><summary class="row"><span><code>state/layers/\*/w</code>', page)
    assert "<li><code>state/layers/1/w</code></li>" in page


def test_every_part_is_there():
    text = "".join(read(small_plan()._repr_html_()).words)
    for words in ("400 µs", "5.00 MiB", "Mesh", "Inputs", "Computation", "Communication", "partial result of dot_general", "Notes"):
        assert words in text


def test_text_of_the_user_is_escaped():
    page = small_plan(notes=("<script>alert(1)</script> & co",))._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in page


def test_a_saved_page_is_a_whole_document(tmp_path):
    small_plan().save_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert read(text).seen[:2] == ["html", "head"]


def test_a_large_mesh_is_not_drawn_device_by_device():
    assert "<h2>Mesh" in small_plan()._repr_html_()
    assert "<h2>Mesh" not in small_plan(logical_mesh=LogicalMesh.of({"data": 4096}))._repr_html_()


def test_time_and_memory_are_drawn_where_they_are_known():
    page = small_plan(memory_profile=(10, 40, 20, 80, 30, 30))._repr_html_()
    read(page)
    assert "Where the time goes" in page
    assert "Memory over the step" in page
    assert "Memory over the step" not in small_plan()._repr_html_()


def test_every_tensor_can_be_opened_and_tells_its_story():
    page = small_plan()._repr_html_()
    assert page.count('<details class="fold"><summary class="row">') == 2
    assert "<li><b>because</b> sharding_propagation found it</li>" in page
    assert "<li><b>moves</b> [data, -] to whole for dot_general (model.py:12 (loss))</li>" in page


def test_one_device_and_one_tensor_are_not_several():
    plan = small_plan(logical_mesh=LogicalMesh.of({"data": 1}))
    shown = "".join(read(dataclasses.replace(plan, inputs=plan.inputs[:1])._repr_html_()).words)
    assert "1 device" in shown
    assert "1 tensor" in shown
    assert "1 devices" not in shown
    assert "1 tensors" not in shown
