"""Checks that train models to test scaling rules, and a check of the memory that the planner predicts.

A model family makes models of any scale, from a recipe (recipe_family.py, small_models.py) or from a user's factory
function (foreign.py). Each check is a series of calls::

    coordinates, gradients    SizeCheck.of(recipe, ...) -> family.build(scale, seed) -> record -> judge
    transfer, duration,       sweep(family, ...), equivalence(family, ...) or collapse_of_family(family, ...)
    batch, decay, init,           -> family.trial(setting) -> RunStore.run -> losses or curves of all seeds
    equivalence, collapse
    memory                    check_memory(recipe, ranks) -> dry_run(recipe, rank)

The checks ``transfer`` and ``collapse`` can also read runs that are already trained: transfer_of_runs(path) and
collapse_of_runs(path).

The check ``memory`` returns a MemoryCheckDocument. All other checks return a CheckDocument (verdict.py).
"""
