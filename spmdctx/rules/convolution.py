"""Rules of convolutions: batch and output features pass through, input features reduce, spatial dimensions stay whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdctx.ir.rule import DimFactors, FactorKind, OpRule
from spmdctx.rules.builder import RuleBuilder, Shape
from spmdctx.rules.registry import rule


@rule("conv_general_dilated")
def conv_general_dilated(operands: tuple[Shape, ...], results: tuple[Shape, ...], params: Mapping[str, Any]) -> OpRule:
    """Makes feature groups the major factor of both features, and batch groups that of the batch and of the output features."""
    lhs, rhs = operands
    numbers = params["dimension_numbers"]
    (lhs_batch, lhs_feature, *lhs_space) = numbers.lhs_spec
    rhs_out, rhs_in = numbers.rhs_spec[:2]
    (out_batch, out_feature, *out_space) = numbers.out_spec
    builder = RuleBuilder()
    batch_groups, feature_groups = params["batch_group_count"], params["feature_group_count"]
    batch = builder.factor(lhs[lhs_batch] // batch_groups)
    groups = builder.factor(max(batch_groups, feature_groups))
    features_in = builder.factor(rhs[rhs_in], FactorKind.REDUCTION)
    features_out = builder.factor(rhs[rhs_out] // max(batch_groups, feature_groups))

    lhs_dims: list[DimFactors] = [()] * len(lhs)
    rhs_dims: list[DimFactors] = [()] * len(rhs)
    out_dims: list[DimFactors] = [()] * len(results[0])
    lhs_dims[lhs_batch] = (groups if batch_groups > 1 else ()) + batch
    lhs_dims[lhs_feature] = (groups if feature_groups > 1 else ()) + features_in
    rhs_dims[rhs_out] = groups + features_out
    rhs_dims[rhs_in] = features_in
    out_dims[out_batch] = batch
    out_dims[out_feature] = groups + features_out
    for left, out in zip(lhs_space, out_space, strict=True):
        if lhs[left] == results[0][out]:
            lhs_dims[left] = out_dims[out] = builder.factor(lhs[left], FactorKind.PERMUTATION)
    return builder.build([lhs_dims, rhs_dims], [out_dims])
