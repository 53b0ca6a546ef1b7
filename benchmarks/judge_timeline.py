"""Runs a scheduled program on paper: one compute stream, one network, asynchronous collectives between their start and done.

Loop bodies run once and count as often as the loop iterates; nothing overlaps across a loop's border. A collective without a
start and a done, or one whose start, steps and done sit in a single fusion, is as exposed as the compute beside it leaves it. A step
inside a loop of a collective that starts before the loop is no collective of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from benchmarks.judge_links import Hosts, Slice, collective_s
from benchmarks.judge_work import Work, full_size, hbm_size, work_of
from spmdctx.audit.collectives import KINDS as HLO_KINDS
from spmdctx.audit.groups import read_groups
from spmdctx.audit.hlo import Computation, Instruction, Module
from spmdctx.audit.loops import trip_count
from spmdctx.ir.collective import COLLECTIVE_KINDS

KINDS = {opcode: kind for opcode, kind in HLO_KINDS.items() if kind in COLLECTIVE_KINDS}
_CHANNEL = re.compile(r"channel_id=(\d+)")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
COPY_DONES = tuple(name.replace("start", "done") for name in COPIES)
"""Copies between HBM and the chip beside the computation, and where it waits for them."""

_BRANCHES = ("branch_computations", "true_computation", "false_computation")


class Transfer(NamedTuple):
    """One execution of a collective."""

    kind: str
    group_size: int
    payload_bytes: int
    seconds: float
    is_async: bool


@dataclass
class Traffic:
    """All executions of a step of one kind among groups of one size, synchronous or not."""

    count: float = 0.0
    payload_bytes: float = 0.0
    seconds: float = 0.0
    exposed_s: float = 0.0

    def add(self, other: Traffic, times: float) -> None:
        """Adds another row that happens `times` times."""
        self.count += other.count * times
        self.payload_bytes += other.payload_bytes * times
        self.seconds += other.seconds * times
        self.exposed_s += other.exposed_s * times


Key = tuple[str, int, bool]


@dataclass
class Timeline:
    """The clock of one estimate."""

    clock_s: float = 0.0
    compute_s: float = 0.0
    copies_exposed_s: float = 0.0
    traffic: dict[Key, Traffic] = field(default_factory=dict)
    _network_s: float = 0.0
    _memory_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream waits for collectives."""
        return sum(row.exposed_s for row in self.traffic.values())

    def compute(self, seconds: float) -> None:
        """The compute stream works."""
        self.clock_s += seconds
        self.compute_s += seconds

    def start(self, transfer: Transfer) -> float:
        """Puts a collective on the network; returns the time at which it is done."""
        self._network_s = max(self.clock_s, self._network_s) + transfer.seconds
        row = self.traffic.setdefault((transfer.kind, transfer.group_size, transfer.is_async), Traffic())
        row.add(Traffic(1.0, transfer.payload_bytes, transfer.seconds), 1.0)
        return self._network_s

    def finish(self, transfer: Transfer, end_s: float) -> None:
        """The compute stream waits for a collective."""
        wait = max(0.0, end_s - self.clock_s)
        self.clock_s += wait
        self.traffic[transfer.kind, transfer.group_size, transfer.is_async].exposed_s += wait

    def start_copy(self, seconds: float) -> float:
        """Starts a copy between HBM and on-chip memory; returns the time at which it is done."""
        self._memory_s = max(self.clock_s, self._memory_s) + seconds
        return self._memory_s

    def finish_copy(self, end_s: float) -> None:
        """The compute stream waits for a copy."""
        wait = max(0.0, end_s - self.clock_s)
        self.clock_s += wait
        self.copies_exposed_s += wait

    def add(self, other: Timeline, times: float) -> None:
        """What was timed apart happens `times` times from now."""
        self.clock_s = max(self.clock_s, self._network_s) + other.clock_s * times
        self.compute_s += other.compute_s * times
        self.copies_exposed_s += other.copies_exposed_s * times
        for key, row in other.traffic.items():
            self.traffic.setdefault(key, Traffic()).add(row, times)


class Pricing(NamedTuple):
    """An estimate: seconds of an instruction's work, and of copying bytes asynchronously."""

    compute_s: Callable[[Work], float]
    copy_s: Callable[[float], float]


