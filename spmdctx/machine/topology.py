"""Describes a machine: its peak rates, memory and links, the source of each figure, and how its compiler behaves."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import InitVar, dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from numbers import Integral, Real
from typing import Any

from spmdctx.errors import ContextError, message, shown
from spmdctx.wording.files import read_file
from spmdctx.wording.text_data import MOST_YAML_BYTES, read_yaml_text


class Interconnect(StrEnum):
    """The wiring of the devices of one fast domain."""

    SWITCH = "switch"
    TORUS = "torus"


@dataclass(frozen=True, slots=True)
class Compiler:
    """The behavior of a backend's compiler, as far as prices and programs depend on it (see `machine.xla`).

    The values of the known backends are in `machine.presets`. `Topology.compiler` is the compiler of a machine.

    Attributes:
        version: The compiler and the version that these values were measured with.
        merges_partial_sums: Adds partial results before it reduces them, so that a sum of unreduced values costs one
            all_reduce. Reduce-scatters a sum if every device keeps only its slice.
        scatters_over_all: Reduce-scatters over all devices of any slice. If False, it does so only over some slices
            (`torus.scatters_over_slice`), and all-reduces and slices over the others.
        scatters_strictly: Reduce-scatters only certain blocks, and axes in one order (see `machine.xla.reductions`).
        sinks_slices: Reduce-scatters a sum also if element-wise ops stand between the sum and the slice.
        narrows_matrix_operands: Communicates float32 values that only matrix products read as bfloat16, the products' own precision.
        fuses_into_products: Computes element-wise operands of a matrix product inside the product, and never in memory.
        runs_barriers_in_order: Runs ops behind an optimization barrier after those before it.
        scratch_bytes: Memory on the chip in which it keeps small, short-lived tensors.
        gather_overlap: The largest share of a weight gather's time that it hides behind matrix products.
        reduction_overlap: The largest share of a gradient reduction's time that it hides so.
        combines_reductions: Makes one collective of many reductions of gradients, so that none pays a latency of its own.
        keeps_barriers: Keeps optimization barriers until it has combined collectives. A topology has no such field: the name of its
            device tells.
    """

    version: str = "user"
    merges_partial_sums: bool = True
    scatters_over_all: bool = True
    scatters_strictly: bool = False
    sinks_slices: bool = False
    narrows_matrix_operands: bool = False
    fuses_into_products: bool = False
    runs_barriers_in_order: bool = False
    scratch_bytes: int = 0
    gather_overlap: float = 0.0
    reduction_overlap: float = 0.0
    combines_reductions: bool = True
    keeps_barriers: bool = True

    @property
    def _is_of_gpu(self) -> bool:
        return self.keeps_barriers and not self.runs_barriers_in_order

    @property
    def merges_inlined(self) -> bool:
        """Merges equal ops of different calls before it partitions them (`machine.xla.collectives.inlining`)."""
        return self.runs_barriers_in_order

    @property
    def delays_gradients(self) -> bool:
        """Makes the gradients of weights last on several devices, but for barriers behind recomputed regions.

        `machine.xla.memory` tells of that in `late_gradients`, of other late products in `late_branches`, and of loops in `loop_copies`.
        """
        return self._is_of_gpu

    @property
    def fuses_rows(self) -> bool:
        """Fuses the reduction of a row with what reads both, and writes the result beside the row (`machine.xla.memory.row_fusions`).

        It also writes results beside what a library made (`library_results`).
        """
        return self._is_of_gpu

    @property
    def masks_groups(self) -> bool:
        """Has no kernel for ragged products: JAX masks all rows for each group (`machine.xla.partitioner.ragged_products`)."""
        return not self.runs_barriers_in_order

    @property
    def turns_gathers(self) -> bool:
        """Turns what a program returns if it was gathered along an inner dimension (`machine.xla.collectives.turning`)."""
        return self._is_of_gpu


_BEHAVIOR = tuple(field.name for field in dataclasses.fields(Compiler) if field.name not in ("version", "keeps_barriers"))


@dataclass(frozen=True, slots=True)
class Preferences:
    """The user's preferences for the communication of a step.

    Attributes:
        allows_all_to_all: Reshards may be all_to_alls; if not, a tensor is gathered and sliced (`enable_alltoall`).
        widens_gradients: Low-precision gradients are reduced in float32 (`gradient_fp32_sync`).
    """

    allows_all_to_all: bool = True
    widens_gradients: bool = False


NO_PREFERENCES = Preferences()
"""The preferences of a topology by itself."""


@dataclass(frozen=True)
class Topology:
    """One kind of device and the wires between its copies.

    Attributes:
        device: The name that plans show.
        peak_flops_per_s: Dense bf16 (CPU: float32) peak of one device.
        memory_bytes: Memory of one device that a program may use.
        memory_bytes_per_s: Bandwidth of that memory.
        latency_s: Time of one hop, or of one step of an algorithm, inside a fast domain.
        link_bytes_per_s: One link, one direction. A switched device has one link; a torus has two per direction of it.
        devices_per_host: Devices of one fast domain: the GPUs of an NVLink host, the chips of a TPU slice.
        network_bytes_per_s: Per device, one direction, between fast domains.
        network_latency_s: Time of one step between fast domains.
        interconnect: The wiring of the fast domain.
        torus_dims: Directions of the torus; 1 for a switch.
        ring_side: A direction of the torus closes into a ring where the slice's side is a multiple of this.
        merges_partial_sums: See `Compiler`, as for the six below. XLA does so on TPU and GPU, not on CPU.
        scatters_over_all: XLA does so on GPU and CPU.
        scatters_strictly: XLA does so on TPU.
        sinks_slices: XLA does so on TPU.
        narrows_matrix_operands: XLA does so on TPU.
        fuses_into_products: XLA does so on TPU; on GPU and CPU what a product reads is in memory.
        runs_barriers_in_order: XLA does so on TPU; for GPU and CPU it is not known.
        vector_flops_per_s: Arithmetic outside of matrix products; `peak_flops_per_s` where it is 0.
        float32_flops_per_s: Matrix products of float32 at JAX's default precision; `peak_flops_per_s` where it is 0.
        matrix_tile: Side of the matrix unit: dimensions of a product are padded to multiples of it.
        kernel_s: Seconds that every fusion takes besides its work.
        gathered_share: The part of the memory's bandwidth that reductions, gathers and scatters reach, above 0 to 1.
        unaligned_share: The part that products reach whose rows are no multiple of 16 bytes, above 0 to 1.
        scratch_bytes: See `Compiler`, as for the three below. It differs between chips.
        gather_overlap: A share, from 0 to 1.
        reduction_overlap: A share, from 0 to 1.
        combines_reductions: XLA does so on TPU and GPU.
        source: Where the figures were published.
        compiler_version: The compiler and the version that its behavior was measured with.
    """

    device: str
    peak_flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    latency_s: float
    link_bytes_per_s: float
    devices_per_host: int
    network_bytes_per_s: float
    network_latency_s: float
    interconnect: Interconnect = Interconnect.SWITCH
    torus_dims: int = 1
    ring_side: int = 1
    merges_partial_sums: bool = True
    scatters_over_all: bool = True
    scatters_strictly: bool = False
    sinks_slices: bool = False
    narrows_matrix_operands: bool = False
    fuses_into_products: bool = False
    runs_barriers_in_order: bool = False
    vector_flops_per_s: float = 0.0
    float32_flops_per_s: float = 0.0
    matrix_tile: int = 1
    kernel_s: float = 0.0
    gathered_share: float = 1.0
    unaligned_share: float = 1.0
    scratch_bytes: int = 0
    gather_overlap: float = 0.0
    reduction_overlap: float = 0.0
    combines_reductions: bool = True
    source: str = "user"
    compiler_version: InitVar[str] = "user"

    def __hash__(self) -> int:
        # Prices are kept by machine: few fields tell nearly all machines apart.
        return hash((self.device, self.peak_flops_per_s, self.latency_s))

    def __post_init__(self, compiler_version: str) -> None:
        # No field: neither files nor comparisons have it. `replace` reads it here.
        object.__setattr__(self, "compiler_version", compiler_version)
        for name, field in _FIELDS.items():
            _check_field(name, str(field.type), getattr(self, name))
        for name in ("vector_flops_per_s", "float32_flops_per_s"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.peak_flops_per_s)

    @cached_property
    def compiler(self) -> Compiler:
        """The compiler of this machine."""
        behavior = {name: getattr(self, name) for name in _BEHAVIOR}
        return Compiler(vars(self)["compiler_version"], **behavior, keeps_barriers=self.device != "cpu")

    @property
    def preferences(self) -> Preferences:
        """The preferences of the user whose step is planned."""
        return NO_PREFERENCES


@dataclass(frozen=True)
class Machine(Topology):
    """A topology with the preferences of a step's context."""

    preferences: Preferences = NO_PREFERENCES

    __hash__ = Topology.__hash__


