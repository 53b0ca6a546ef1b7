"""Which search a mode runs."""

import pytest

from spmdctx.cost.step import Step
from spmdctx.errors import ContextError
from spmdctx.machine.presets import topology
from spmdctx.search.select import SearchOptions, search
from spmdctx.search.setup.request import Request
from tests.search.random_graphs import random_step


@pytest.mark.parametrize("num_devices", [1, 4])
def test_an_unknown_search_mode_is_an_error_that_names_the_known_ones(num_devices):
    made = random_step(0)
    request = Request("auto_parallel", num_devices, None, None, (), frozenset(), (), (), frozenset())
    known = "dynamic_programming, recursive_programming, sharding_propagation"
    with pytest.raises(ContextError, match=rf"no search mode 'simulated_annealing'\.\n.*{known}"):
        search(Step(made.graph, made.scopes, made.from_literals), request, SearchOptions("simulated_annealing", topology("h100")))
