"""The search algorithm: pure functions that compute the next point and the answer from the trials, with numpy only.

Start with `trust_region.py`, which describes the method step by step.
"""
