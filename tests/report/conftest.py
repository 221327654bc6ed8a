import os
import subprocess
import sys
from pathlib import Path

import pytest

# pytest imports test files by their path; the helpers beside them are found by name only from here.
sys.path.insert(0, str(Path(__file__).parent))

from written import write_demo


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("report") / "demo")


@pytest.fixture(scope="session")
def real_demo(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``leaven demo`` itself writes, at its tiny size. Copy it before writing into it."""
    folder = tmp_path_factory.mktemp("real") / "demo"
    options = ["--size", "tiny", "--source", f"{corpus}/*.txt", "--run", str(folder), "--workers", "2"]
    # On a busy machine two threads that wait for each other take ten times as long as one.
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    subprocess.run([sys.executable, "-m", "leaven", "demo", *options], env=environment, check=True)
    return folder
