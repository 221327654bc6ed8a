"""The search algorithm: pure functions, with numpy only. Start with `trust_region.py`, which describes the method."""
