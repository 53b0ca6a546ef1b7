"""The zoo's models at published sizes: every primitive has a rule, and a search finds what an expert would write."""

from __future__ import annotations

import numpy as np
import pytest

import spmdctx
from spmdctx.plan.plan import Plan
from tests.zoo import LARGE, UNSPLIT


def plan(name: str, search: str, **more: object) -> Plan:
    step, args = LARGE[name](UNSPLIT, np.float32)
    options = {"parallel_mode": "auto_parallel", "search_mode": search, "device_num": 8, **more}
    return spmdctx.parallel(step, strict=True, topology="tpu-v5p", **options).plan(*args)


@pytest.mark.parametrize("name", LARGE)
def test_every_primitive_of_a_model_at_its_published_size_has_a_rule(name: str) -> None:
    found = plan(name, "sharding_propagation")
    assert not [note for note in found.notes if "computed whole" in note]
    assert found.cost.total_s > 0


@pytest.mark.parametrize("search", ["recursive_programming", "dynamic_programming"])
def test_a_search_finds_expert_parallelism(search: str) -> None:
    found = plan("gshard", search)
    experts = [tensor for tensor in found.inputs if tensor.path.endswith(("/up", "/down")) and "params" in tensor.path]
    assert len(experts) == 4
    assert all(tensor.sharding[0] and not any(tensor.sharding[1:]) for tensor in experts), [tensor.sharding for tensor in experts]
    assert "all_to_all" in {row.kind for row in found.collectives}


def test_a_plan_holds_no_all_to_all_where_the_user_forbids_it() -> None:
    free, forbidden = plan("gshard", "dynamic_programming"), plan("gshard", "dynamic_programming", enable_alltoall=False)
    assert "all_to_all" not in {row.kind for row in forbidden.collectives}
    assert forbidden.cost.total_s > free.cost.total_s
    assert dict(forbidden.options)["enable_alltoall"] is False
