import sys
from pathlib import Path

import pytest

# pytest imports test files by their path; the helpers beside them are found by name only from here.
sys.path.insert(0, str(Path(__file__).parent))

from written import write_demo


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("report") / "demo")