@lru_cache(maxsize=64)
def as_asked(machine: Topology, preferences: Preferences) -> Topology:
    """Returns the machine with the preferences of a context."""
    if machine.preferences == preferences:
        return machine
    own = {name: getattr(machine, name) for name in (*_FIELDS, "compiler_version")}
    return Machine(**own, preferences=preferences)


@lru_cache(maxsize=64)
def without_latency(machine: Topology) -> Topology:
    """Returns the machine by which collectives are priced that XLA combines with others: it has no latency."""
    return replace(machine, latency_s=0.0, network_latency_s=0.0)


_FIELDS = {field.name: field for field in dataclasses.fields(Topology)}

_POSITIVE = (
    "peak_flops_per_s",
    "memory_bytes",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "devices_per_host",
    "network_bytes_per_s",
    "torus_dims",
    "ring_side",
    "matrix_tile",
    "gathered_share",
    "unaligned_share",
)
_SHARES = ("gather_overlap", "reduction_overlap", "gathered_share", "unaligned_share")
_LEAST, _MOST = 1e-30, 1e30
"""Between these, sums and quotients of a topology's figures stay finite."""
_TYPES_OF_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a string"),
    "bool": ((bool,), "True or False"),
    "int": ((Integral,), "an int"),  # NumPy's too
    "float": ((Real,), "a number"),
    "Interconnect": ((Interconnect,), "an Interconnect"),
}


