"""Options for programs that interpret a kernel: they run once, so that optimising them costs more than it saves."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
