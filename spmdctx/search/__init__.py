"""Chooses how each op is split: `setup` fixes what is given, a mode searches, `optimizer` splits state, `whatif` finds runners-up."""
