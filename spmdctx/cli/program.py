"""The subject of a command, read from its arguments: the program, the devices, the context options and the strategies."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spmdctx.api import parallel
from spmdctx.cli.devices import expected_devices, start_devices
from spmdctx.cli.library import ready_strategy
from spmdctx.cli.output import Output, own_frames
from spmdctx.cli.parser.program import LEAST_BATCH_SIZE
from spmdctx.context.docs import options_from_arguments
from spmdctx.context.layers import ContextConfig, auto_parallel_context, load_config
from spmdctx.errors import ContextError, naming_file
from spmdctx.lowering.compile_only import gpu_devices, tpu_devices
from spmdctx.models import (
    UNSPLIT,
    Batch,
    DecoderConfig,
    Split,
    SplitKind,
    abstract_batch,
    abstract_program,
    create,
    preset,
    train_step,
)
from spmdctx.step.step import ParallelStep
from spmdctx.wording import counted

_TARGET_TOPOLOGIES = {"v5e": "tpu-v5e", "v5p": "tpu-v5p", "v6e": "tpu-v6e", "h100": "h100"}
_LARGE_MODEL = 10**9


@dataclass(frozen=True)
class Choice:
    """A command's arguments and configuration file, resolved.

    Attributes:
        options: context options.
        num_devices: of the mesh.
        split: strategies for the decoder.
        step_options: what `parallel` takes besides.
    """

    arguments: argparse.Namespace
    options: Mapping[str, Any]
    num_devices: int
    split: Split
    step_options: Mapping[str, Any]

    def context(self) -> Any:
        """Returns the context layer in which to plan and run."""
        return auto_parallel_context(**self.options)

    def parallel(self, fn: Callable[..., Any], **options: Any) -> ParallelStep[..., Any]:
        """Returns `fn` as a step with this command's options."""
        return fn if isinstance(fn, ParallelStep) else parallel(fn, **{**self.step_options, **options})

    def decoder(self) -> DecoderConfig:
        """Returns the decoder's sizes."""
        config, own = preset(self.arguments.model), self.arguments
        changes = {"num_layers": own.layers, "dtype": own.dtype, "scan_layers": own.scan_layers, "remat": own.remat}
        config = replace(config, **{name: value for name, value in changes.items() if value is not None})
        return replace(config, remat=config.num_parameters >= _LARGE_MODEL) if own.remat is None else config

    @property
    def seq(self) -> int:
        """Tokens per sequence."""
        return int(self.arguments.seq or self.decoder().max_seq)

    def batch(self) -> Batch:
        """Returns the shapes of the decoder's batch."""
        return abstract_batch(self.arguments.batch_size, self.seq)

    def program(self, *, concrete: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the step and its arguments; the decoder's are shapes unless they must be `concrete`."""
        if self.arguments.program:
            return _load(self.arguments.program)
        if not concrete:
            return abstract_program(self.decoder(), self.arguments.batch_size, self.seq, split=self.split)
        tokens = jax.random.randint(jax.random.key(0), (self.arguments.batch_size, self.seq), 0, self.decoder().vocab_size, jnp.int32)
        batch = {"inputs": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
        return train_step, (*nnx.jit(lambda: create(self.decoder(), split=self.split))(), batch)


def started(arguments: argparse.Namespace, output: Output) -> Choice:
    """Returns what `choose` reads, and starts the devices for a command that runs; in a job only process 0 writes the output."""
    choice = choose(arguments)
    start_devices(choice.num_devices)
    if jax.process_index():
        output.be_quiet()
    return choice if jax.default_backend() == "cpu" else choose(arguments, jax.device_count())


def choose(arguments: argparse.Namespace, all_devices: int | None = None) -> Choice:
    """Reads the arguments and the configuration file; the arguments win.

    Args:
        arguments: the arguments of the command.
        all_devices: the number of available devices; by default the expected number of CPU devices.

    Raises:
        ContextError: an option is bad, or the configuration file holds no configuration.
        PlanError: --strategy names no strategy.
        OSError: the configuration or the strategy cannot be read.
    """
    given = options_from_arguments(arguments)
    count = all_devices or expected_devices()
    with naming_file("--strategy", arguments.strategy, "the file cannot be read"):
        counts = given.get("device_num", count), given.get("pipeline_stages", 1)
        ready = ready_strategy(arguments.strategy, arguments, *counts) if arguments.strategy else None
    config = _read_config(arguments.config) if arguments.config else ContextConfig({}) if ready is None else ready.config
    options = {**config.options, **given}
    options.setdefault("parallel_mode", "auto_parallel")
    num_devices = options.setdefault("device_num", count)
    defaults = {"batch_size": _batch_size(num_devices), **({} if ready is None else ready.program)}
    arguments = _with_defaults(arguments, defaults)
    split = _split(arguments, config, options, num_devices) if ready is None else ready.split
    if split.kind == "pins" and not {"dataset_strategy", "full_batch"} & set(options):
        options["dataset_strategy"] = ((split.data, 1),) * 2
    memory_bytes = arguments.memory_bytes or (int(arguments.memory_gib * 2**30) if arguments.memory_gib else config.memory_bytes)
    step_options = {"topology": arguments.topology, "memory_bytes": memory_bytes, "strict": arguments.strict}
    return Choice(arguments, options, num_devices, split, {name: value for name, value in step_options.items() if value})


def _read_config(path: str) -> ContextConfig:
    with naming_file("--config", path, "the file cannot be read"):
        return load_config(path)


def _with_defaults(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> argparse.Namespace:
    """Returns the arguments, with `defaults` for those that are not given."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return argparse.Namespace(**{**vars(arguments), **defaults, **given})


def _batch_size(num_devices: int) -> int:
    return -(-LEAST_BATCH_SIZE // num_devices) * num_devices


def _split(arguments: argparse.Namespace, config: ContextConfig, options: Mapping[str, Any], num_devices: int) -> Split:
    kind: SplitKind = _default_split(options) if arguments.strategies == "auto" else arguments.strategies
    if kind == "none" or arguments.program:
        return UNSPLIT
    model = arguments.model_parallel or config.parallel_config.get("model_parallel") or (2 if num_devices % 2 == 0 else 1)
    if num_devices % model:
        raise ContextError("--model-parallel does not divide the devices.", got=f"{model} slices, {num_devices} devices")
    data = num_devices // model if arguments.model_parallel else config.parallel_config.get("data_parallel") or num_devices // model
    return Split(kind, data, model)


def _default_split(options: Mapping[str, Any]) -> SplitKind:
    """Returns the default strategies: propagation needs pins to start from, and a search does not."""
    if options["parallel_mode"] == "semi_auto_parallel":
        return "megatron"
    modes = (options.get("search_mode"), options.get("auto_parallel_search_mode"), options.get("sharding_propagation"))
    propagates = "sharding_propagation" in modes or True in modes
    return "pins" if options["parallel_mode"] == "auto_parallel" and propagates else "none"


def target_options(target: str) -> dict[str, Any]:
    """Returns the devices to compile for, and their topology, as options of a step.

    Raises:
        ContextError: the target is unknown.
        UnsupportedError: the target's compiler is not installed.
    """
    if target == "cpu":
        return {}
    kind, _, size = target.removeprefix("tpu-").removeprefix("gpu-").partition(":")
    if kind not in _TARGET_TOPOLOGIES or not size:
        raise ContextError(f"There is no target {target!r}.", need="cpu, tpu-v5e:2x4, tpu-v5p:2x2x2, tpu-v6e:2x4 or h100:8")
    if kind != "h100":
        return {"devices": tpu_devices(f"{kind}:{size}"), "topology": _TARGET_TOPOLOGIES[kind]}
    if not size.isdecimal():
        raise ContextError("A GPU target ends in the number of GPUs.", got=target, need="such as h100:8")
    return {"devices": gpu_devices(int(size)), "topology": "h100"}


def _load(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        fix = f"give the module's name: {Path(module_name).stem}:{function_name or 'program'}" if module_name.endswith(".py") else ""
        raise ContextError(f"--program {name!r} names no module.", need="MODULE:FUNCTION, in the current folder or installed", fix=fix)
    sys.path.insert(0, os.getcwd())
    try:
        program = getattr(importlib.import_module(module_name), function_name or "program")
    except (ImportError, AttributeError) as error:
        frames = own_frames(error.__traceback__)
        where = frames[0] if frames else ""
        raise ContextError(f"--program {name!r} cannot be loaded.", where=where, got=str(error), need="MODULE:FUNCTION") from error
    except (Exception, SystemExit) as error:
        raise _program_failed(name, "raised an error when it was imported", error) from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(program):
        raise ContextError(
            f"--program {name!r} is no function.", got=type(program).__name__, need="a function that returns (step, arguments)"
        )
    try:
        made = program()
    except (Exception, SystemExit) as error:
        raise _program_failed(name, "raised an error when it was called without arguments", error) from error
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple)):
        raise ContextError(f"--program {name!r} must return (step, arguments), where arguments is a tuple.", got=_parts(made))
    _check_arguments(name, *made)
    return made


def _check_arguments(name: str, step: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Raises a ContextError if the step does not take so many arguments; no line of a program says which call that would be."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a callable that does not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ContextError(
            f"--program {name!r} returns a step that does not take its arguments.",
            got=f"{counted(len(arguments), 'argument')}: {error}",
            need=f"arguments for step{signature}",
        ) from error


def _parts(made: Any) -> str:
    return f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__


def _program_failed(name: str, what: str, error: BaseException) -> ContextError:
    frames, text = own_frames(error.__traceback__), str(error).replace("\n", "\n         ")
    return ContextError(f"--program {name!r} {what}.", where=frames[0] if frames else "", got=f"{type(error).__name__}: {text}")
