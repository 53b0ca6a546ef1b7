"""How true predicted step times, bytes and memory are: plans of five models, right and wrong ones, against their compiled programs.

    python -m benchmarks.fidelity_plans [--topology v5e:2x4] [--fresh|--unseen] [--only 'mlp.*'] [--cycles] [--again] [--cache DIR] [--json]

`--fresh` takes the models of `fresh_programs`, `--unseen` those of `unseen_programs`, which were written after every price;
`--topology h100:8` judges programs for GPUs.
Plans come from data parallelism, tensor-parallel strategies, a few pins, random legal pins and the searches. Time is held against the
judge's roofline estimate (with `--cycles`, which compiles to the end, against both), communication against the collectives of the
scheduled program, memory against what the compiler assigned. Exits with 1 unless the rank correlation of step times is at least 0.9
over all plans, 95 % of the bytes are within 10 %, and every peak of memory is within 15 %.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks import fresh_programs, unseen_programs
from benchmarks.judge_compile import Built, Job, Judged, devices_of, judge_parser, judged, machine_of
from benchmarks.judge_kinds import ORDER, planned_by_kind

PROGRAMS = {**fresh_programs.PROGRAMS, **unseen_programs.PROGRAMS}
SHALLOW = {**fresh_programs.SHALLOW, **unseen_programs.SHALLOW}

MODULE = "benchmarks.fidelity_plans"
MODELS = ("llama", "mlp", "transformer", "moe", "vit")
MESHES = ((4, 2), (2, 4), (1, 8))
SEEDS = (0, 1, 2)
MIN_RANK, MIN_BYTES, MAX_MEMORY = 0.9, 0.95, 0.15
SIZES: dict[str, dict[str, int]] = {
    "mlp": {"BATCH": 32768, "WIDTH": 4096, "HIDDEN": 16384, "CLASSES": 2048},
    "transformer": {"BATCH": 64, "SEQ": 512, "WIDTH": 2048, "HEADS": 16, "HEAD_DIM": 128, "HIDDEN": 8192, "VOCAB": 16384},
    "moe": {"BATCH": 64, "SEQ": 512, "WIDTH": 1024, "HIDDEN": 4096, "EXPERTS": 16, "CAPACITY": 80, "CLASSES": 8192},
    "vit": {"batch": 512},
}
"""Larger than the judge's, so that every plan takes about half a gigabyte or more."""
LLAMA: dict[str, Any] = {
    "vocab_size": 16384,
    "width": 2048,
    "num_layers": 2,
    "num_heads": 16,
    "num_kv_heads": 16,
    "hidden": 5632,
    "max_seq": 1024,
}
LLAMA_BATCH = 32


def jobs(topology: str) -> Iterator[Job]:
    """The plans to be judged, all on 8 devices."""
    for model in MODELS:
        start = {"topology": topology, "model": model}
        yield {**start, "mode": "data_parallel", "split": "none", "mesh": [8, 1]}
        for mesh in MESHES:
            yield {**start, "mode": "semi_auto_parallel", "split": "strategies", "mesh": list(mesh)}
        for mesh in MESHES[:2]:
            yield {**start, "mode": "sharding_propagation", "split": "pins", "mesh": list(mesh)}
            for seed in SEEDS:
                yield {**start, "mode": "sharding_propagation", "split": "none", "mesh": list(mesh), "seed": seed}
        for mode in ("recursive_programming", "dynamic_programming"):
            yield {**start, "mode": mode, "split": "none", "mesh": None}


def fresh_jobs(models: Iterable[str], topology: str) -> Iterator[Job]:
    """The same of models that have no strategies of their own."""
    for model in models:
        start = {"topology": topology, "model": model, "split": "none"}
        yield {**start, "mode": "data_parallel", "mesh": [8, 1]}
        for seed, mesh in enumerate(MESHES):
            yield {**start, "mode": "sharding_propagation", "mesh": list(mesh), "seed": seed}
        for mode in ("recursive_programming", "dynamic_programming"):
            yield {**start, "mode": mode, "mesh": None}


