"""Planned peaks of stages of real sizes against compiled ones: `python -m benchmarks.stage_peaks [PATTERN] [--cache FOLDER]`.

Each program is cut into stages and planned with donated state; adamw follows the clipped gradients, or plain descent. The programs of
each stage are compiled for the devices of one stage, on TPU until the compiler has assigned memory. A stage's compiled peak is the most
of what its plan holds when a program begins, and what the compiler reserves beside the program's operands. Prints a row for each
stage, and how many are within 15 %. GPU needs JAX's CUDA plugin.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax

import spmdctx
from benchmarks.judge_compile import _digest, _versions, compile_program
from benchmarks.pipeline_judge import Program, programs_of, run_apart
from benchmarks.stage_fresh import gates, latent, masked, pairs, skips, slopes, speech, windowed
from benchmarks.stage_gpus import gpt, perceiver, tabular
from benchmarks.stage_models import How, Model, Text, bert, diffusion, gemma, llama, mixer, opt, retention
from benchmarks.stage_others import mixture, phi, qwen, recurrence, translation, vision
from spmdctx.audit import peak_bytes
from spmdctx.lowering.compile_only import gpu_devices, tpu_devices

WITHIN = 0.15
TOPOLOGIES = {"tpu-v5p": "v5p:2x2x1", "tpu-v5e": "v5e:2x4", "tpu-v6e": "v6e:2x4", "h100": "h100"}
PARAMETER = re.compile(r"^allocation \d+: size (\d+), parameter", re.MULTILINE)


class Case(NamedTuple):
    """A program: how its model is made, the machine, devices, stages, micro-batches, and whether adamw trains it."""

    make: Callable[[], Model]
    machine: str
    devices: int
    stages: int
    micro: int
    adamw: bool = True


REMAT = How(remat=True)
DOTS = How(remat=True, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
CASES: dict[str, Case] = {
    "opt": Case(lambda: opt(Text(12, 2048, 16, 8192, 32, 1024), How()), "tpu-v5p", 4, 2, 4),
    "opt remat v5e": Case(lambda: opt(Text(12, 2048, 16, 8192, 64, 1024), REMAT), "tpu-v5e", 8, 4, 8),
    "llama remat": Case(lambda: llama(Text(12, 4096, 32, 14336, 32, 2048), REMAT, groups=8), "tpu-v5p", 4, 4, 8),
    "llama masters": Case(
        lambda: llama(Text(8, 2048, 16, 5632, 32, 1024, dtype="float32"), How(compute="bfloat16"), groups=4), "tpu-v5p", 4, 2, 4
    ),
    "llama scan v5e": Case(lambda: llama(Text(16, 2048, 16, 5632, 64, 1024), How(remat=True, scan=True), groups=16), "tpu-v5e", 8, 4, 8),
    "llama dots v5e": Case(lambda: llama(Text(12, 2048, 16, 5632, 32, 1024), DOTS, groups=4), "tpu-v5e", 8, 4, 8, adamw=False),
    "gemma": Case(lambda: gemma(Text(10, 2048, 16, 8192, 16, 1024, 65536), How()), "tpu-v5p", 4, 2, 4, adamw=False),
    "gemma remat v5e": Case(lambda: gemma(Text(12, 1536, 12, 6144, 64, 1024, 65536), REMAT), "tpu-v5e", 8, 2, 8),
    "bert f32": Case(lambda: bert(Text(12, 1024, 16, 4096, 64, 512, dtype="float32"), How()), "tpu-v5p", 4, 2, 4),
    "bert v5e": Case(lambda: bert(Text(16, 1024, 16, 4096, 128, 512), How()), "tpu-v5e", 8, 4, 8),
    "diffusion": Case(lambda: diffusion(Text(12, 1536, 24, 6144, 64, 1024), How()), "tpu-v5p", 4, 2, 4),
    "diffusion f32 remat v5e": Case(
        lambda: diffusion(Text(12, 1152, 16, 4608, 64, 1024, dtype="float32"), REMAT), "tpu-v5e", 8, 2, 4, adamw=False
    ),
    "mixer": Case(lambda: mixer(Text(16, 1280, 1, 5120, 256, 256), How(), mixed=640), "tpu-v5p", 4, 4, 4),
    "mixer remat v5e": Case(lambda: mixer(Text(16, 1280, 1, 5120, 512, 256), REMAT, mixed=640), "tpu-v5e", 8, 4, 4, adamw=False),
    "retention v5e": Case(lambda: retention(Text(12, 1536, 12, 6144, 32, 1024, 50304), How()), "tpu-v5e", 8, 4, 8),
    "retention remat": Case(lambda: retention(Text(8, 2560, 20, 10240, 32, 2048, 50304), REMAT), "tpu-v5p", 2, 2, 4),
}
OTHERS: dict[str, Case] = {
    "phi v5p": Case(lambda: phi(Text(12, 2560, 32, 10240, 32, 1024, 51200), How()), "tpu-v5p", 4, 2, 4),
    "phi remat v6e": Case(lambda: phi(Text(16, 2048, 32, 8192, 64, 1024, 51200), REMAT), "tpu-v6e", 8, 4, 8),
    "phi h100": Case(lambda: phi(Text(12, 2560, 32, 10240, 16, 1024, 51200), How()), "h100", 8, 4, 4),
    "qwen remat v5p": Case(lambda: qwen(Text(14, 3584, 28, 9472, 16, 2048, 65536), REMAT, groups=4), "tpu-v5p", 4, 2, 4),
    "qwen dots v5e": Case(lambda: qwen(Text(12, 1536, 12, 8960, 64, 1024, 65536), DOTS, groups=2), "tpu-v5e", 8, 4, 8),
    "qwen remat h100": Case(lambda: qwen(Text(14, 3584, 28, 9472, 32, 2048, 65536), REMAT, groups=4), "h100", 8, 4, 8),
    "mixture v5p": Case(lambda: mixture(Text(8, 2048, 16, 8192, 32, 512), How(), experts=8, room=96), "tpu-v5p", 4, 2, 4),
    "mixture remat v5e": Case(lambda: mixture(Text(8, 1024, 16, 4096, 64, 512), REMAT, experts=8, room=96), "tpu-v5e", 8, 4, 8),
    "vision f32 v5p": Case(lambda: vision(Text(16, 1152, 16, 4608, 256, 256, dtype="float32"), How()), "tpu-v5p", 4, 2, 8),
    "vision remat v5e": Case(lambda: vision(Text(20, 1408, 16, 6144, 256, 256), REMAT), "tpu-v5e", 8, 4, 4, adamw=False),
    "vision h100": Case(lambda: vision(Text(16, 1408, 11, 6144, 256, 256), How()), "h100", 8, 2, 4),
    "translation v5p": Case(lambda: translation(Text(8, 1536, 24, 4096, 64, 512), How()), "tpu-v5p", 4, 2, 4),
    "translation remat v6e": Case(lambda: translation(Text(8, 1536, 24, 4096, 128, 512), REMAT), "tpu-v6e", 8, 4, 8),
    "recurrence v5e": Case(lambda: recurrence(Text(10, 1536, 1, 4608, 32, 1024), REMAT), "tpu-v5e", 8, 2, 4),
}
"""Written after the rules of memory were made, but for what two of them showed on v6e: products there wait for no sums."""


ON_GPU: dict[str, Case] = {
    "gpt h100": Case(lambda: gpt(Text(12, 1536, 24, 6144, 32, 1024, 50304), REMAT), "h100", 8, 4, 4),
    "gpt masters h100": Case(
        lambda: gpt(Text(8, 1024, 16, 4096, 32, 512, 50304, "float32"), How(remat=True, compute="bfloat16")), "h100", 4, 2, 4
    ),
    "mixture remat h100": Case(lambda: mixture(Text(8, 1536, 12, 6144, 64, 512), REMAT, experts=8, room=96), "h100", 8, 4, 4),
    "translation remat h100": Case(lambda: translation(Text(6, 1024, 16, 2816, 64, 512), REMAT), "h100", 8, 2, 4, adamw=False),
    "llama scan h100": Case(lambda: llama(Text(16, 2048, 16, 5632, 64, 1024), How(remat=True, scan=True), groups=4), "h100", 8, 4, 8),
    "qwen dots h100": Case(lambda: qwen(Text(12, 2048, 16, 5632, 32, 1024, 65536), DOTS, groups=4), "h100", 8, 4, 4, adamw=False),
    "vision f32 remat h100": Case(lambda: vision(Text(12, 1024, 16, 4096, 128, 256, dtype="float32"), REMAT), "h100", 4, 2, 4, adamw=False),
    "tabular f32 remat h100": Case(lambda: tabular(Text(16, 1024, 1, 4096, 65536, 512, dtype="float32"), REMAT), "h100", 8, 4, 4),
    "perceiver remat h100": Case(lambda: perceiver(Text(8, 1024, 16, 4096, 64, 2048), REMAT, places=512), "h100", 4, 2, 4),
}
"""Written after rules of memory for GPU were made (`machine.xla.memory.late_gradients`)."""


FRESH: dict[str, Case] = {
    "speech h100": Case(lambda: speech(Text(10, 1280, 20, 5120, 32, 1024, 8192), How()), "h100", 8, 2, 4),
    "speech remat h100": Case(lambda: speech(Text(16, 1280, 20, 5120, 64, 1024, 8192), REMAT), "h100", 8, 4, 8),
    "speech remat v5p": Case(lambda: speech(Text(16, 1280, 20, 5120, 64, 1024, 8192), REMAT), "tpu-v5p", 8, 4, 8),
    "pairs h100": Case(lambda: pairs(Text(12, 1024, 16, 2816, 64, 384, 50304), How()), "h100", 4, 2, 4),
    "pairs f32 remat h100": Case(lambda: pairs(Text(12, 768, 12, 2048, 64, 512, 30720, "float32"), REMAT), "h100", 8, 4, 4),
    "pairs v6e": Case(lambda: pairs(Text(12, 1024, 16, 2816, 64, 384, 50304), How()), "tpu-v6e", 8, 2, 4),
    "latent remat h100": Case(
        lambda: latent(Text(12, 2048, 16, 8192, 32, 1024, 65536), REMAT, queries=768, keys=512, turned=64), "h100", 8, 4, 8
    ),
    "latent dots sgd h100": Case(
        lambda: latent(Text(8, 2560, 20, 6912, 16, 2048), DOTS, queries=1024, keys=512, turned=64), "h100", 4, 2, 4, adamw=False
    ),
    "latent remat v5e": Case(
        lambda: latent(Text(12, 1536, 12, 6144, 32, 1024), REMAT, queries=768, keys=384, turned=64), "tpu-v5e", 8, 4, 8
    ),
    "skips h100": Case(lambda: skips(Text(12, 1024, 16, 4096, 128, 256), How()), "h100", 8, 2, 4),
    "skips remat h100": Case(lambda: skips(Text(16, 1536, 24, 6144, 128, 256), REMAT), "h100", 8, 4, 4),
    "skips remat v5p": Case(lambda: skips(Text(16, 1536, 24, 6144, 128, 256), REMAT), "tpu-v5p", 8, 4, 4),
    "windowed remat h100": Case(lambda: windowed(Text(12, 2048, 16, 7168, 16, 2048, 49152), REMAT, window=512), "h100", 8, 4, 4),
    "windowed scan sgd h100": Case(
        lambda: windowed(Text(16, 1536, 12, 5376, 32, 1024), How(remat=True, scan=True), window=256), "h100", 4, 2, 4, adamw=False
    ),
    "windowed v5e": Case(lambda: windowed(Text(12, 1536, 12, 5376, 32, 1024), REMAT, window=256), "tpu-v5e", 8, 2, 8),
    "slopes sgd h100": Case(lambda: slopes(Text(8, 2048, 32, 8192, 16, 1024, 50304), How()), "h100", 4, 2, 4, adamw=False),
    "slopes masters scan h100": Case(
        lambda: slopes(Text(12, 1536, 24, 6144, 32, 1024, dtype="float32"), How(remat=True, scan=True, compute="bfloat16")), "h100", 8, 4, 4
    ),
    "slopes sgd v6e": Case(lambda: slopes(Text(8, 2048, 32, 8192, 32, 1024, 50304), How()), "tpu-v6e", 8, 2, 4, adamw=False),
}
"""Written after all rules of memory, those for late updates on GPU (`machine.xla.memory.late_gradients.updates_wait`) among them."""


LATER: dict[str, Case] = {
    "masked f32 remat h100": Case(
        lambda: masked(Text(12, 1024, 16, 4096, 128, 256, dtype="float32"), REMAT, seen=128), "h100", 8, 4, 4, adamw=False
    ),
    "gates remat h100": Case(lambda: gates(Text(16, 1536, 12, 6144, 64, 1024), REMAT, groups=4), "h100", 8, 4, 8),
    "gates scan sgd h100": Case(
        lambda: gates(Text(12, 2048, 16, 8192, 32, 1024, 50304), How(remat=True, scan=True), groups=4), "h100", 8, 4, 4, adamw=False
    ),
}
"""Written after the rules that `FRESH` showed: stages without collectives, and what loops read and write."""


class Row(NamedTuple):
    """A stage: its planned peak, and the compiled one with the program that has it; bytes of a device."""

    planned: int
    compiled: int
    program: str

    @property
    def ratio(self) -> float:
        """Planned over compiled."""
        return self.planned / self.compiled


def train_step(case: Case, model: Model) -> tuple[Callable[..., Any], Any]:
    """A step of a case, and the shapes of its state."""
    if not case.adamw:

        def descend(params: Any, batch: Any) -> Any:
            gradients = spmdctx.grad(model.loss)(params, batch)
            return jax.tree.map(lambda own, gradient: own - (0.1 * gradient).astype(own.dtype), params, gradients)

        return descend, model.params
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        loss, gradients = spmdctx.value_and_grad(model.loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return step, (model.params, jax.eval_shape(optimizer.init, model.params))


def rows_of(case: Case, folder: Path) -> Iterator[Row]:
    """Plans a case, and compiles its programs where the folder does not know them."""
    model = case.make()
    step, state = train_step(case, model)
    run = spmdctx.parallel(
        step,
        parallel_mode="auto_parallel",
        device_num=case.devices,
        topology=case.machine,
        pipeline_stages=case.stages,
        grad_accumulation_step=case.micro,
        donate_argnums=0,
    )
    stages = run.plan(state, model.batch).stages
    programs = programs_of(run._entry_of((state, model.batch), {}).pipeline)
    beside: dict[int, int] = {}
    for stage in stages:
        found: dict[str, int] = {}
        for name, live in stage.live_bytes.items():
            own = programs[name]
            if id(own.assignment) not in beside:
                beside[id(own.assignment)] = int(run_apart(partial(_beside, own, case.machine, folder)))
            found[name] = live + beside[id(own.assignment)]
        most = max(found, key=found.__getitem__)
        yield Row(stage.memory_bytes, found[most], most)


def _beside(program: Program, machine: str, folder: Path, scratch: Path) -> str:
    """Bytes that the compiler reserves beside a program's operands."""
    topology, plan = TOPOLOGIES[machine], program.plan
    num = plan.logical_mesh.num_devices
    lowered = program.lower(gpu_devices(num) if machine == "h100" else tpu_devices(topology)[:num])
    # The planned peak limits TPU's scheduler.
    limit = 0 if machine == "h100" else plan.cost.memory_bytes
    key = [lowered.as_text(), topology, limit, _versions(topology)]
    place = folder / f"stage-{_digest(json.dumps(key))}.json"
    if place.exists():
        return place.read_text()
    if machine == "h100":
        compiled = lowered.compile()
        peak, operands = peak_bytes(compiled), compiled.memory_analysis().argument_size_in_bytes
    else:
        _, peak = compile_program(lowered, scratch / "dump", codegen=False)
        assigned = max((scratch / "dump").glob("*after_optimizations-buffer-assignment.txt"), key=lambda path: path.stat().st_size)
        operands = sum(map(int, PARAMETER.findall(assigned.read_text())))
    folder.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(peak - operands))
    return str(peak - operands)


def main() -> int:
    """Prints the rows of what the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression for names of programs")
    parser.add_argument("--machine", choices=sorted(TOPOLOGIES), help="another machine than each program's own")
    parser.add_argument("--cache", type=Path, default=Path(".judged"), metavar="FOLDER")
    chosen = parser.parse_args()
    ratios: list[float] = []
    for name, case in (CASES | OTHERS | ON_GPU | FRESH | LATER).items():
        if not re.search(chosen.pattern, name):
            continue
        own = case._replace(machine=chosen.machine or case.machine)
        for number, row in enumerate(rows_of(own, chosen.cache)):
            ratios.append(row.ratio)
            amounts = f"{row.planned / 2**20:9.1f} {row.compiled / 2**20:9.1f} MiB {row.ratio:6.3f}"
            print(f"{name:<26} {own.machine:<8} stage {number} {amounts} {row.program}", flush=True)
    print(f"{len(ratios)} stages, {sum(abs(1 - ratio) <= WITHIN for ratio in ratios)} within 15 %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
