"""The limits of `set_algo_parameters`: predicates on candidate OpShardings that all searches share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spmdctx.context.state import AlgoParameters
from spmdctx.ir.graph import Op
from spmdctx.ir.mesh import LogicalMesh
from spmdctx.ir.primitives import CONTRACTIONS
from spmdctx.ir.projection import FactorAxes, project
from spmdctx.ir.rule import FactorKind, OpRule
from spmdctx.ir.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class AlgoLimits:
    """Restrictions of a search.

    Attributes:
        fully_use_devices: each op is split over all devices or over none.
        elementwise_follow: an element-wise op takes the stored sharding of one of its operands.
        slice_multiple: a dimension of a matrix product's operand may be split only into slices that are a multiple of it.
        tolerance: part of the predicted time that a search may leave on the table.
    """

    fully_use_devices: bool = False
    elementwise_follow: bool = False
    slice_multiple: int = 1
    tolerance: float = 0.0

    @classmethod
    def of(cls, algo: AlgoParameters) -> AlgoLimits:
        """Reads the limits from the parameters of the context; fully_use_devices counts only if the user set it."""
        return cls(
            fully_use_devices=algo.fully_use_devices and "fully_use_devices" in algo.explicit,
            elementwise_follow=algo.elementwise_op_strategy_follow,
            slice_multiple=algo.tensor_slice_align_size if algo.tensor_slice_align_enable else 1,
            tolerance=algo.algo_approxi_epsilon if algo.enable_algo_approxi else 0.0,
        )

    @property
    def restricts(self) -> bool:
        """Returns whether any candidate can be refused."""
        return self.fully_use_devices or self.elementwise_follow or self.slice_multiple > 1

    def allows(self, op: Op, axes: FactorAxes, mesh: LogicalMesh, stored: Sequence[TensorSharding] | None = None) -> bool:
        """Returns whether a candidate may be used.

        Args:
            op: the op.
            axes: the candidate: axes per factor of its rule.
            mesh: the mesh.
            stored: the shardings in which the operands are stored, `()` for literals; without them nothing must be followed.
        """
        if self.fully_use_devices and mesh.num_slices(name for own in axes for name in own) not in (1, mesh.num_devices):
            return False
        if self.slice_multiple > 1 and op.primitive in CONTRACTIONS and not self._is_aligned(op.rule, axes, mesh):
            return False
        return not self.elementwise_follow or stored is None or _follows(op.rule, axes, stored)

    def _is_aligned(self, rule: OpRule, axes: FactorAxes, mesh: LogicalMesh) -> bool:
        for dims in rule.operands:
            for factors, names in zip(dims, project(dims, axes), strict=True):
                size = 1
                for factor in factors:
                    size *= rule.sizes[factor]
                if names and size // mesh.num_slices(names) % self.slice_multiple:
                    return False
        return True


def is_elementwise(rule: OpRule) -> bool:
    """Returns whether each element of the results depends on one element of each operand, which may broadcast."""
    full = rule.results[0] if rule.results else ()
    if any(kind is not FactorKind.PASS_THROUGH for kind in rule.kinds) or any(dims != full for dims in rule.results):
        return False
    return all(
        not dims or (len(dims) == len(full) and all(own in ((), other) for own, other in zip(dims, full, strict=True)))
        for dims in rule.operands
    )


def _follows(rule: OpRule, axes: FactorAxes, stored: Sequence[TensorSharding]) -> bool:
    if not is_elementwise(rule):
        return True
    leaders = [(dims, own) for dims, own in zip(rule.operands, stored, strict=False) if dims and dims == rule.results[0]]
    return not leaders or any(project(dims, axes) == own for dims, own in leaders)
