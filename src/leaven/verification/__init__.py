"""Checks that test a scaling rule by training small models.

A family makes the models of one recipe (recipe_family.py, small_models.py) or of a user's factory function
(foreign.py) at any scale. There are three kinds of checks, listed with the calls that they make::

    coordinates, gradients    SizeCheck.of(recipe, ...) -> family.build(scale, seed) -> record -> judge
    transfer, duration,       sweep(family, ...), equivalence(family, ...)
    batch, decay, init,           -> family.trial(setting) -> RunStore.run -> losses of all seeds
    equivalence
    memory                    check_memory(recipe, ranks) -> dry_run(recipe, rank)

The first two kinds return a CheckDocument (verdict.py), and ``memory`` returns a MemoryCheckDocument.
"""
