"""Graphs written by hand, without JAX."""

from spmdctx.ir.graph import LITERAL, Graph, Op, Origin, Role, Value


class GraphMaker:
    """Collects values and ops; each method returns the new value's id."""

    def __init__(self):
        self.values, self.ops, self.inputs = [], [], []

    def input(self, *shape, role=Role.ARGUMENT, path="", dtype="float32"):
        value = self._value(shape, role, path or f"leaf{len(self.inputs)}", dtype)
        self.inputs.append(value)
        return value

    def op(self, primitive, rule, *operands, shape, repeats=1, dtype="float32"):
        result = self._value(shape, Role.INTERMEDIATE, "", dtype)
        self.ops.append(Op(len(self.ops), primitive, operands, (result,), rule, 0, repeats))
        return result

    def graph(self, *outputs, ties=()):
        origins = [Origin(op.primitive, f"made.py:{op.id}") for op in self.ops]
        return Graph(tuple(self.values), tuple(self.ops), tuple(self.inputs), outputs, tuple(ties), origins, "made")

    def _value(self, shape, role, path, dtype):
        self.values.append(Value(len(self.values), shape, dtype, role, path))
        return len(self.values) - 1


__all__ = ["LITERAL", "GraphMaker"]
