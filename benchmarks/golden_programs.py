"""The programs of the golden record, each a name and a function that returns the texts to be kept.

Uses the public API and the zoo alone, so that the same file runs over older trees.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdctx
from benchmarks.judge_models import ZOO, zoo_program
from spmdctx.models import UNSPLIT, DecoderConfig, Split, abstract_program, pure_step
from tests.zoo import CASES, LARGE
from tests.zoo import UNSPLIT as WHOLE
from tests.zoo.matrix import SEARCHES, Cell, step_of

Texts = dict[str, str]
Entry = tuple[str, Callable[[], Texts]]

MACHINES = ("tpu-v5e", "tpu-v5p", "h100", "cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "width": 512,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 8,
    "hidden": 1408,
    "max_seq": 256,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "level1": {"parallel_mode": "data_parallel", "enable_parallel_optimizer": True},
    "level3": {
        "parallel_mode": "auto_parallel",
        "enable_parallel_optimizer": True,
        "parallel_optimizer_config": {"optimizer_level": "level3", "parallel_optimizer_threshold": 0},
    },
    "buckets": {"parallel_mode": "data_parallel", "all_reduce_fusion_config": [3, 10]},
    "buckets-searched": {"parallel_mode": "auto_parallel", "all_reduce_fusion_config": [3, 10]},
    "micro": {"parallel_mode": "data_parallel", "grad_accumulation_step": 4},
    "micro-searched": {
        "parallel_mode": "auto_parallel",
        "grad_accumulation_step": 2,
        "enable_parallel_optimizer": True,
        "gradient_fp32_sync": False,
    },
    "no-all-to-all": {"parallel_mode": "auto_parallel", "enable_alltoall": False},
    "full-batch": {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "full_batch": True},
    "sizes": {"parallel_mode": "auto_parallel", "comm_fusion": {"allreduce": {"mode": "size", "config": 1}}},
}


def entries() -> Iterator[Entry]:
    """Everything that the record holds."""
    yield from _cells()
    yield from _large()
    yield from _decoders()
    yield from _options()
    yield from _compiled()
    yield ("errors", _errors)


def _shown(step: Any, args: tuple[Any, ...], *, full: bool = False) -> Texts:
    """A plan as its file and as its text; `full` adds what explains it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            plan = step.plan(*args)
        except spmdctx.SpmdctxError as error:
            return {"error.txt": f"{type(error).__name__}: {error}\n"}
    texts = {"plan.json": _file(plan), "plan.txt": str(plan), "warnings.txt": "\n".join(str(one.message) for one in caught)}
    if full:
        texts["explain.txt"] = "\n\n".join(str(plan.explain(leaf.path)) for leaf in plan.inputs[:3])
        texts["page.html"] = plan._repr_html_()
    return {name: _untimed(text) for name, text in texts.items()}


def _untimed(text: str) -> str:
    """A text without the seconds that a search took."""
    return re.sub(r"\b(traced|searched)( in)? [\d.]+ m?s", r"\1", text)


def _file(plan: Any) -> str:
    path = os.path.join(os.environ["SPMDCTX_GOLDEN_SCRATCH"], f"plan-{os.getpid()}.json")
    plan.save(path)
    with open(path) as file:
        return file.read()


def _lowered(step: Any, args: tuple[Any, ...]) -> Texts:
    """The StableHLO of a step, sharding constraints and barriers included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"stablehlo.txt": step.lower(*args).as_text()}


def _compiled_text(step: Any, args: tuple[Any, ...]) -> Texts:
    """The compiled program, without what says where in the source an op comes from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled, report = step.lower(*args).compile(), step.audit(*args)
    return {"compiled.txt": without_places(compiled.as_text()), "audit.txt": str(report)}


def without_places(text: str) -> str:
    """A compiled program without what says where in the source its ops come from."""
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    # Tables of source places stand at the end, or before the computations.
    return re.sub(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "", text, flags=re.M)


def _cells() -> Iterator[Entry]:
    """The zoo in its natural flavours by every mode and search on eight devices, as the matrix plans it, and on three machines."""
    for one in CASES:
        if one.name == "resnet50":
            continue
        for mode, search in (("data_parallel", ""), ("semi_auto_parallel", ""), *(("auto_parallel", search) for search in SEARCHES)):
            if one.flavor != "pytree" and search != "dynamic_programming":
                continue
            for machine in MACHINES if search == "dynamic_programming" else MACHINES[:1]:
                cell = Cell(one.name, one.flavor, mode, search, 8)  # type: ignore[arg-type]  # modes are read from a table
                yield f"cells/{cell}/{machine}".replace(":", "-"), lambda cell=cell, machine=machine: _cell(cell, machine)


