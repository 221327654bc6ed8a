"""Rough estimates, without a plan: can this machine train a recipe, and if not, which cluster can?"""

import math
import os

from leaven.planning.accelerators import this_machine
from leaven.planning.flops import flops_per_token
from leaven.recipe.recipe import Recipe

_BYTES_PER_PARAMETER = 16  # fp32 weights, gradients and Adam's two moments; activations are not counted
_MAX_SECONDS = 30 * 86_400
_MFU = 0.4
_GPU = "H100-80GB"
_GPU_FLOPS = 1e15  # per second, dense bf16
_GPU_BYTES = 60 * 2**30  # of 80 GiB, what is left beside activations


def trainable_here(recipe: Recipe) -> bool:
    """Whether weights, gradients and moments fit into this machine's memory and the run takes less than a month."""
    gpus = gpus_here()
    if recipe.layout.ranks > max(gpus, 1):
        return False
    machine = this_machine()
    memory = gpus * _GPU_BYTES if gpus else machine.memory_gib * 2**30
    flops_per_second = gpus * _GPU_FLOPS if gpus else machine.peak_tflops * 1e12
    seconds = _flops(recipe) / (_MFU * flops_per_second)
    return recipe.model.params * _BYTES_PER_PARAMETER < memory and seconds < _MAX_SECONDS


def cluster_for(recipe: Recipe) -> str:
    """The smallest power of two of GPUs that holds the model and trains it within a month, as ``COUNTxNAME``.

    At most one GPU for each sequence of a batch. A recipe that has a layout gets as many GPUs as it has ranks.
    """
    if recipe.layout.ranks > 1:
        return f"{recipe.layout.ranks}x{_GPU}"
    for_memory = recipe.model.params * _BYTES_PER_PARAMETER / _GPU_BYTES
    for_time = _flops(recipe) / (_MFU * _GPU_FLOPS * _MAX_SECONDS)
    needed = math.ceil(math.log2(max(for_memory, for_time)))
    most = math.floor(math.log2(max(recipe.batch.tokens // recipe.model.seq_len, 1)))
    return f"{2 ** min(max(needed, 0), most)}x{_GPU}"


def gpus_here() -> int:
    """The number of NVIDIA GPUs of this machine, counted by their device files: no import is needed."""
    return sum(name.removeprefix("nvidia").isdigit() for name in os.listdir("/dev")) if os.path.isdir("/dev") else 0


def _flops(recipe: Recipe) -> float:
    return flops_per_token(recipe.model) * recipe.data.tokens
