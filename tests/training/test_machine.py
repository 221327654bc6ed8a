"""Memory that was freed is there for the next step."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from leaven.training.device import keep_freed_memory
if {keep}:
    keep_freed_memory()
for step in range(20):
    if step == 10:  # the first ones find their place
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones({elements}).relu().relu()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="a C library with a lower limit, or another")
def test_a_block_gets_its_pages_once() -> None:
    elements = 10_000_000  # of 4 bytes: more than what is kept anyway

    def faults(keep: bool) -> int:
        code = FAULTS.format(keep=keep, elements=elements)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert faults(keep=True) < 100 < faults(keep=False)
