"""`spmdctx calibrate`: measures the devices present and writes a topology file."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from spmdctx.cli.devices import start_devices
from spmdctx.cli.output import Output
from spmdctx.machine.topology import topology_text
from spmdctx.wording import seconds_text
from spmdctx.wording.files import check_writable, write_file

if TYPE_CHECKING:
    from spmdctx.cli.measure import Calibration


def calibrate_devices(arguments: argparse.Namespace, output: Output) -> int:
    """Measures the devices and prints what a plan would be priced with."""
    if arguments.out:
        check_writable(arguments.out)  # before the measuring, which takes longer
    start_devices(arguments.device_num)
    from spmdctx.cli.measure import calibrate

    with output.waiting("measuring matrix products, memory and collectives"):
        found = calibrate(megabytes=arguments.megabytes, repeats=arguments.repeats)
    output.show(_table(found))
    for note in found.notes:
        output.say(note)
    if arguments.out:
        write_file(arguments.out, topology_text(found.topology, as_json=arguments.out.suffix == ".json"))
        output.say(f"written to {arguments.out}; use it with --topology {arguments.out}, or topology= in Python")
    rows = [row._asdict() for row in found.collectives]
    output.finish_with("calibrate", {"topology": dataclasses.asdict(found.topology), "collectives": rows, "notes": list(found.notes)})
    return 0


def _table(found: Calibration) -> Table:
    machine = found.topology
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", title=machine.source, title_justify="left")
    table.add_column("measured")
    table.add_column("", justify="right")
    table.add_column("", justify="right")
    table.add_row("matrix products", f"{machine.peak_flops_per_s / 1e12:.3g} TFLOP/s", f"float32 {machine.float32_flops_per_s / 1e12:.3g}")
    table.add_row("vector arithmetic", f"{machine.vector_flops_per_s / 1e12:.3g} TFLOP/s", "")
    table.add_row("memory", f"{machine.memory_bytes_per_s / 1e9:.3g} GB/s", "")
    for row in found.collectives:
        table.add_row(row.kind, f"{1e-9 / row.s_per_byte:.3g} GB/s of payload", f"{seconds_text(row.fixed_s)} fixed")
    table.add_row("one link, fitted", f"{machine.link_bytes_per_s / 1e9:.3g} GB/s", f"{seconds_text(machine.latency_s)} a step")
    return table
