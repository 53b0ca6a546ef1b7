"""Commands that hold plans against compiled programs, rival plans and the clock; `benchmarks/RESULTS.md` holds the figures."""
