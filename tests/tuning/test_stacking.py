"""Who is trained with whom, and who gets what of it."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe
from leaven.training import stacked
from leaven.training.outcome import Outcome
from leaven.training.stacked import train_stack
from leaven.training.trial import train_trial
from leaven.tuning.proposal import Proposal
from leaven.tuning.stacking import Stack, stack_of_trials


def ask(stack: Stack, points: Sequence[float], name: str = "x") -> list[float | str]:
    """A thread for each point; the losses, or what was raised."""

    def one(number: int) -> float | str:
        try:
            return stack(Proposal({name: points[number]}, number)).loss
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(points)) as pool:
        return list(pool.map(one, range(len(points))))


def squares(seen: list[list[float]]) -> Callable[[Sequence[Proposal]], list[Outcome]]:
    def run(proposals: Sequence[Proposal]) -> list[Outcome]:
        seen.append([proposal["x"] for proposal in proposals])
        if -1 in seen[-1]:
            raise ValueError("no")
        return [Outcome(proposal["x"] ** 2) for proposal in proposals]

    return run


def test_a_full_stack_is_one_run_and_each_thread_gets_its_own_outcome() -> None:
    seen: list[list[float]] = []
    stack = Stack(4, squares(seen), quiet_seconds=600)
    assert ask(stack, [1, 2, 3, 4, 5, 6, 7, 8]) == [1, 4, 9, 16, 25, 36, 49, 64]
    assert [len(points) for points in seen] == [4, 4]


def test_those_that_are_there_begin_when_no_other_comes() -> None:
    seen: list[list[float]] = []
    assert ask(Stack(4, squares(seen), quiet_seconds=0.05), [3]) == [9]
    assert seen == [[3]]


def test_only_those_of_one_key_go_together_and_fail_together() -> None:
    seen: list[list[float]] = []
    stack = Stack(4, squares(seen), key=lambda proposal: proposal["x"] > 0, quiet_seconds=600)
    assert ask(stack, [1, -1, 2, -2]) == [1, "no", 4, "no"]
    assert sorted(map(sorted, seen)) == [[-2, -1], [1, 2]]


def test_what_comes_while_a_stack_trains_is_the_next_one() -> None:
    began, go_on, sizes = threading.Event(), threading.Event(), list[int]()

    def run(proposals: Sequence[Proposal]) -> list[Outcome]:
        sizes.append(len(proposals))
        began.set()
        assert go_on.wait(60)
        return [Outcome(proposal["x"]) for proposal in proposals]

    stack = Stack(2, run, quiet_seconds=0.05)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(stack, Proposal({"x": 1}, 0))
        assert began.wait(60)
        others = [pool.submit(stack, Proposal({"x": x}, x)) for x in (2, 3)]
        deadline = time.monotonic() + 60
        while len(stack._waiting) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        go_on.set()
        assert [future.result().loss for future in (first, *others)] == [1, 2, 3]
    assert sizes == [1, 2]


def test_a_point_without_a_recipe_is_told_to_its_own_thread() -> None:
    def recipe_of(proposal: Proposal) -> None:
        raise ValueError("there is no recipe at that point")

    stack = stack_of_trials(2, recipe_of, None, "cpu", lambda: False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no recipe"):
        stack(Proposal({"x": 0}, 0))


def test_trials_of_one_shape_are_one_stack_and_the_others_are_by_themselves(
    tiny: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, sizes = tiny.replace({"data.tokens": 1_280, "schedule.warmup_tokens": 0}), list[int]()

    def recipe_of(proposal: Proposal) -> Recipe:
        changes = {"hyperparameters.lr": 0.01 * 2 ** proposal["lr"], "data.seed": proposal.seed}
        return recipe.replace(changes | ({"model.dropout": 0.1} if proposal["lr"] == 0 else {}))

    def seen(recipes: Sequence[Recipe], *others: Any) -> list[Outcome]:
        sizes.append(len(recipes))
        return train_stack(recipes, *others)

    monkeypatch.setattr(stacked, "train_stack", seen)
    tokens = prepare(tiny.data, tiny.model.vocab_size)
    stack = stack_of_trials(3, recipe_of, tokens, "cpu", lambda: False)
    losses = ask(stack, [0, 1, 2], "lr")
    assert sizes == [2]
    assert losses == pytest.approx(
        [train_trial(recipe_of(Proposal({"lr": lr}, 0))).loss for lr in (0, 1, 2)], rel=1e-4
    )
