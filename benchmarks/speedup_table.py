"""Searched plans against hand strategies and expert templates, judged on compiled TPU programs: MindSpore's table, for spmdctx.

    python -m benchmarks.speedup_table [--only llama2-7b] [--batch small] [--topology v5e:2x4] [--quick] [--known] [--cache FOLDER] [--json]

The rows are MindSpore's decoders and four models that rule tables fit badly. Per row and batch: the row's hand strategy, every expert
template (`benchmarks.templates`), and the plans of the searches, all for the same `memory_bytes`; a program that exceeds it counts as
none. Templates are first judged by the roofline of their scheduled program; the hand strategy, the best templates and the searched
plans are then compiled to the end, for the compiler's cycles (`--quick` leaves that out; `--known` compiles nothing, and prints what
the cache holds). SpeedUp is the hand strategy's step time over the searched plan's, the lower of the two estimates; the estimates and
what the plan gains over the best template stand beside it, their geometric means and least ones in the last lines.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.judge_compile import Built, Job, Judged, already_judged, judged

MODULE = "benchmarks.speedup_table"
TOPOLOGIES = {8: "v5p:2x2x2", 64: "v5p:4x4x4"}
BATCHES = {"small": 1, "middle": 4, "large": 16}
"""Sequences per device."""
SEQ, LAYERS, FINALISTS = 2048, 2, 2
SEARCHES = ("dynamic_programming", "recursive_programming")
MOST_MODEL_SLICES = 8


class Row(NamedTuple):
    """A row of the table: the model, devices, and the hand strategies' slices of batch and weights."""

    model: str
    devices: int
    hands: tuple[tuple[int, int], ...]


ROWS = (
    Row("llama2-7b", 8, ((8, 1),)),
    Row("llama2-13b", 8, ((8, 1),)),
    Row("llama2-70b", 8, ((2, 4),)),
    Row("llama2-70b", 64, ((16, 4), (8, 8))),
    Row("baichuan2-7b", 8, ((8, 1),)),
    Row("baichuan2-13b", 8, ((8, 1),)),
    Row("qwen-7b", 8, ((2, 4),)),
    Row("qwen-14b", 8, ((1, 8),)),
    Row("gshard", 8, ()),
    Row("encoder_decoder", 8, ()),
    Row("unet", 8, ()),
    Row("vit", 8, ()),
)
ONE_BATCH = "own"
"""Size of the batch of models that come with one."""


class Contender(NamedTuple):
    """One way to split the step, and how it was judged."""

    name: str
    outcome: Judged

    def seconds(self, estimate: str, memory_bytes: int) -> float:
        """Step time; infinite where there is no program within the memory."""
        made = self.outcome.judgement
        if made is None or made.peak_bytes > memory_bytes:
            return math.inf
        return float(getattr(made, estimate)) or math.inf


def build(job: Job) -> Built:
    """The program of a template, or of a search."""
    from benchmarks.templates import Template, lower_decoder
    from benchmarks.templates_zoo import ZooTemplate, lower_zoo
    from spmdctx.lowering.compile_only import tpu_devices

    devices = tpu_devices(job["topology"])
    if "template" not in job:
        return _searched(job, devices)
    template = Template(*job["template"])
    if "layers" in job:
        return Built(lower_decoder(_config(job), job["batch"], job["seq"], template, devices), devices)
    return Built(lower_zoo(job["model"], ZooTemplate(template, job["experts"]), devices), devices)


def _config(job: Job) -> Any:
    from spmdctx.models import preset

    return replace(preset(job["model"]), num_layers=job["layers"], dtype="bfloat16", remat=True)


def _searched(job: Job, devices: Any) -> Built:
    import spmdctx
    from benchmarks.judge_models import decoder_program, zoo_program
    from tests.zoo import UNSPLIT

    if "layers" in job:
        step, arguments = decoder_program(_config(job), job["batch"], job["seq"])
    else:
        step, arguments = zoo_program(job["model"], UNSPLIT)
    # As the templates do: gradients are reduced in their own type.
    spmdctx.set_auto_parallel_context(gradient_fp32_sync=False)
    run = spmdctx.parallel(
        step,
        devices=devices,
        topology=f"tpu-{job['topology'].split(':')[0]}",
        donate_argnums=0,
        parallel_mode="auto_parallel",
        search_mode=job["search"],
        memory_bytes=job["memory_bytes"],
    )
    return Built(run.lower(*arguments), devices, run.plan(*arguments))


