"""Arrays go to servers by size, alike on every process."""

import numpy as np
import pytest

from spmdctx.server.program.balance import balanced


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_no_server_has_more_than_its_share_and_one_array(num_servers, seed):
    sizes = {f"a{number}": int(size) for number, size in enumerate(np.random.default_rng(seed).integers(1, 1000, 40))}
    found = balanced(sizes, num_servers)
    loads = [sum(sizes[name] for name in sizes if found[name] == server) for server in range(num_servers)]
    assert set(found) == set(sizes)
    assert max(loads) - min(loads) <= max(sizes.values())


def test_the_order_of_names_changes_nothing():
    sizes = {"b": 3, "a": 3, "c": 5}
    assert balanced(sizes, 2) == balanced(dict(sorted(sizes.items())), 2) == {"c": 0, "a": 1, "b": 1}
