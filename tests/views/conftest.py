import sys
from pathlib import Path

import pytest

# pytest imports test files by their path. The helper modules beside them are found only through sys.path.
sys.path.insert(0, str(Path(__file__).parent))

import studied
from tests.cli.conftest import leaven  # noqa: F401
from written import proxy, target, write_run


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study (proxy) and of two runs (runs/moved, runs/copied). Tests must not change it."""
    folder = tmp_path_factory.mktemp("folders")
    studied.write(folder / "proxy", studied.study(4, 20))
    large = target(proxy())
    copied = large.replace({"scaling.base": None, "name": "wheat-copied", "hyperparameters.depth": {}})
    write_run(folder / "runs/moved", large, 2.41)
    write_run(folder / "runs/copied", copied, 2.55, seed=1, torn=True)
    return folder
