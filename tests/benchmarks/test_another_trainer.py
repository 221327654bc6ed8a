"""Test that examples/another_trainer and benchmarks/another_trainer.py train one model, and search one space."""

from pathlib import Path

import pytest
from benchmarks.another_trainer import apart, prepared

from leaven.recipe.files import read_recipe
from leaven.tuning.command import CommandSpace
from leaven.tuning.space import space as space_of


@pytest.fixture
def searched(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> CommandSpace:
    """Return the search space of the example, and write its tokens into the current folder."""
    monkeypatch.chdir(tmp_path)
    return prepared(tmp_path)


@pytest.mark.slow
def test_both_train_to_the_same_losses(searched: CommandSpace) -> None:
    values = {"lr": 2e-3, "weight_decay": 0.9, "beta2": 0.9, "init_std": 0.05}
    line = searched.file.filled(values | {"seed": 0})
    assert max(apart(line, values, steps=30)) < 1e-5
    assert max(apart(line, values | {"weight_decay": 0.8}, steps=30)) > 1e-5


def test_both_are_searched_in_the_same_space(searched: CommandSpace) -> None:
    ours = space_of(read_recipe(Path("recipe.toml")))
    paths = {path: path.rpartition(".")[2] for path in ours.paths}
    assert tuple(paths.values()) == searched.paths
    for end in (0, 1):
        corner = {path: ours.limits[path][end] for path in paths}
        theirs = searched.values({paths[path]: x for path, x in corner.items()})
        assert {paths[path]: value for path, value in ours.values(corner).items()} == pytest.approx(theirs, rel=1e-5)
        assert corner == {path: searched.limits[name][end] for path, name in paths.items()}
