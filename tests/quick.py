"""Flags by which XLA compiles for the tests."""

# LLVM's optimisation, and code of fusions by way of MLIR, take longer than the small programs of the tests run.
# The collectives stay, and the buffers to within some hundred bytes.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
