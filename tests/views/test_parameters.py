import pytest
from written import proxy, target

from leaven.scaling.table import parameter_table
from leaven.views.parameters import at_base, by_label, reason


def test_the_base_of_a_transferred_recipe_is_the_recipe_it_came_from():
    small = proxy()
    found = at_base(target(small))
    assert found.model == small.model
    assert parameter_table(found).rows == parameter_table(small).rows
    assert at_base(small) is None


@pytest.mark.parametrize("quantity", ["lr", "weight_decay", "eps", "init_std", "multiplier"])
def test_the_factor_in_a_reason_is_target_over_base(quantity):
    """The printed factor is the ratio between the resolved values of target and base."""
    small = proxy().replace({"hyperparameters.depth": {}})
    recipe = target(small)
    at_base = by_label(parameter_table(small).rows)
    for label, rows in by_label(parameter_table(recipe).rows).items():
        mine, base = getattr(rows[0], quantity), getattr(at_base[label][0], quantity)
        text = reason(recipe, parameter_table(recipe), rows[0], quantity)
        if base and " = " in text:
            assert float(text.rpartition(" = ")[2]) == pytest.approx(mine / base, rel=6e-3)
        elif base:
            assert mine == base
