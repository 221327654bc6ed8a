"""Accelerators and clusters: dense peaks, measured matmul, memory, bandwidths, and where each number is from.

A peak is dense (not sparse) and in bf16. Peaks, best matmul, memory and memory bandwidth are the table of
github.com/stas00/ml-engineering, compute/accelerator/README.md. Link bandwidths are vendors' data sheets, one
direction, from memory; network bandwidth is the usual NIC of the generation, one a GPU. Both are the thin part.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from leaven.recipe.errors import InputError

_TABLE = "github.com/stas00/ml-engineering: compute/accelerator/README.md"
_LINKS = "vendor data sheet, from memory"
# Where nobody published a best matmul: the ratio to the peak of the measured accelerators of the table, 0.80.
_USUAL_MATMUL_SHARE = 0.80


@dataclass(frozen=True)
class Accelerator:
    """One accelerator.

    ``peak_tflops`` dense bf16; ``best_matmul_tflops`` the best bf16 matmul anybody measured, None if nobody did;
    ``memory_tb_s`` bandwidth of its memory; ``link_gb_s`` to its neighbours in the node and ``network_gb_s`` to
    other nodes, one direction; ``node_size`` accelerators joined by the link.
    """

    name: str
    peak_tflops: float
    best_matmul_tflops: float | None
    memory_gib: float
    memory_tb_s: float
    link_gb_s: float
    network_gb_s: float
    node_size: int = 8
    source: str = _TABLE
    link_source: str = _LINKS

    @property
    def matmul_flops(self) -> float:
        """FLOP/s of the best matmul: the ceiling of any training step."""
        tflops = self.best_matmul_tflops
        return (self.peak_tflops * _USUAL_MATMUL_SHARE if tflops is None else tflops) * 1e12


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("A100-SXM-80GB", 312, 271.2, 80, 2.0, 300, 25),
        Accelerator("A100-SXM-40GB", 312, 271.2, 40, 1.555, 300, 25, source=f"{_TABLE}; 40 GB: {_LINKS}"),
        Accelerator("A100-PCIe-80GB", 312, 252.9, 80, 1.94, 32, 25),
        Accelerator("H100-SXM-80GB", 989, 794.5, 80, 3.35, 450, 50),
        Accelerator("H100-PCIe-80GB", 756, None, 80, 2.0, 64, 50),
        Accelerator("H200-SXM-141GB", 989, 794.5, 141, 4.8, 450, 50),
        Accelerator("GH200-141GB", 989, 828.6, 141, 4.8, 450, 50, node_size=4),
        Accelerator("B200-SXM-180GB", 2250, 1745, 180, 8.0, 900, 50),
        Accelerator("B300-SXM-288GB", 2250, 1769, 288, 8.0, 900, 100),
        Accelerator("GB200-186GB", 2500, 1822, 186, 8.0, 900, 50, node_size=4),
        Accelerator("MI300X-192GB", 1300, 668.4, 192, 5.3, 448, 50),
        Accelerator("MI325X-256GB", 1300, 784.9, 256, 6.0, 448, 50),
        Accelerator("L40S-48GB", 362, None, 48, 0.86, 32, 25),
        Accelerator("TPUv5p-95GB", 459, None, 95, 2.76, 300, 25, node_size=4),
        Accelerator("TPUv4-32GB", 275, None, 32, 1.2, 150, 25, node_size=4),
    )
}
_CLUSTER = re.compile(r"\s*([0-9][0-9_,]*)\s*[x×*]\s*(\S+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Cluster:
    """``gpus`` accelerators of one kind, in nodes of ``accelerator.node_size``."""

    gpus: int
    accelerator: Accelerator

    def __str__(self) -> str:
        return f"{self.gpus}x{self.accelerator.name}"


def find_accelerator(name: str) -> Accelerator:
    """An accelerator by its name; memory and form may be left out: ``H100``, ``A100-80GB``, ``h200-sxm``.

    Raises:
        InputError: if the table has no such accelerator.
    """
    wanted = re.split(r"[-_\s]+", name.upper())
    for known in ACCELERATORS.values():
        # The first in the table that has every word asked for: SXM before PCIe, the larger memory first.
        if all(word in known.name.upper().split("-") for word in wanted):
            return known
    close = get_close_matches(name.upper(), [known.upper() for known in ACCELERATORS], n=1, cutoff=0.6)
    hint = next((f"did you mean {known}? " for known in ACCELERATORS if known.upper() in close), "")
    raise InputError(f"no accelerator {name!r} in the table; {hint}known are {', '.join(ACCELERATORS)}")


def parse_cluster(text: str) -> Cluster:
    """A cluster from its written form, ``384xA100-80GB``.

    Raises:
        InputError: if the text is not COUNTxNAME or the name is not in the table.
    """
    match = _CLUSTER.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a cluster; write for example 64xH100-80GB")
    count = int(re.sub(r"[_,]", "", match[1]))
    if count == 0:
        raise InputError(f"{text!r} has no GPU; write for example 1x{match[2]}")
    return Cluster(count, find_accelerator(match[2]))
