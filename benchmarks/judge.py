"""Judges compiled programs for TPU and GPU by what is in them, not by the planner's own prices: two step times and a peak of memory.

    python -m benchmarks.judge FILE.hlo --topology v5p:2x2x2

Estimate `cycles_s` sums the compiler's estimated cycles over the clock, `roofline_s` each instruction's matrix FLOPs and HBM bytes
at the published rates, and convolutions of single channels, or behind a stride, at the rate that the compiler's cycles give them. Both
count loop bodies as often as they run and add what of the collectives (`judge_links`) no compute hides.
No estimate has been held against hardware.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.judge_links import Hosts, Slice, slice_of
from benchmarks.judge_timeline import Pricing, Timeline, Walk
from benchmarks.judge_work import Work
from spmdctx.audit.hlo import read_module
from spmdctx.machine.presets import topology as preset
from spmdctx.machine.topology import Topology

if TYPE_CHECKING:
    import jax

# Published peaks over multiply-adds per cycle: four 128x128 units (v5e), eight (v5p), four 256x256 (v6e).
CLOCK_HZ = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}


_LONG_KERNELS = 2.5
"""How much longer a product's kernel takes to begin and to end than others (`device_kinds`, one H200)."""


@dataclass(frozen=True)
class Judgement:
    """Seconds of a step on one device, its parts, and its memory.

    Attributes:
        cycles_s: Estimate (a): scheduled cycles and exposed collectives; 0 of a program without cycles, as its other cycles figures.
        roofline_s: Estimate (b): roofline of every instruction and exposed collectives.
        cycles_compute_s: (a) without the collectives.
        roofline_compute_s: (b) without the collectives.
        cycles_exposed_s: Waiting for collectives under (a).
        roofline_exposed_s: Waiting for collectives under (b).
        peak_bytes: Arguments, results that share no argument's memory, and temporaries.
        flops: Of matrix products, loops counted.
        traffic: Rows of kind, group_size, is_async, count, payload_bytes, seconds, exposed_s (under (b)).
        unknown_loops: Loops whose length depends on data; one iteration is counted.
    """

    cycles_s: float
    roofline_s: float
    cycles_compute_s: float
    roofline_compute_s: float
    cycles_exposed_s: float
    roofline_exposed_s: float
    peak_bytes: int
    flops: float
    traffic: tuple[dict[str, Any], ...]
    unknown_loops: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**vars(self), "traffic": list(self.traffic)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Judgement:
        """Reads `to_dict`."""
        return cls(**{**data, "traffic": tuple(data["traffic"])})


def judge(compiled: jax.stages.Compiled, topology: str, devices: Sequence[object]) -> Judgement:
    """Judges a program compiled for `devices` (in the order of its mesh) of a slice such as "v5p:2x2x2"."""
    from spmdctx.audit import peak_bytes

    return judge_text(compiled.as_text() or "", slice_of(topology, devices), peak_bytes(compiled))


def judge_text(hlo_text: str, chips: Slice | Hosts, peak_bytes: int = 0) -> Judgement:
    """The same from the program's text, also of one for GPUs, which tells no cycles."""
    module = read_module(hlo_text)
    device = preset(chips.generation if isinstance(chips, Hosts) else f"tpu-{chips.generation}")
    clock = CLOCK_HZ.get(chips.generation, 1.0)

    roofline = roofline_of(device)
    by_cycles = Walk(module, chips, Pricing(lambda work: work.cycles / clock, lambda _: 0.0))
    cycles = by_cycles.run()
    by_roofline = Walk(module, chips, Pricing(roofline, lambda size: size / device.memory_bytes_per_s))
    line = by_roofline.run()
    flops = Walk(module, chips, Pricing(lambda work: work.flops, lambda _: 0.0)).run().compute_s
    known = float(cycles.compute_s > 0)
    return Judgement(
        cycles_s=cycles.clock_s * known,
        roofline_s=line.clock_s,
        cycles_compute_s=cycles.compute_s,
        roofline_compute_s=line.compute_s + line.copies_exposed_s,
        cycles_exposed_s=cycles.exposed_s * known,
        roofline_exposed_s=line.exposed_s,
        peak_bytes=peak_bytes,
        flops=flops,
        traffic=_traffic(line),
        unknown_loops=by_cycles.unknown_loops,
    )


def roofline_of(device: Topology) -> Callable[[Work], float]:
    """Seconds of an instruction's work: of its arithmetic, or of its bytes if these take longer; and those that every kernel takes."""
    slow = device.memory_bytes_per_s * device.gathered_share
    rates = dict.fromkeys(("reduction", "gather"), slow)

    def seconds(work: Work) -> float:
        products = (work.flops - work.wide_flops) / device.peak_flops_per_s + work.wide_flops / device.float32_flops_per_s
        lanes = work.lane_flops / device.vector_flops_per_s if work.lane_flops else 0.0
        longest = max(products + lanes, work.hbm_bytes / rates.get(work.kind, device.memory_bytes_per_s))
        kernels = _LONG_KERNELS if work.kind in ("product", "convolution") else 1.0
        return longest + kernels * device.kernel_s if longest else 0.0

    return seconds


def _traffic(line: Timeline) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"kind": kind, "group_size": size, "is_async": is_async, **vars(row)}
        for (kind, size, is_async), row in sorted(line.traffic.items(), key=lambda item: -item[1].seconds)
    )


def format_judgement(one: Judgement) -> str:
    """A few lines for people."""
    parts = (
        ("cycles", one.cycles_s, one.cycles_compute_s, one.cycles_exposed_s),
        ("roofline", one.roofline_s, one.roofline_compute_s, one.roofline_exposed_s),
    )
    lines = [f"{name:<8} {all_s * 1e3:9.3f} ms = compute {own * 1e3:.3f} + exposed {wait * 1e3:.3f}" for name, all_s, own, wait in parts]
    lines.append(f"peak {one.peak_bytes / 2**30:.3f} GiB, {one.flops / 1e12:.3f} TFLOP in matrix products")
    lines += [
        f"  {row['kind']:<18} groups of {row['group_size']:<4} {'async' if row['is_async'] else 'sync':<5} {row['count']:6.0f} x  "
        f"{row['payload_bytes'] / 2**20:10.2f} MiB  {row['seconds'] * 1e3:9.3f} ms, {row['exposed_s'] * 1e3:9.3f} exposed"
        for row in one.traffic
    ]
    return "\n".join(lines)


def main() -> int:
    """Judges a saved `compiled.as_text()`."""
    from spmdctx.lowering.compile_only import tpu_devices

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    one = judge_text(arguments.file.read_text(), slice_of(arguments.topology, tpu_devices(arguments.topology)))
    print(json.dumps(one.to_dict()) if arguments.json else format_judgement(one))
    return 0


if __name__ == "__main__":
    sys.exit(main())
