"""leaven works without the modules and functions that only Unix has; they are hidden here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Written to sitecustomize.py, so that worker processes run it too. asyncio and psutil are imported first, because
# they choose their implementation for the system at import.
HIDING = """
import asyncio, ctypes, os, select, signal, sys
from multiprocessing import popen_fork
import psutil

for module in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[module] = None
for owner, names in (
    (os, "sysconf sched_getaffinity sched_setaffinity statvfs getloadavg fork killpg getpgid setsid"),
    (signal, "pthread_sigmask SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGCHLD SIGALRM setitimer"),
    (select, "poll"),
    (ctypes, "windll"),
):
    for name in names.split():
        if hasattr(owner, name):
            delattr(owner, name)
popen_fork.Popen.kill = lambda self: self._send_signal(9)  # Windows has another Popen
"""
VERBS = """
import pkgutil, sys
from importlib import import_module
import leaven
from leaven.cli import main

for module in pkgutil.walk_packages(leaven.__path__, "leaven."):
    if module.name not in ("leaven.__main__", "leaven.interop.configs.prepare"):  # scripts
        import_module(module.name)
for verb in sys.argv[1:]:
    sys.argv = ["leaven", *verb.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, verb
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "hiding"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDING)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A cache of its own: without flock, the lock files that flock left in the cache of other tests look held.
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "LEAVEN_CACHE": str(tmp_path / "cache")}


@pytest.mark.long
@pytest.mark.parametrize(
    "studies", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a run", "a study, too"]
)
def test_verbs_work_without_what_only_unix_has(
    tiny_file: Path, tmp_path: Path, elsewhere: dict[str, str], studies: bool
) -> None:
    """Every module of leaven is imported, too."""
    few = "--set data.tokens=1024 --set evaluation.tokens=512"
    verbs = [
        f"plan {tiny_file} --gpus cpu",
        f"train {tiny_file} --run {tmp_path}/run {few}",
        f"tune {tiny_file} --study {tmp_path}/study --trials 1 --workers 1 --space hyperparameters.lr {few}",
    ]
    command = [sys.executable, "-c", VERBS, *(verbs if studies else verbs[:2])]
    done = subprocess.run(command, env=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size
    assert (tmp_path / "study" / "best.toml").exists() == studies