def build(job: Job) -> Built:
    """Plans and lowers a job's step."""
    import jax
    import numpy as np

    import spmdctx

    devices = devices_of(job["topology"])
    data, model = job["mesh"] or (8, 1)
    step, arguments = _program(job["model"], job["split"], data, model)
    searched = job["mode"] not in ("data_parallel", "semi_auto_parallel")
    options: dict[str, Any] = {"parallel_mode": "auto_parallel", "search_mode": job["mode"]} if searched else {"parallel_mode": job["mode"]}
    options["devices"] = devices
    if job["mesh"] and job["mode"] != "data_parallel":
        del options["devices"]
        options["mesh"] = jax.sharding.Mesh(np.array(devices).reshape(data, model), ("data", "model"))
        if "seed" in job:
            step = _pinned(step, options["mesh"], job["seed"])
    run = spmdctx.parallel(step, topology=machine_of(job["topology"]), donate_argnums=0, **options)
    entry = run._entry_of(arguments, {})
    return Built(
        run.lower(*arguments), devices, run.plan(*arguments), planned_by_kind((entry.planned, entry.environment.settings.topology))
    )


def _pinned(step: Callable[..., Any], mesh: Any, seed: int) -> Callable[..., Any]:
    """The step with about half of its larger state leaves pinned at random, each legally."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    def run(state: Any, *batch: Any) -> Any:
        rng = np.random.default_rng(seed)

        def pin(leaf: Any) -> Any:
            if leaf.size < 2**14 or rng.random() < 0.5:
                return leaf
            spec: list[Any] = [None] * leaf.ndim
            for axis in rng.permutation(mesh.axis_names):
                legal = [place for place, size in enumerate(leaf.shape) if spec[place] is None and size % mesh.shape[str(axis)] == 0]
                if legal and rng.random() < 0.7:
                    spec[int(rng.choice(legal))] = str(axis)
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

        return step(jax.tree.map(pin, state), *batch)

    return run


def _program(model: str, split: str, data: int, slices: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from benchmarks.judge_models import decoder_program, zoo_program
    from spmdctx.models import DecoderConfig, Split
    from tests.zoo.case import Split as ZooSplit

    if model in PROGRAMS:
        step, arguments, _ = PROGRAMS[model](data * slices, **SHALLOW[model])
        return step, arguments
    if model == "llama":
        kind = {"none": "none", "strategies": "megatron", "pins": "pins"}[split]
        config = DecoderConfig(**LLAMA, dtype="bfloat16", remat=True)
        own = Split(kind, data, slices)  # type: ignore[arg-type]  # the kinds come from a table of names
        return decoder_program(config, LLAMA_BATCH, split=own)
    return zoo_program(model, ZooSplit(split, data, slices), SIZES[model])  # type: ignore[arg-type]  # the kinds come from a table of names


def name_of(job: Job) -> str:
    """A row's name."""
    mesh = "x".join(map(str, job["mesh"])) if job["mesh"] else "any"
    return f"{job['model']} {job['mode']} {mesh} {job['split']}" + (f" seed {job['seed']}" if "seed" in job else "")


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's."""
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)


def main() -> int:
    """Prints a row per plan, then the correlations."""
    parser = judge_parser(__doc__)
    parser.add_argument("--again", action="store_true", help="plan once more; what stays the same is not compiled again")
    parser.add_argument("--fresh", action="store_true", help="models on which no price was tuned")
    parser.add_argument("--unseen", action="store_true", help="models that were written after every price")
    parser.add_argument("--cycles", action="store_true", help="the compiler's cycles too: ten times slower")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[tuple[Job, Judged]] = []
    print(f"{'plan':<52} {'planned':>9} {'judged':>9} ms {'compute':>17} {'comm.':>15} {'exposed':>8} {'exact':>6} {'memory':>13} MiB")
    chosen = jobs(arguments.topology)
    if arguments.fresh or arguments.unseen:
        models = unseen_programs.PROGRAMS if arguments.unseen else fresh_programs.PROGRAMS
        chosen = fresh_jobs(models, arguments.topology)
    for job in chosen:
        if re.search(arguments.only, name_of(job)):
            one = judged(job, MODULE, arguments.cache, codegen=arguments.cycles, again=arguments.again)
            rows.append((job, one))
            print(_row(job, one), flush=True)
    good = [(job, one) for job, one in rows if one.judgement is not None]
    summary = summarise(good)
    print(json.dumps(summary, indent=1))
    if arguments.json:
        print(json.dumps([{"job": job, "planned": one.planned, "judged": one.judgement and one.judgement.to_dict()} for job, one in rows]))
    within = summary["rank"] >= MIN_RANK and summary["bytes_within_10"] >= MIN_BYTES and summary["memory_worst"] <= MAX_MEMORY
    return 0 if within and len(good) == len(rows) else 1


