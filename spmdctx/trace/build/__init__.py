"""From a jaxpr to a Program: ops with rules, calls dissolved, loop bodies inlined as regions with boundary ops."""