def _cell(cell: Cell, machine: str) -> Texts:
    with jax.enable_x64(True), step_of(cell, machine) as (step, args):
        texts = _shown(step, args, full=machine == "tpu-v5e" and bool(cell.search) and cell.flavor == "pytree")
        if machine == "cpu" or not cell.search:
            texts |= _lowered(step, args)
    return texts


def _large() -> Iterator[Entry]:
    """Models at sizes that keep a chip busy: lowered for TPU, whose compiler is told most, and planned within budgets."""
    for model in ZOO:
        for mode, search in (("data_parallel", ""), ("auto_parallel", "dynamic_programming"), ("auto_parallel", "recursive_programming")):
            yield f"large/{model}-{mode}-{search}", lambda model=model, mode=mode, search=search: _on_tpu(model, mode, search)
    for name in LARGE:
        yield f"large/{name}-published", lambda name=name: _published(name)


def _on_tpu(model: str, mode: str, search: str) -> Texts:
    fn, args = zoo_program(model, WHOLE)
    options: dict[str, Any] = {"parallel_mode": mode, "topology": "tpu-v5e", "devices": _tpu()}
    if search:
        options["search_mode"] = search
    step = spmdctx.parallel(fn, **options)
    texts = _shown(step, args, full=bool(search)) | _lowered(step, args)
    if search == "dynamic_programming":
        budget = int(step.plan(*args).cost.memory_bytes * 0.8)
        within = _shown(spmdctx.parallel(fn, memory_bytes=budget, **options), args)
        texts |= {f"budget-{name}": text for name, text in within.items()}
    return texts


def _published(name: str) -> Texts:
    fn, args = LARGE[name](WHOLE, jnp.bfloat16)
    return _shown(spmdctx.parallel(fn, parallel_mode="auto_parallel", device_num=64, topology="tpu-v5p"), args)


def _decoders() -> Iterator[Entry]:
    """Decoders by strategies, pins and searches, scanned or not, lowered for TPU; one compiled for it."""
    for scan in (False, True):
        for split, options in (
            ("none", {"parallel_mode": "data_parallel"}),
            ("megatron", {"parallel_mode": "semi_auto_parallel", "mesh": {"data": 2, "model": 4}}),
            ("pins", {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "mesh": {"data": 2, "model": 4}}),
            ("none", {"parallel_mode": "auto_parallel", "search_mode": "recursive_programming"}),
            ("none", {"parallel_mode": "auto_parallel", "search_mode": "dynamic_programming"}),
        ):
            name = f"decoders/{'scanned-' if scan else ''}{split}-{options['parallel_mode']}-{options.get('search_mode', '')}"
            yield name, lambda scan=scan, split=split, options=options: _decoder(scan, split, options)


def _decoder(scan: bool, split: str, options: dict[str, Any]) -> Texts:
    config = DecoderConfig(**SIZES, scan_layers=scan, remat=True, dtype="bfloat16")
    made = UNSPLIT if split == "none" else Split(split, 2, 4)  # type: ignore[arg-type]  # kinds are read from a table
    _, (model, optimizer, inputs) = abstract_program(config, 16, split=made)
    fn, state = pure_step(model, optimizer)
    args = (state, inputs)
    texts: Texts = {}
    for machine in ("tpu-v5e", "h100"):
        planned = _shown(spmdctx.parallel(fn, topology=machine, **{"device_num": 8, **options}), args, full=machine == "h100")
        texts |= {f"{machine}-{name}": text for name, text in planned.items()}
    step = spmdctx.parallel(fn, topology="tpu-v5e", devices=_tpu(), **options)
    texts |= _lowered(step, args)
    if split != "none" and not scan:
        texts |= _compiled_text(step, args)
    return texts


def _options() -> Iterator[Entry]:
    """Options that act on gradients, the optimizer and the compiler."""
    for name, options in OPTIONS.items():
        yield f"options/{name}", lambda options=options: _option(options)


