"""Parse clusters such as ``64xH100``, and find accelerators by name."""

import math
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from leaven.errors import InputError
from leaven.planning.accelerators import EXAMPLE, Accelerator, accelerators, user_file
from leaven.planning.flops import flops_per_token
from leaven.planning.this_machine import gpus_here, this_machine
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import WHOLE

_COUNT = rf"({WHOLE})\s*[x×*]\s*"
_CLUSTER = re.compile(rf"\s*{_COUNT}(?:{_COUNT})?((?=.*[a-z]|\d{{4}}).+?)\s*", re.IGNORECASE)
MOST_GPUS = 10**7  # the largest clusters have 10^5
_MAKERS = {"NVIDIA", "TESLA", "GEFORCE", "AMD", "INSTINCT", "GOOGLE", "AWS", "INTEL", "GPU"}
_FORMS = {"PCIE", "NVL"}  # form factors that are slower than the SXM board of the same name
EXAMPLE_GPU = "H100-80GB"  # in commands and estimates, if the user's GPUs are not known
_MEMORY = re.compile(r"\d+GB")
# Assumptions of the rough estimates :func:`trainable_here` and :func:`estimated_gpus`.
_BYTES_PER_PARAMETER = 16  # weights, gradients and Adam's two moments in fp32
_MAX_SECONDS = 30 * 86_400
_MFU = 0.4
_MEMORY_SHARE = 0.75  # of a GPU, for weights, gradients and moments; the rest is for activations
_GPU_FLOPS = 1e15  # per second: an H100 in dense bf16
_GPU_BYTES = _MEMORY_SHARE * 80 * 2**30


@dataclass(frozen=True)
class Cluster:
    """A number of accelerators of one kind, in nodes of ``accelerator.node_size``."""

    gpus: int
    accelerator: Accelerator

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.accelerator.node_size)

    @property
    def nodes_text(self) -> str:
        """The nodes and their GPUs as text: ``one node``, ``8 nodes of 8``, or ``2 nodes of 8, the last of 5``."""
        node = self.accelerator.node_size
        if self.nodes == 1:
            return "one node"
        rest = self.gpus % node
        return f"{self.nodes} nodes of {node}" + (f", the last of {rest}" if rest else "")

    def __str__(self) -> str:
        name, node = self.accelerator.name, self.accelerator.node_size
        if name == "cpu":
            return name
        known = accelerators().get(name)
        if known is None or _even_nodes(self.gpus, known.node_size) == node or self.gpus % node:
            return f"{self.gpus}x{name}"
        return f"{self.gpus // node}x{node}x{name}"


def parse_cluster(text: str) -> Cluster:
    """Parse a cluster: ``384xA100-80GB``, ``48x8xA100-80GB`` (nodes x GPUs per node), or ``cpu``.

    Without a node size, GPUs are spread evenly over nodes if possible: 12 GPUs in nodes of up to 8 become two nodes
    of 6. Raise InputError for other text, too many GPUs, or an unknown accelerator.
    """
    if text.strip().lower() in {"cpu", "1xcpu"}:
        return Cluster(1, this_machine())
    match = _CLUSTER.fullmatch(text)
    if len(text) > 100:
        raise InputError(f"{text[:20]!r}... is not a cluster; write for example 64xH100-80GB")
    counts = [int(re.sub(r"[_,]", "", count or "1")) for count in match.groups()[:2]] if match else []
    if math.prod(counts) > MOST_GPUS:
        raise InputError(f"{text!r} has {math.prod(counts):,} GPUs, more than {MOST_GPUS:,}; give fewer GPUs")
    if match is None or not all(counts) or re.match(rf"{_COUNT}|cpu$", match[3], re.IGNORECASE):
        raise InputError(
            f"{text!r} is not a cluster; write for example 64xH100-80GB, 8x8xH100-80GB (nodes x GPUs), or cpu"
        )
    first, second = counts
    found = find_accelerator(match[3])
    node = second if match[2] else _even_nodes(first, found.node_size)
    return Cluster(first * second, found if node == found.node_size else replace(found, node_size=node))


