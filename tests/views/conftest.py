import sys
from pathlib import Path

import pytest

# pytest imports test files by their path; the helpers beside them are found by name only from here.
sys.path.insert(0, str(Path(__file__).parent))

from written import write_folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study (proxy) and of two runs (runs/moved, runs/copied); not to be changed."""
    return write_folders(tmp_path_factory.mktemp("folders"))
