"""From plans to programs: constraints, shardings, compile options, compile-only devices."""