def _even_nodes(gpus: int, node: int) -> int:
    """Return the largest divisor of ``gpus`` from ``node / 2`` to ``node``; ``node`` if none or in one node."""
    divisors = (each for each in range(node, (node - 1) // 2, -1) if gpus % each == 0)
    return node if gpus <= node else next(divisors, node)


def find_accelerator(name: str) -> Accelerator:
    """Return an accelerator by name. Vendor, memory and form factor are optional: ``H100``, ``h200-sxm``.

    The first match in the table counts: SXM before PCIe, larger memory first. Raise InputError if none matches.
    """
    by_upper = {known.upper(): found for known, found in accelerators().items()}
    if name.upper().strip() in by_upper:
        return by_upper[name.upper().strip()]
    wanted = [word for word in _words(name) if word not in _MAKERS]
    for found in by_upper.values():
        if _is_called(_words(found.name), wanted):
            return found
    nearest = [by_upper[upper].name for upper in get_close_matches(name.upper(), by_upper, n=3, cutoff=0.0)]
    word = re.sub(r"[^\w.\-]+", "-", name).strip("-") or "Z1-64GB"
    raise InputError(
        f"no accelerator {name!r} in the table; the nearest are {', '.join(nearest)} (leaven hardware lists all); "
        f"to add it, put a line like this example into {user_file()}, with its own numbers: {word} = {EXAMPLE}"
    )


def known_device(name: str) -> Accelerator | None:
    """Return the accelerator that a driver calls ``name``, such as ``NVIDIA H100 80GB HBM3``; None if unknown."""
    words = set(_words(name))
    if words & {"LAPTOP", "MOBILE", "MAX"}:  # slower boards of the same name
        return None
    memory = {word for word in words if _MEMORY.fullmatch(word)}
    kind = []
    for known in accelerators().values():
        own = set(_words(known.name))
        model = {word for word in own if not _MEMORY.fullmatch(word)} - {"SXM"}
        if model <= words and own & _FORMS == words & _FORMS:
            kind.append((not own & memory, known))
    return min(kind, key=lambda pair: pair[0])[1] if kind else None


def _words(name: str) -> list[str]:
    """Split a name into normalised words: ``H100 96 GB`` equals ``H100-96GB``, and SXM4 and SXM5 become SXM."""
    joined = re.sub(r"(\d)\s*GI?B\b", r"\1GB", name.upper())
    return [re.sub(r"^SXM\d$", "SXM", word) for word in re.split(r"[-_/\s]+", joined) if word]


def _is_called(own: list[str], wanted: list[str]) -> bool:
    """Return whether ``wanted`` names ``own``: H100 SXM names H100-SXM-80GB and H100-96GB, not H100-PCIe-80GB."""
    whole = {"".join(own[:count]) for count in range(1, len(own) + 1)}
    asked = [word for word in wanted if word != "SXM" or _FORMS & set(own)]
    return bool(asked) and (set(asked) <= set(own) or "".join(asked) in whole)


def trainable_here(recipe: Recipe) -> bool:
    """Estimate whether this machine can train the recipe within 30 days. Any GPUs are assumed to be H100-80GB."""
    gpus = gpus_here()
    if recipe.layout.ranks > max(gpus, 1):
        return False
    machine = this_machine()
    memory = gpus * _GPU_BYTES if gpus else machine.memory_gib * 2**30
    flops_per_second = gpus * _GPU_FLOPS if gpus else machine.peak_tflops * 1e12
    seconds = flops_per_token(recipe.model) * recipe.data.tokens / (_MFU * flops_per_second)
    return recipe.model.params * _BYTES_PER_PARAMETER < memory and seconds < _MAX_SECONDS


def estimated_gpus(recipe: Recipe, gpu: Accelerator) -> int:
    """Estimate how many GPUs a run needs to fit into memory and to take at most 30 days. Return a power of two.

    A run with a small batch may take longer: to save time, each GPU must have at least one sequence of the batch.
    """
    for_memory = recipe.model.params * _BYTES_PER_PARAMETER / (_MEMORY_SHARE * gpu.memory_gib * 2**30)
    flops_per_second = _MFU * gpu.peak_tflops * 1e12
    for_time = flops_per_token(recipe.model) * recipe.data.tokens / (flops_per_second * _MAX_SECONDS)
    most = math.floor(math.log2(max(recipe.batch.tokens // recipe.model.seq_len, 1)))
    return 1 << max(math.ceil(math.log2(for_memory)), min(math.ceil(math.log2(for_time)), most), 0)
