"""Flags by which XLA compiles for the tests."""

from importlib.metadata import version

# LLVM's optimisation takes longer than the small programs of the tests run.
# The collectives stay, and the buffers to within some hundred bytes.
# In one part, a small program is compiled in three quarters of the time.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"

# So does code of fusions by way of MLIR. XLA ends a process for a flag that it does not know: jaxlib 0.12 has this one no more.
if tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 11):
    QUICK += " --xla_cpu_use_fusion_emitters=false"