def template_jobs(row: Row, batch: int, start: Job) -> dict[str, Job]:
    """A job per expert template, by its name."""
    from benchmarks.templates import templates
    from benchmarks.templates_zoo import zoo_templates

    if "layers" in start:
        known = [one for one in templates(row.devices) if batch % one.data == 0 and one.model <= MOST_MODEL_SLICES]
        return {str(one): {**start, "template": [one.data, one.model, one.zero]} for one in known}
    own = zoo_templates(row.model, row.devices)
    return {str(one): {**start, "template": [one.base.data, one.base.model, one.base.zero], "experts": one.experts} for one in own}


def contenders(row: Row, batch: int, start: Job, memory_bytes: int, folder: Path, *, quick: bool, again: bool) -> Iterator[Contender]:
    """Every way to split one row's step, judged; finalists with cycles unless `quick`, searched plans anew if `again`."""
    jobs = template_jobs(row, batch, start)
    screened = [Contender(name, judged(job, MODULE, folder, codegen=False)) for name, job in jobs.items()]
    ranked = sorted(screened, key=lambda one: one.seconds("roofline_s", memory_bytes))
    kept = {one.name for one in ranked[:FINALISTS]} | {_hand_name(hand) for hand in row.hands}
    for one in screened:
        final = one.name in kept and not quick
        yield Contender(one.name, judged(jobs[one.name], MODULE, folder, codegen=True)) if final else one
    for search in SEARCHES:
        job = {**start, "search": search, "memory_bytes": memory_bytes}
        yield Contender(search, judged(job, MODULE, folder, codegen=not quick, again=again))


def known_contenders(row: Row, batch: int, start: Job, memory_bytes: int, folder: Path) -> Iterator[Contender]:
    """Those ways to split one row's step that were judged before."""
    searches = {search: {**start, "search": search, "memory_bytes": memory_bytes} for search in SEARCHES}
    for name, job in {**template_jobs(row, batch, start), **searches}.items():
        outcome = already_judged(job, MODULE, folder)
        if outcome is not None:
            yield Contender(name, outcome)


def main() -> int:
    """Prints the figures of every row and batch, then the table."""
    from spmdctx.context.layers import get_auto_parallel_context
    from spmdctx.machine.presets import topology

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="models")
    parser.add_argument("--devices", type=int, choices=TOPOLOGIES)
    parser.add_argument("--topology", help="another slice of as many devices, such as v5e:2x4")
    parser.add_argument("--batch", choices=BATCHES, action="append")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--memory-gib", type=float, help="budget per device; default the device's memory")
    parser.add_argument("--quick", action="store_true", help="no code generation, no cycles")
    parser.add_argument("--again", action="store_true", help="judge searched plans once more, with the planner as it is now")
    parser.add_argument("--known", action="store_true", help="compile nothing: print what the cache holds")
    parser.add_argument("--cache", type=Path, default=Path(".judged"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    generation = (arguments.topology or TOPOLOGIES[8]).split(":")[0]
    memory_bytes = int(arguments.memory_gib * 2**30) if arguments.memory_gib else topology(f"tpu-{generation}").memory_bytes
    found = []
    for row in ROWS:
        if re.search(arguments.only, row.model) and arguments.devices in (None, row.devices):
            for size in (arguments.batch or BATCHES) if row.hands else [ONE_BATCH]:
                batch = BATCHES.get(size, 0) * row.devices
                start: Job = {"topology": arguments.topology or TOPOLOGIES[row.devices], "model": row.model}
                if row.hands:
                    start |= {"layers": arguments.layers, "batch": batch, "seq": SEQ}
                if arguments.known:
                    ways = list(known_contenders(row, batch, start, memory_bytes, arguments.cache))
                else:
                    options = {"quick": arguments.quick, "again": arguments.again}
                    ways = list(contenders(row, batch, start, memory_bytes, arguments.cache, **options))
                found.append((row, size, ways))
                print(_details(start, ways, memory_bytes), flush=True)
    print(table(found, memory_bytes, float(get_auto_parallel_context("mem_coeff"))))
    if arguments.json:
        print(json.dumps([_plain(*one) for one in found]))
    return 0


def _details(start: Job, ways: Iterable[Contender], memory_bytes: int) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in start.items())]
    for way in sorted(ways, key=lambda one: one.seconds("roofline_s", memory_bytes)):
        made = way.outcome.judgement
        if made is None:
            lines.append(f"  {way.name:<24} {way.outcome.error}")
            continue
        planned = f", planned {way.outcome.planned['total_s'] * 1e3:.2f} ms" if way.outcome.planned else ""
        over = " EXCEEDS THE MEMORY" if made.peak_bytes > memory_bytes else ""
        parts = (("cycles", made.cycles_s, made.cycles_exposed_s), ("roofline", made.roofline_s, made.roofline_exposed_s))
        times = "  ".join(f"{name} {all_s * 1e3:9.2f} ms ({wait * 1e3:8.2f} exposed)" for name, all_s, wait in parts)
        lines.append(f"  {way.name:<24} {times}  {made.peak_bytes / 2**30:7.2f} GiB{planned}{over}")
    return "\n".join(lines)


