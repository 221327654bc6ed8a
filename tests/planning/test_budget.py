"""The sizes that fit a budget: fixed points of the laws at the planner's own speed."""

import math

import pytest

from leaven.catalogue.laws import FRONTIERS
from leaven.planning import budget as module
from leaven.planning.budget import OVER_TRAINED, BudgetPlan, budget, parse_budget
from leaven.planning.cost import Price
from leaven.planning.flops import flops_per_token
from leaven.planning.hardware import parse_cluster
from leaven.planning.plan import plan
from leaven.recipe.errors import InputError

TEXT = "8xH100-80GB x 3d"


@pytest.fixture(scope="module")
def found() -> BudgetPlan:
    return budget(TEXT, price=Price(2.0, "$"))


@pytest.mark.parametrize(
    ("text", "cluster", "hours"),
    [
        ("64xH100 x 14d", "64xH100", 336),
        ("64xH100x14d", "64xH100", 336),
        ("64 x H100-80GB × 300h", "64xH100-80GB", 300),
        ("8x8xA100-80GB x 2w", "64xA100-80GB", 336),
        ("64xMI300X x 1.5 days", "64xMI300X", 36),
        ("16x4xA100, 10 hours", "16x4xA100", 10),
        ("2x3090x12h", "2x3090", 12),
        ("cpu x 2h", "cpu", 2),
    ],
)
def test_a_budget_is_a_cluster_and_a_time(text: str, cluster: str, hours: float) -> None:
    assert parse_budget(text) == (parse_cluster(cluster), hours * 3_600)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64xH100", "write for example '64xH100-80GB x 14d'"),
        ("64xH100 14d", "write for example '64xH100-80GB x 14d'"),
        ("64xH100 x 14", "write for example '64xH100-80GB x 14d'"),
        ("64xH100 x 14y", "write for example '64xH100-80GB x 14d'"),
        ("x 14d", "write for example '64xH100-80GB x 14d'"),
        ("64xH100 x 0d", "no time at all; write for example '64xH100 x 14d'"),
        ("H100 x 4d", "'H100' is not a cluster"),
        ("64xQ100 x 4d", "no accelerator 'Q100'"),
        ("64xH100 x 99999999d", "give it less time"),
        ("1xA10 x 0.000001h", "give it more time"),
    ],
)
def test_what_is_no_budget_is_told_so(text: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        budget(text)
    assert says in str(refused.value)


def test_every_law_speaks_and_so_do_longer_runs(found: BudgetPlan) -> None:
    names = {row.law for row in found.rows}
    assert {frontier.name for frontier in FRONTIERS} <= names
    assert len(found.rows) == len(FRONTIERS) + len(OVER_TRAINED)
    assert [row.params for row in found.rows] == sorted((row.params for row in found.rows), reverse=True)
    assert not found.refused


def test_a_row_is_on_its_law_and_uses_up_the_time(found: BudgetPlan) -> None:
    sizes = {frontier.name: frontier.sizes for frontier in FRONTIERS}
    for row in found.rows:
        spent = 6 * row.params * row.tokens
        assert spent == pytest.approx(row.speed.flops * 3 * 86_400)
        if row.law in sizes:
            assert row.params == pytest.approx(sizes[row.law].optimal_params(spent))
        else:
            assert row.tokens_per_param == pytest.approx(float(row.law.split()[0].replace(",", "")))


def test_its_speed_is_the_planner_s_at_about_that_size(found: BudgetPlan) -> None:
    cluster = parse_cluster("8xH100-80GB")
    for row in found.rows[:: len(found.rows) // 3]:
        shape = row.speed.shape
        # 5% between sizes that are planned once, half of that where the steps end, 3% from the shape
        assert shape.params == pytest.approx(row.params, rel=0.12)
        again = plan(shape, round(row.tokens), row.speed.batch_tokens, cluster)
        assert row.speed.plan is not None
        assert row.speed.plan.arrangement == again.arrangement
        assert row.speed.mfu == again.speed.mfu
        assert row.speed.flops == pytest.approx(6 * shape.params * again.speed.tokens_per_second)


def test_a_given_speed_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "plan", None)
    found = budget(TEXT, mfu=0.4)
    row = next(row for row in found.rows if row.law == "20 tokens a parameter")
    # By hand: 40% of 8 x 989 TFLOP/s for three days, of which 6 N D is all but the attention and the embedding.
    flops = 0.4 * 8 * 989e12 * 3 * 86_400
    share = 6 * row.speed.shape.params / flops_per_token(row.speed.shape)
    assert row.params == pytest.approx(math.sqrt(share * flops / 6 / 20))
    assert (row.speed.mfu, row.speed.plan) == (0.4, None)
    assert found.to_json()["rows"][0]["layout"] is None


def test_nearly_equal_sizes_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    monkeypatch.setattr(module, "plan", lambda shape, *rest: planned.append(shape.params) or plan(shape, *rest))
    found = budget(TEXT)
    assert len(planned) <= len(found.rows) + 2
    assert len({id(row.speed) for row in found.rows}) < len(found.rows)


def test_what_a_law_asks_for_and_cannot_be_is_said() -> None:
    found = budget("1xA10 x 0.05h")
    assert found.rows
    assert ("2,000 tokens a parameter" in {law for law, _ in found.refused}) is bool(found.refused)
    for _, why in found.refused:
        assert "give it more time" in why


def test_the_document(found: BudgetPlan) -> None:
    document = found.to_json()
    assert (document["gpus"], document["days"], document["cost"]["money"]) == (8, 3, 8 * 72 * 2)
    assert document["rows"][0].keys() == {
        "law", "params", "tokens", "tokens_per_param", "flops", "days", "mfu", "tflops_per_gpu", "batch_tokens",
        "shape", "layout",
    }  # fmt: skip
    assert document["rows"][0]["layout"]["tp"] >= 1


@pytest.mark.parametrize("mfu", [0.0, 1.0, 40, -0.1, math.nan])
def test_an_mfu_is_a_share(mfu: float) -> None:
    with pytest.raises(InputError, match=r"between 0 and 1, for example 0\.4"):
        budget(TEXT, mfu=mfu)