def _check_field(name: str, kind: str, value: Any) -> None:
    """Refuses a value that no topology has."""
    types, need = _TYPES_OF_FIELDS[kind]
    fits = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
    if not fits:
        raise TypeError(message(f"Topology.{name} does not take values of type {type(value).__name__}.", got=shown(value), need=need))
    if kind not in ("int", "float"):
        return
    if name in _SHARES and not 0 <= value <= 1:
        raise ContextError(f"Topology.{name} must be a share, from 0 to 1.", got=shown(value))
    if name in _POSITIVE and not value > 0:
        raise ContextError(f"Topology.{name} must be positive.", got=shown(value))
    if value and not _LEAST <= value <= _MOST:
        raise ContextError(f"Topology.{name} is out of range.", got=shown(value), need=f"0, or a number from {_LEAST:g} to {_MOST:g}")


_RETIRED = ("uses_all_to_all", "widens_gradients")
"""Fields that files of older versions may have; now the context alone decides on them."""

FILE_SUFFIXES = (".json", ".yaml", ".yml")


def read_topology(path: str | os.PathLike[str]) -> Topology:
    """Reads a Topology from a JSON or YAML file.

    Raises:
        ContextError: The file is damaged, has other fields, or fields of wrong types.
        OSError: The file cannot be read.
    """
    where = os.fspath(path)
    try:
        content = read_yaml_text(read_file(where, MOST_YAML_BYTES))  # JSON is YAML
    except ValueError as error:
        raise ContextError("The topology file is neither JSON nor YAML.", where=where, got=str(error)) from None
    if not isinstance(content, dict) or not set(content) <= {*_FIELDS, *_RETIRED}:
        got = shown(sorted(map(str, set(content) - {*_FIELDS, *_RETIRED}))) if isinstance(content, dict) else type(content).__name__
        raise ContextError("The file holds no topology.", where=where, got=got, need=", ".join(_FIELDS))
    missing = [name for name, field in _FIELDS.items() if field.default is dataclasses.MISSING and name not in content]
    if missing:
        raise ContextError("The topology file lacks fields.", where=where, need=", ".join(missing))
    try:
        values = {name: _field_value(_FIELDS[name].type if name in _FIELDS else "bool", value) for name, value in content.items()}
        return Topology(**{name: value for name, value in values.items() if name in _FIELDS})
    except (TypeError, ValueError) as error:
        if isinstance(error, ContextError):
            error.add_note(f"  in {where}")
            raise
        raise ContextError("The topology file has a field of a wrong type.", where=where, got=str(error)) from error


def _field_value(kind: object, value: Any) -> Any:
    """Returns the value of a field in the type of its annotation; YAML reads 1e9 as text."""
    if kind in ("float", "int"):
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError(f"{shown(value)} is no number")
        number = float(value) if isinstance(value, str) else value
        if kind == "float":
            return float(number) if abs(number) <= _MOST else math.inf  # an int may be too large for a float
        if isinstance(number, float) and not number.is_integer():
            raise ValueError(f"{shown(value)} is no whole number")
        return int(number)
    if kind == "bool" and not isinstance(value, bool):
        raise TypeError(f"{shown(value)} is not true or false")
    if kind == "str" and not isinstance(value, str):
        raise TypeError(f"{shown(value)} is no text")
    return Interconnect(value) if kind == "Interconnect" else value


def topology_text(found: Topology, *, as_json: bool = False) -> str:
    """Returns the topology as YAML or JSON, in the form that `read_topology` reads."""
    fields = {name: getattr(found, name) for name in _FIELDS}
    fields["interconnect"] = found.interconnect.value
    if as_json:
        return json.dumps(fields, indent=2) + "\n"
    import yaml

    text: str = yaml.safe_dump(fields, sort_keys=False)
    return text
