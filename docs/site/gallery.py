"""Makes the gallery: a page for each model and machine, with the plan, its speed beside others, and why it is so."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from spmdctx import Plan


class Exhibit(NamedTuple):
    """A model on a machine; `hand` has the slices of the batch and of the weights of a strategy written by hand."""

    model: str
    topology: str
    num_devices: int
    batch_size: int
    seq: int
    hand: tuple[int, int]

    @property
    def name(self) -> str:
        """The name of the page's file."""
        return f"{self.model}-{self.num_devices}-{self.topology}"

    @property
    def title(self) -> str:
        """The head of the page."""
        return f"{self.model} on {self.num_devices} x {self.topology}"

    @property
    def command(self) -> str:
        """The command that shows the plan."""
        program = f"--model {self.model} --batch-size {self.batch_size} --seq {self.seq} --scan-layers --remat --dtype bfloat16"
        return f"spmdctx plan {program} \\\n    --device-num {self.num_devices} --topology {self.topology} --html plan.html"


EXHIBITS = (
    Exhibit("llama2-7b", "tpu-v5p", 8, 16, 4096, (8, 1)),
    Exhibit("llama2-7b", "tpu-v6e", 16, 16, 4096, (4, 4)),
    Exhibit("llama2-7b", "h100", 8, 16, 4096, (8, 1)),
    Exhibit("llama2-7b-lora", "a100", 8, 16, 2048, (8, 1)),
    Exhibit("qwen-14b", "h200", 8, 16, 2048, (1, 8)),
    Exhibit("pangu-alpha-2.6b", "tpu-v5e", 16, 64, 1024, (4, 4)),
)
_ASKED = ("layers/attention/query/kernel", "layers/mlp/up/kernel")


def _plans(exhibit: Exhibit) -> Iterator[tuple[str, "Plan"]]:
    """Yields the searched plan, and those with which it is compared."""
    from dataclasses import replace

    import spmdctx
    from spmdctx.models import Split, abstract_program, preset

    config = replace(preset(exhibit.model), dtype="bfloat16", remat=True, scan_layers=True)
    machine = {"device_num": exhibit.num_devices, "topology": exhibit.topology}
    step, arguments = abstract_program(config, exhibit.batch_size, exhibit.seq)
    data, model = exhibit.hand
    by_hand, split_arguments = abstract_program(config, exhibit.batch_size, exhibit.seq, split=Split("megatron", data, model))
    batch = ((data, 1), (data, 1))
    yield "searched", spmdctx.plan(step, *arguments, parallel_mode="auto_parallel", **machine)
    name = f"by hand: batch in {data}, weights in {model}"
    yield name, spmdctx.plan(by_hand, *split_arguments, parallel_mode="semi_auto_parallel", dataset_strategy=batch, **machine)
    yield "data parallel", spmdctx.plan(step, *arguments, parallel_mode="data_parallel", **machine)


def page(exhibit: Exhibit) -> str:
    """Returns an exhibit's page as Markdown with the plan's HTML in it."""
    from spmdctx.machine.presets import topology

    plans = dict(_plans(exhibit))
    plan, room = plans["searched"], topology(exhibit.topology).memory_bytes
    rows = ["| plan | step | speed | peak of a device | fits |", "| --- | --- | --- | --- | --- |"]
    for name, one in plans.items():
        speed, peak = plan.cost.total_s / one.cost.total_s, one.cost.memory_bytes
        rows.append(
            f"| {name} | {one.cost.total_s * 1e3:.0f} ms | {speed:.2f} | {peak / 2**30:.1f} GiB | {'yes' if peak <= room else 'no'} |"
        )
    parts = [
        f"# {exhibit.title}",
        f"{exhibit.batch_size} sequences of {exhibit.seq} tokens a step, in bfloat16, with recomputed activations and scanned layers.",
        "## SpeedUp",
        "\n".join(rows),
        "All figures are predictions. The speed is that of the searched plan, which is 1. "
        f"A program may use {room / 2**30:.0f} GiB of a device.",
        f"```sh\n{exhibit.command}\n```",
        "## Why it is split so",
        *(f"```text\n{plan.explain(pattern)}\n```" for pattern in _ASKED if any(pattern in tensor.path for tensor in plan.inputs)),
        "## The plan",
        f"````{{raw}} html\n{plan._repr_html_()}\n````",
    ]
    return "\n\n".join(parts) + "\n"


def make(folder: Path) -> None:
    """Writes all pages, and the list of them as `index.md`, into a folder."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for exhibit, text in zip(EXHIBITS, pool.map(page, EXHIBITS), strict=True):
            (folder / f"{exhibit.name}.md").write_text(text)
    names = "\n".join(exhibit.name for exhibit in EXHIBITS)
    (folder / "index.md").write_text(
        "# Gallery\n\n"
        "What the search finds for some models on some machines. Each page has the plan, its predicted speed beside a strategy written "
        "by hand and data parallelism, and the reasons. The pages are made when the site is built. "
        "[Results](../../benchmarks/RESULTS.md) hold such predictions against compiled programs.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"
    )
