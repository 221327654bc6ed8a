"""How a training code runs, as far as the time of a step depends on it."""

import math
from dataclasses import dataclass

from leaven.planning.accelerators import Dtype

# torch's DistributedDataParallel exchanges gradients so many bytes at a time.
DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Pace:
    """``products``: the dtype of a block's products. ``fused``: its elementwise operators are, without a compiler
    too. ``overlap``: gradients are exchanged during the last backward pass, in messages of ``message`` bytes.
    ``behind_products``: tensor ranks exchange in as many pieces as there are ranks, and all pieces but the first
    during the product. ``shared_nics``: the rings of a group go over all network adapters of a node, not over one.
    ``slower``: the factor to its blocks that no operator explains."""

    products: Dtype = "bf16"
    fused: bool = False
    overlap: bool = True
    message: float = DDP_BUCKET
    behind_products: bool = False
    shared_nics: bool = True
    slower: float = 1.0


MEGATRON_PACE = Pace(fused=True, overlap=False, message=math.inf)
# Megatron-LM's FP8 table of 2024: examples/llama has --overlap-grad-reduce and --overlap-param-gather; tensor ranks
# are taken to overlap too (--tp-comm-overlap).
MEGATRON_2024_PACE = Pace(fused=True, message=math.inf, behind_products=True)
# BLOOM's layout search took 1.17 times what Megatron's operators would; fitted on its 46 rows.
MEGATRON_DEEPSPEED_PACE = Pace(fused=True, overlap=False, message=math.inf, slower=1.17)
# DeepSpeed's ZeRO-3 of 2021 without model parallelism: the bandwidth of one adapter a rank is what the six rows of
# arXiv 2104.04473, table 2, want.
DEEPSPEED_ZERO3_PACE = Pace(fused=True, message=math.inf, shared_nics=False)
NANOTRON_PACE = Pace(overlap=False)
