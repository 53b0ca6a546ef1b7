import gzip
import json

import numpy as np
import pytest

from benchmarks import iopddl

INSTANCE = {
    "name": "tiny",
    "nodes": {
        "costs": [[10, 0], [0, 5, 1000000000000000000], [0, 0]],
        "usages": [[1, 8], [1, 4, 1], [2, 1]],
        "intervals": [[0, 4], [1, 3], [3, 3]],
    },
    "edges": {"nodes": [[0, 1], [1, 2]], "costs": [[0, 3, 0, 7, 0, 0], [0, 1, 1000000000000000000, 0, 0, 0]]},
    "usage_limit": 9,
}


@pytest.fixture(params=["tiny.json", "tiny.json.gz"])
def instance(request, tmp_path):
    def write(limit):
        text = json.dumps({"problem": {**INSTANCE, "usage_limit": limit}}).encode()
        path = tmp_path / request.param
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    return write


@pytest.mark.parametrize(("limit", "cost"), [(9, 7), (8, 10), (12, 5)])
def test_an_instance_is_solved(instance, capsys, limit, cost):
    assert iopddl.main([str(instance(limit)), "--seconds", "5", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["name"], row["nodes"], row["edges"]) == (instance(limit).name, 3, 2)
    assert row["cost"] == row["lower_bound"] == cost
    assert row["usage"] <= row["limit"] == limit


def test_an_instance_that_nothing_fits_says_so(instance, capsys):
    assert iopddl.main([str(instance(1)), "--seconds", "5"]) == 1
    assert "found nothing that fits" in capsys.readouterr().out


def test_large_integers_are_infinite(instance):
    problem = iopddl.read(instance(9))
    assert np.isinf(problem.costs[1][2])
    assert np.isinf(problem.edges[1].table[1, 0])


def test_the_check_refuses_a_choice_over_the_limit(instance):
    with pytest.raises(AssertionError, match="over the limit"):
        iopddl.check(iopddl.read(instance(8)), (1, 0, 0))