@dataclass
class Walk:
    """Times a module under one pricing."""

    module: Module
    chips: Slice | Hosts
    pricing: Pricing
    unknown_loops: int = 0
    _works: dict[str, Work] = field(default_factory=dict)

    @cached_property
    def bodies(self) -> frozenset[str]:
        """Names of the loops' bodies."""
        every = (one for own in self.module.computations.values() for one in own.instructions.values() if one.opcode == "while")
        return frozenset(name for one in every for name in one.callees("body"))

    def run(self) -> Timeline:
        """The whole program."""
        return self.computation(self.module.computations[self.module.entry])

    def computation(self, computation: Computation) -> Timeline:
        """One computation, from an idle machine until all it started is done."""
        line = Timeline()
        borders = _Borders.of(computation, self)
        running: dict[str, tuple[Transfer, float]] = {}
        copies: dict[str, float] = {}
        for one in computation.instructions.values():
            for key, transfer in borders.starts.get(one.name, ()):
                running[key] = (transfer, line.start(transfer))
            self._execute(one, computation, line, copies)
            for key in borders.ends.get(one.name, ()):
                if key in running:
                    line.finish(*running.pop(key))
        for transfer, end_s in running.values():
            line.finish(transfer, end_s)
        return line

    def _execute(self, one: Instruction, computation: Computation, line: Timeline, copies: dict[str, float]) -> None:
        if one.opcode == "while":
            count = trip_count(one, computation, self.module)
            self.unknown_loops += count is None
            for name in (*one.callees("condition"), *one.callees("body")):
                line.add(self.computation(self.module.computations[name]), 1 if count is None else count)
        elif one.opcode == "conditional":
            names = [name for key in _BRANCHES for name in one.callees(key)]
            branches = [self.computation(self.module.computations[name]) for name in names]
            line.add(max(branches, key=lambda branch: branch.clock_s), 1)
        elif one.opcode == "call":
            for name in one.callees("to_apply"):
                line.add(self.computation(self.module.computations[name]), 1)
        elif one.opcode in COPIES:
            copies[one.name] = line.start_copy(self.pricing.copy_s(_copied_bytes(one)))
        elif one.opcode in COPY_DONES:
            line.finish_copy(copies.pop(one.operands[0], 0.0))
        elif not one.opcode.startswith(tuple(KINDS)) and not one.opcode.startswith("async-"):
            line.compute(self.pricing.compute_s(self.work(one, computation)))

    def work(self, one: Instruction, computation: Computation) -> Work:
        key = f"{computation.name}/{one.name}"
        if key not in self._works:
            self._works[key] = work_of(one, computation, self.module)
        return self._works[key]

    def transfer(self, one: Instruction, computation: Computation, is_async: bool) -> Transfer:
        """What a collective instruction moves, from where it stands."""
        kind = KINDS[one.opcode.removesuffix("-start")]
        if kind == "all_reduce" and computation.name.startswith("all-reduce-scatter"):
            kind = "reduce_scatter"
        operands = [computation.instructions[name] for name in one.operands if name in computation.instructions]
        payload = sum(full_size(operand.shape) for operand in operands)
        pair = _PAIRS.search(one.attributes)
        if pair:
            groups = read_groups(f"replica_groups={{{{{pair.group(1)},{pair.group(2)}}}}}", len(self.chips.coordinates))
        else:
            groups = read_groups(one.attributes, len(self.chips.coordinates))
        payload *= groups.shape[1] if kind == "all_gather" else 1
        return Transfer(kind, groups.shape[1], payload, collective_s(kind, payload, groups, self.chips), is_async)


def _copied_bytes(one: Instruction) -> int:
    """HBM bytes of an asynchronous copy: what lands, for it leaves HBM, arrives there, or both."""
    parts = re.split(r"\), (?=[a-z])", one.shape.lstrip("(")) if one.opcode == "slice-start" else []
    return full_size(parts[1].split(", s32[]")[0]) if len(parts) > 1 else full_size(one.shape) // 2 if hbm_size(one.shape) else 0


class _Borders(NamedTuple):
    """Which instruction starts a collective of a computation, and which awaits it."""

    starts: Mapping[str, list[tuple[str, Transfer]]]
    ends: Mapping[str, list[str]]

    @classmethod
    def of(cls, computation: Computation, walk: Walk) -> _Borders:
        starts: dict[str, list[tuple[str, Transfer]]] = {}
        last: dict[str, str] = {}
        for one in computation.instructions.values():
            if one.opcode.endswith("-done") and one.operands and one.operands[0] in last:
                last[one.operands[0]] = one.name
            for key, inner, home, is_async in _collectives(one, computation, walk.module):
                if key not in last and computation.name in walk.bodies and _is_step(key, home):
                    continue
                if key not in last:
                    starts.setdefault(one.name, []).append((key, walk.transfer(inner, home, is_async)))
                last[key] = one.name
        ends: dict[str, list[str]] = {}
        for key, name in last.items():
            ends.setdefault(name, []).append(key)
        return cls(starts, ends)


def _is_step(key: str, home: Computation) -> bool:
    """Whether a fusion holds a later step of a collective that is spread over several: its start is elsewhere, before the loop."""
    return key.startswith("channel ") and not any("AsyncCollectiveStart" in other.attributes for other in home.instructions.values())


def _collectives(one: Instruction, computation: Computation, module: Module) -> Iterator[tuple[str, Instruction, Computation, bool]]:
    """Collectives that an instruction is or holds, each with a key that its steps in other fusions share."""
    base = one.opcode.removesuffix("-start")
    if base in KINDS:
        yield one.name, one, computation, one.opcode.endswith("-start")
    elif one.opcode in ("fusion", "async-start"):
        for name in one.callees("calls"):
            home = module.computations[name]
            for inner in home.instructions.values():
                for key, found, place, is_async in _collectives(inner, home, module):
                    spread = "async_collective_fusion_config" in found.attributes
                    channel = _CHANNEL.search(found.attributes)
                    own = f"channel {channel.group(1)}" if spread and channel else f"{one.name}/{key}"
                    yield own if one.opcode == "fusion" else one.name, found, place, is_async or spread or one.opcode == "async-start"