def _row(job: Job, one: Judged) -> str:
    if one.judgement is None:
        return f"{name_of(job):<52} {one.error}"
    plan, judge = one.planned, one.judgement
    raw = sum(row["seconds"] for row in judge.traffic)
    exact = plan["exact_bytes"] / max(1, plan["planned_bytes"])
    return (
        f"{name_of(job):<52} {plan['total_s'] * 1e3:>9.3f} {judge.roofline_s * 1e3:>9.3f}    {plan['compute_s'] * 1e3:>8.3f} "
        f"{judge.roofline_compute_s * 1e3:>8.3f} {plan['communication_s'] * 1e3:>7.3f} {raw * 1e3:>7.3f} "
        f"{judge.roofline_exposed_s * 1e3:>8.3f} {exact:>6.2f} {plan['memory_bytes'] / 2**20:>6.0f} {judge.peak_bytes / 2**20:>6.0f}"
    )


def summarise(rows: Sequence[tuple[Job, Judged]]) -> dict[str, Any]:
    """Correlations over all plans and per model; shares of bytes; errors of memory."""

    def rank(chosen: Sequence[Judged], estimate: str) -> float:
        pairs = [(one.planned["total_s"], getattr(one.judgement, estimate)) for one in chosen]
        return rank_correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else 0.0

    everything = [one for _, one in rows]
    models = dict.fromkeys(job["model"] for job, _ in rows)
    per_model = {model: rank([one for job, one in rows if job["model"] == model], "roofline_s") for model in models}
    by_cycles = all(one.judgement and one.judgement.cycles_s for one in everything)
    total = sum(one.planned["planned_bytes"] + one.planned["unplanned_bytes"] for _, one in rows)
    errors = [one.planned["memory_bytes"] / one.judgement.peak_bytes - 1 for _, one in rows if one.judgement]
    return {
        "plans": len(rows),
        "rank": min(rank(everything, name) for name in ("roofline_s", *(["cycles_s"] if by_cycles else []))),
        "rank_per_model": per_model,
        "planned_over_judged": {model: _ratios([one for job, one in rows if job["model"] == model]) for model in models},
        "kinds_ms": _kinds(everything),
        "bytes_within_10": sum(one.planned["exact_bytes"] for _, one in rows) / max(1, total),
        "plans_with_bytes_within_10": sum(
            one.planned["exact_bytes"] >= MIN_BYTES * (one.planned["planned_bytes"] + one.planned["unplanned_bytes"]) for _, one in rows
        ),
        "memory_within_15": sum(abs(error) <= MAX_MEMORY for error in errors),
        "memory_median": statistics.median(map(abs, errors)) if errors else 0.0,
        "memory_bias": statistics.median(errors) if errors else 0.0,
        "memory_worst": max(map(abs, errors), default=0.0),
    }


def _ratios(rows: Sequence[Judged]) -> dict[str, float]:
    found = [one.planned["total_s"] / one.judgement.roofline_s for one in rows if one.judgement]
    return {"least": min(found), "median": statistics.median(found), "most": max(found)}


def _kinds(rows: Sequence[Judged]) -> dict[str, tuple[float, float]]:
    """Milliseconds of all plans by kind of op: planned and judged; those of collectives are what no compute hides."""
    own: dict[str, tuple[float, float]] = {}
    for kind in ORDER:
        planned = sum(one.planned["kinds"].get(kind, 0.0) for one in rows)
        judged = sum(one.planned["judged_kinds"].get(kind, 0.0) for one in rows)
        if kind == "collective":
            judged = sum(one.judgement.roofline_exposed_s for one in rows if one.judgement)
        own[kind] = round(planned * 1e3, 2), round(judged * 1e3, 2)
    return own


if __name__ == "__main__":
    sys.exit(main())
