"""The tests: most folders mirror those of `spmdctx/`; `oracles/`, `zoo/` and `processes/` belong to no package."""
