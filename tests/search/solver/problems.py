"""Random problems, and the truth about them by trying everything."""

import itertools
from typing import NamedTuple

import numpy as np

from spmdctx.search.solver.problem.problem import Edge, Life, Memory, Problem
from spmdctx.search.solver.unlimited.energy import minimise
from spmdctx.search.solver.unlimited.run import SolverRun

NUM_TIMES = 8


def random_problem(seed, max_nodes=6, max_states=3, with_memory=True, shared_tables=False):
    """A small problem with forbidden states and pairs, parallel edges, loops, and nodes that live several times or never."""
    random = np.random.default_rng(seed)
    num_nodes = int(random.integers(1, max_nodes + 1))
    draw = random.integers(0, 20, 4096).astype(float) if seed % 3 else random.random(4096) * 20

    def numbers(*shape):
        return random.choice(draw, shape)

    costs = [numbers(int(random.integers(1, max_states + 1))) for _ in range(num_nodes)]
    for array in costs:
        array[random.random(array.shape) < 0.05] = np.inf
    forbidden = random.choice([0.0, 0.1, 0.4])
    edges, shared = [], {}
    for _ in range(int(random.integers(0, 2 * max_nodes))):
        left, right = (int(node) for node in random.integers(0, num_nodes, 2))
        table = numbers(len(costs[left]), len(costs[right]))
        table[random.random(table.shape) < forbidden] = np.inf
        edges.append(Edge(left, right, shared.setdefault(table.shape, table) if shared_tables else table))
    usages = tuple(numbers(len(array)) for array in costs)
    lives = []
    for _ in range(int(random.integers(0, 2 * num_nodes + 1))):
        start, end = sorted(int(time) for time in random.integers(0, NUM_TIMES + 1, 2))
        lives.append(Life(int(random.integers(0, num_nodes)), start, end, 1.5 if len(lives) % 5 == 4 else 1.0))
    memory = Memory(usages, tuple(lives), float(random.integers(1, 40))) if with_memory else None
    return Problem(tuple(costs), tuple(edges), memory)


class Truth(NamedTuple):
    """The least cost that fits, the least usage of each time alone, and the least limit; infinite if nothing is finite."""

    cost: float
    least: list[float]
    limit: float


def cost_of(problem, states):
    total = sum(array[state] for array, state in zip(problem.costs, states, strict=True))
    return float(total + sum(table[states[left], states[right]] for left, right, table in problem.edges))


def usage_of(problem, states):
    memory = problem.memory
    if memory is None:
        return [0.0]
    return [
        float(sum(share * memory.usages[node][states[node]] for node, start, end, share in memory.lives if start <= time < end))
        for time in range(max((life.end for life in memory.lives), default=1))
    ]


def truth(problem):
    best, limit = np.inf, np.inf
    least = [np.inf] * len(usage_of(problem, [0] * len(problem.costs)))
    most = np.inf if problem.memory is None else problem.memory.limit * (1 + 1e-12)
    for states in itertools.product(*(range(len(array)) for array in problem.costs)):
        cost = cost_of(problem, states)
        if np.isfinite(cost):
            usage = usage_of(problem, states)
            least = [min(pair) for pair in zip(least, usage, strict=True)]
            limit = min(limit, max(usage))
            if max(usage) <= most:
                best = min(best, cost)
    return Truth(best, least, limit)


def assert_beliefs_below_the_truth(graph, bound):
    """Fixing any state of a graph costs no less than the bound believes of it."""
    for node, beliefs in bound.beliefs.items():
        for state, belief in enumerate(beliefs):
            fixed = graph.copy()
            fixed.restrict({node: np.array([state])})
            found = minimise(fixed, SolverRun())
            assert belief <= (np.inf if found is None else found.cost) + 1e-9
