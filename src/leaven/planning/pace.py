"""How a training code runs, as far as the time of a step depends on it."""

import math
from dataclasses import dataclass

from leaven.planning.accelerators import Dtype

# torch's DistributedDataParallel exchanges gradients so many bytes at a time.
DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Pace:
    """``products``: the dtype of a block's products. ``fused``: its elementwise kernels are, without a compiler too.
    ``overlap``: gradients are exchanged during the last backward pass, in messages of ``message`` bytes.
    ``behind_products``: tensor-parallel exchanges are cut into as many pieces as there are ranks, and all but the first go on
    during the product. ``shared_nics``: the rings of a group go over all network adapters of a node, not over one of them. ``slower``: the
    factor to its blocks that no operator explains."""

    products: Dtype = "bf16"
    fused: bool = False
    overlap: bool = True
    message: float = DDP_BUCKET
    behind_products: bool = False
    shared_nics: bool = True
    slower: float = 1.0


MEGATRON_PACE = Pace(fused=True, overlap=False, message=math.inf)
# BLOOM's rows take 1.17 times what Megatron's kernels would; fitted on all 46 of them. The same factor is seen where it
# was not fitted: 530B took 60.1 s a step (arXiv 2201.11990) in a layout in which Megatron-LM takes a sixth less.
MEGATRON_DEEPSPEED_PACE = Pace(fused=True, overlap=False, message=math.inf, slower=1.17)
# DeepSpeed's ZeRO-3 of 2021 without model parallelism: one adapter's bandwidth a rank fits the six rows of
# arXiv 2104.04473, table 2.
DEEPSPEED_ZERO3_PACE = Pace(fused=True, message=math.inf, shared_nics=False)
# Megatron-LM's scripts of 2024 switch on --overlap-grad-reduce, --overlap-param-gather and --tp-comm-overlap.
MEGATRON_2024_PACE = Pace(fused=True, message=math.inf, behind_products=True)
NANOTRON_PACE = Pace(overlap=False)
