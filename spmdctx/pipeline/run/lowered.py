"""The programs of a pipelined step, lowered and compiled one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import jax

T = TypeVar("T", bound=jax.stages.Lowered | jax.stages.Compiled)


class Kept(NamedTuple):
    """An operand that lies in memory as the program that makes it chooses: where it is among the operands, and among `maker`'s results."""

    operand: int
    maker: Lowerable
    result: int


@dataclass(frozen=True)
class Lowerable:
    """A jitted program, and the types in which a call passes its operands; `kept` are those whose layouts other programs choose."""

    run: jax.stages.Wrapped
    types: tuple[jax.ShapeDtypeStruct, ...]
    kept: tuple[Kept, ...] = ()

    def lower(self) -> jax.stages.Lowered:
        """Lowers the program, for which those that choose its operands' layouts are compiled; calls share what is compiled."""
        types = list(self.types)
        for operand, maker, result in self.kept:
            types[operand] = types[operand].update(sharding=maker.out_formats[result])
        return self.run.lower(*types)

    @cached_property
    def out_formats(self) -> Sequence[Any]:
        """The layout and sharding of each result, for which the program is compiled."""
        formats: Sequence[Any] = self.lower().compile().output_formats
        return formats


class _Programs(Mapping[str, T], Generic[T]):
    """Programs by name: `forward0` of chunk 0, `after1_0` of stage 0 in the second round after the loss."""

    def __init__(self, programs: Mapping[str, T]) -> None:
        self._programs: dict[str, T] = dict(programs)

    def __getitem__(self, name: str) -> T:
        return self._programs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    def __repr__(self) -> str:
        return f"<spmdctx.{type(self).__name__} {', '.join(self)}>"

    def cost_analysis(self) -> dict[str, Any]:
        """Returns what JAX says of each program's work, by name."""
        return {name: program.cost_analysis() for name, program in self.items()}


class LoweredPipeline(_Programs[jax.stages.Lowered]):
    """One `jax.stages.Lowered` for each stage and kind of task of a step, and for what runs around the loss.

    A mapping by names: `forward0` and `backward0` of chunk 0 (`input0` and `weight0` where the backward pass is in two parts), `before_0`
    of what the loss reads and the step computes, `after1_0` of stage 0 in the second round after the loss, `after1_all` of what all
    stages share by layers there. `begin0` divides the batch of chunk 0, and `end_0` joins what stage 0 has made of micro-batches.
    `layers_cut_0` takes stacked layers that stage 0 keeps and does not use so, and `layers_put_0` joins those that it uses.

    On TPU, programs of the forward pass are compiled while those of the backward pass are lowered, which read what they keep as it lies.
    """

    def as_text(self, dialect: str | None = None) -> str:
        """Returns the text of all programs, each under its name."""
        return _joined({name: program.as_text(dialect) for name, program in self.items()})

    def compile(self, compiler_options: dict[str, Any] | None = None) -> CompiledPipeline:
        """Compiles all programs, one after the other; calls share what is compiled without options."""
        return CompiledPipeline({name: program.compile(compiler_options) for name, program in self.items()})


class CompiledPipeline(_Programs[jax.stages.Compiled]):
    """One `jax.stages.Compiled` for each program of a pipelined step, by the names of `LoweredPipeline`."""

    def as_text(self) -> str:
        """Returns the text of all programs, each under its name."""
        return _joined({name: program.as_text() or "" for name, program in self.items()})

    def memory_analysis(self) -> dict[str, Any]:
        """Returns what the compiler says of each program's memory on one device, by name."""
        return {name: program.memory_analysis() for name, program in self.items()}


def _joined(texts: Mapping[str, str]) -> str:
    return "\n".join(f"// {name}\n{text}" for name, text in texts.items())
