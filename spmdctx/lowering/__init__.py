"""Turns an assignment into a jitted program: the jaxpr with constraints, the compiler's options, compile-only devices."""
