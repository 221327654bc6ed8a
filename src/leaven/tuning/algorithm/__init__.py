"""The search: pure functions from trials to the next point and to the answer, with numpy alone.

Start with `trust_region.py`, which has the method step by step.
"""
