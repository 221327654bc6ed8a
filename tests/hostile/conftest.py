"""Fixtures of the tests of hostile input."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "views"))  # for the module that writes studies

import studied
from tests.cli.conftest import leaven  # noqa: F401

from leaven.training.load import export_run, load_run


@pytest.fixture(scope="session")
def exported(scaled_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a run in the format of transformers. Do not change it."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_run(load_run(scaled_run), folder)
    return folder


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study. Do not change it."""
    folder = tmp_path_factory.mktemp("studies") / "study"
    studied.write(folder, studied.study(4, 20))
    return folder