def _small_program() -> tuple[Any, tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    shapes = {"up": (16, 64), "down": (64, 16), "bias": (16,), "out": (16, 16)}
    params = {key: jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for key, shape in shapes.items()}
    tx = optax.adamw(1e-3)

    def loss(params: Any, x: Any, y: Any) -> Any:
        up = spmdctx.shard(jnp.tanh, (None,), fusion=1)(x @ params["up"])
        return jnp.mean(((up @ params["down"] + params["bias"]) @ params["out"] - y) ** 2)

    def train(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients = spmdctx.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    batch = [jnp.asarray(rng.normal(size=(32, 16)), jnp.bfloat16) for _ in range(2)]
    return train, (params, tx.init(params), *batch)


def _option(options: dict[str, Any]) -> Texts:
    fn, args = _small_program()
    texts = _shown(spmdctx.parallel(fn, topology="tpu-v5e", device_num=8, **options), args, full=True)
    for key, devices, machine in (("cpu", jax.devices(), "cpu"), ("tpu", _tpu(), "tpu-v5e")):
        step = spmdctx.parallel(fn, devices=devices, topology=machine, **options)
        made = _lowered(step, args) | _compiled_text(step, args)
        texts |= {f"{key}-{name}": text for name, text in made.items()}
    return texts


def _compiled() -> Iterator[Entry]:
    """Compiled CPU programs of three modes."""
    for model in ("mlp", "transformer", "moe", "lstm", "ssm"):
        for mode, search in (("data_parallel", ""), ("semi_auto_parallel", ""), ("auto_parallel", "dynamic_programming")):
            cell = Cell(model, "pytree", mode, search, 8)  # type: ignore[arg-type]  # modes are read from a table
            yield f"compiled/{cell}".replace(":", "-"), lambda cell=cell: _compiled_cell(cell)


def _compiled_cell(cell: Cell) -> Texts:
    with jax.enable_x64(True), step_of(cell, "cpu") as (step, args):
        return _compiled_text(step, args)


def _tpu() -> list[Any]:
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)


def _errors() -> Texts:
    """What bad input is answered."""
    said = [f"## {name}\n{_said(attempt)}" for name, attempt in _attempts().items()]
    return {"errors.txt": "\n\n".join(said) + "\n"}


def _said(attempt: Callable[[], object]) -> str:
    spmdctx.reset_auto_parallel_context()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attempt()
            answer = "no error"
        except Exception as error:  # whatever is raised is what is recorded
            answer = f"{type(error).__name__}: {error}"
    spmdctx.reset_auto_parallel_context()
    return "\n".join([answer, *(f"{one.category.__name__}: {one.message}" for one in caught)])


def _attempts() -> dict[str, Callable[[], object]]:
    fn, args = _small_program()
    config = DecoderConfig(**SIZES, dtype="bfloat16")
    decoder, big = abstract_program(config, 16)

    def plan(**options: Any) -> Callable[[], object]:
        return lambda: spmdctx.plan(fn, *args, **{"device_num": 8, "topology": "tpu-v5e", **options})

    def context(**options: Any) -> Callable[[], object]:
        return lambda: spmdctx.set_auto_parallel_context(**options)

    def shard(strategy: Any, **options: Any) -> Callable[[], object]:
        def product(x: Any, y: Any) -> Any:
            return spmdctx.shard(jnp.matmul, in_strategy=strategy, **options)(x, y).sum()

        both = jnp.ones((8, 10)), jnp.ones((10, 64))
        return lambda: spmdctx.plan(product, *both, device_num=6, topology="cpu", parallel_mode="semi_auto_parallel")

    def budget(search: str, share: int) -> Callable[[], object]:
        return lambda: spmdctx.plan(
            decoder, *big, device_num=8, topology="tpu-v5e", parallel_mode="auto_parallel", search_mode=search, memory_bytes=share
        )

    return {
        "an option that is none": context(device_number=8),
        "a mode that is none": context(parallel_mode="auto"),
        "a count that is none": context(device_num=True),
        "a threshold of zero": context(comm_fusion={"allreduce": {"mode": "size", "config": 0}}),
        "an option of a later version": context(group_ckpt_save_file="groups.json"),
        "two options that contradict": plan(parallel_mode="data_parallel", full_batch=True),
        "too many replicas": plan(parallel_mode="data_parallel", device_num=64),
        "a batch that does not divide": plan(parallel_mode="data_parallel", device_num=5),
        "a dataset strategy that does not fit": plan(parallel_mode="auto_parallel", dataset_strategy=((3, 1), (3, 1))),
        "a dataset strategy of one leaf": plan(parallel_mode="semi_auto_parallel", dataset_strategy=((2, 1),)),
        "an unused option": plan(parallel_mode="stand_alone", device_num=1, gradients_mean=True, search_mode="dynamic_programming"),
        "a machine that is none": plan(topology="tpu-v9"),
        "a strategy that does not divide": shard(((2, 3), (3, 1))),
        "a strategy of other rank": shard(((2, 3, 1), (3, 1))),
        "a strategy of other operands": shard(((2, 3),)),
        "a strategy that contradicts": shard(((2, 2), (3, 1))),
        "a strategy of too many devices": shard(((8, 1), (1, 8))),
        "an output strategy that does not fit": shard(((2, 1), (1, 1)), out_strategy=((5, 1),)),
        "a budget that cannot be met": budget("dynamic_programming", 9_000_000),
        "a budget that is nearly met": budget("dynamic_programming", 60_000_000),
        "a budget that rounds cannot meet": budget("recursive_programming", 9_000_000),
        "a budget that propagation ignores": budget("sharding_propagation", 9_000_000),
        "a plan that is no plan": lambda: spmdctx.Plan.load(os.devnull),
        "too few devices": lambda: spmdctx.parallel(fn, device_num=16)(*args),
    }