def table(found: Iterable[tuple[Row, str, list[Contender]]], memory_bytes: int, mem_coeff: float) -> str:
    """MindSpore's form, a line per row, hand strategy and batch, and the means of the columns.

    The SpeedUp is followed by its two estimates, by those over the best template, and by what recursive's SpeedUp is.
    """
    lines = ["model, parallel_config in semi, mem_coeff in auto, SpeedUp, batch, " + ", ".join(_COLUMNS)]
    kept: list[list[float | None]] = []
    for row, size, ways in found:
        for hand in row.hands or ((),):
            name = _hand_name(hand) if hand else ""
            lower = speedup(ways, name, SEARCHES[0], memory_bytes)
            apart = [speedup(ways, base, SEARCHES[0], memory_bytes, (one,)) for base in (name, "") for one in ESTIMATES]
            kept.append([*apart, speedup(ways, name, SEARCHES[1], memory_bytes)])
            config = " ".join(f"{axis}={count}" for axis, count in zip(("dp", "mp"), hand, strict=False) if count > 1) or "best template"
            lines.append(
                f"{row.model} on {row.devices}, {config}, {mem_coeff:g}, {_share(lower)}, {size}, {', '.join(map(_share, kept[-1]))}"
            )
    columns = [[one for one in column if one is not None] for column in zip(*kept, strict=True)]
    for title, fold in (("geometric mean", _mean), ("least", min)):
        lines.append(f"{title}, , , , , " + ", ".join(_share(fold(column)) if column else "none" for column in columns))
    return "\n".join(lines)


ESTIMATES = ("roofline_s", "cycles_s")
_COLUMNS = ("by roofline", "by cycles", "over the best template by roofline", "by cycles", "recursive's SpeedUp")


def _share(figure: float | None) -> str:
    return "none" if figure is None else f"{figure:.1%}"


def _mean(figures: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, figures)) / len(figures))


def _hand_name(slices: tuple[int, int]) -> str:
    from benchmarks.templates import Template

    return str(Template(*slices))


def speedup(ways: Iterable[Contender], base: str, search: str, memory_bytes: int, estimates: Iterable[str] = ESTIMATES) -> float | None:
    """Seconds of `base` ("" for the best template) over those of a search, the lower of the estimates that both have.

    None where one of them has no program within the memory.
    """
    ways = list(ways)
    ratios = []
    for estimate in estimates:
        searched = min((one.seconds(estimate, memory_bytes) for one in ways if one.name == search), default=math.inf)
        bases = [one for one in ways if (one.name == base if base else one.name not in SEARCHES)]
        against = min((one.seconds(estimate, memory_bytes) for one in bases), default=math.inf)
        if math.isfinite(searched) and math.isfinite(against):
            ratios.append(against / searched)
    return min(ratios, default=None)


def _plain(row: Row, size: str, ways: Iterable[Contender]) -> dict[str, Any]:
    judgements = {one.name: one.outcome.judgement for one in ways}
    return {
        "model": row.model,
        "devices": row.devices,
        "batch": size,
        "judged": {name: made.to_dict() if made else None for name, made in judgements.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
