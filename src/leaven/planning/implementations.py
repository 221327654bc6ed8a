"""What memory depends on besides shape and layout: the training code. Each stack under its name.

A value is what the stack's source does, not what fits a measurement. Read off measurements are only the fixed amounts
and the slack, and where, stands beside them.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from leaven.planning.pace import MEGATRON_DEEPSPEED_PACE, MEGATRON_PACE, NANOTRON_PACE, Pace

Selective = Literal["core", "products"]
Balance = Literal["weight", "number", "work"]


@dataclass(frozen=True)
class Implementation:
    """Bytes and habits of a training code.

    States, in bytes a parameter: ``weights`` that stay; ``grads`` and, where micro-batches are added up elsewhere,
    ``accumulation``; ``optimizer`` with the copy of the weights in fp32 that ``master`` of them are, if there is one,
    and ``optimizer_of_matrices`` where matrices have another (Muon: one moment).

    Copies, in bytes a parameter: ``compute_copy`` that products read where the weights are kept in fp32;
    ``gathered_ends`` of what is in no block, if every one of several ranks has that whole; ``exchange`` of a block
    while ranks exchange its gradients; ``update_copy`` in an update, when the activations are gone.
    ``shards_weights_from``: the first ZeRO stage that shares out the weights. ``bucket``: bytes of buffers for the
    exchange of gradients and weights. ``autocast``: of one rank alone, products cast what they read, so
    no embedding, and with full recomputation a block at a time; under ZeRO 3 an embedding is given up like a block.

    Activations: bytes of an ``element`` and of one of the ``residual`` stream. ``sequence_parallel``: between
    products a tensor rank has a stretch of positions; ``gathered_inputs``: the inputs of column-parallel products are
    kept whole all the same. ``selective``: what selective recomputation is here, the ``core`` of attention again, or
    all but every second of the ``products``. ``keeps_outputs``: a stage keeps what it has sent on to the next.

    Loss: bytes a ``logit`` at its peak, ``sharded_logit`` with the vocabulary over tensor ranks if that is another
    number; ``logits_at_once`` at most; ``unembedding``: bytes a parameter of its gradient, which the loss keeps to
    the backward pass.

    ``balance`` of a pipeline's blocks: by the weight of the ends, by number, or by work. ``fixed_gib``: context,
    NCCL, kernels; ``slack``: share of everything else that the allocator holds and cannot use. The defaults of both
    are the lower ends of what is usual (1 to 2 GB, Ultra-Scale Playbook; 5 to 10%). ``pace``: for the time of a step.
    """

    weights: int = 4
    grads: int = 4
    optimizer: int = 8
    accumulation: int = 0
    master: int = 0
    optimizer_of_matrices: int | None = None
    compute_copy: int = 2
    gathered_ends: int = 0
    autocast: bool = False
    exchange: int = 0
    update_copy: int = 0
    shards_weights_from: int = 3
    bucket: int = 0
    element: int = 2
    residual: int = 2
    flash_attention: bool = True
    sequence_parallel: bool = False
    gathered_inputs: bool = False
    selective: Selective = "core"
    keeps_outputs: bool = False
    logit: int = 14
    sharded_logit: int | None = None
    logits_at_once: float = math.inf
    unembedding: int = 0
    balance: Balance = "weight"
    fixed_gib: float = 2.0
    slack: float = 0.05
    pace: Pace = field(default_factory=Pace)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self)[name] for name in self.__dataclass_fields__))


# leaven's own trainer: fp32 weights, AdamW states and residual stream, matmuls in bf16, the ends gathered in fp32,
# some logits at a time (model/loss.py: bf16, in fp32, and their log-softmaxes that become the gradient; over tensor
# ranks bf16, and in fp32 what becomes the gradient) with the unembedding's gradient of a micro-batch, and the
# parameters before an update beside those after it.
LEAVEN_BF16 = Implementation(
    shards_weights_from=1,
    exchange=6,
    gathered_ends=4,
    autocast=True,
    keeps_outputs=True,
    update_copy=4,
    residual=4,
    logit=10,
    sharded_logit=6,
    logits_at_once=2**27,
    unembedding=4,
    sequence_parallel=True,
    gathered_inputs=True,
)

# Megatron-LM of 2022: fp16 weights, fp32 master weights and Adam, gradients accumulated in fp32; sequence parallelism
# with selective recomputation (Korthikanti 2022), what was sent to the next stage is let go, and what was gathered
# for a product is gathered again for its backward pass. Logits: in 16 bits, in fp32, less their maximum,
# exponentials.
MEGATRON = Implementation(
    weights=2,
    grads=4,
    optimizer=12,
    master=4,
    compute_copy=0,
    sequence_parallel=True,
    flash_attention=False,
    balance="number",
    pace=MEGATRON_PACE,
)
# As of 2021 (Narayanan 2021): no sequence parallelism.
MEGATRON_2021 = replace(MEGATRON, sequence_parallel=False)

# Megatron-DeepSpeed of early 2022, as BLOOM was trained: no flash attention, no sequence parallelism; ZeRO-1 with two
# buckets of 5e8 elements (DeepSpeed's defaults: reduce_bucket_size, allgather_bucket_size), a pipeline that keeps
# what it has sent, and at the update a rank's share of the gradients anew in fp32. Fixed: the middle of the 3 to 6 GB
# that BigScience saw beside the tensors on 48 nodes; it is the one number that comes from the rows it is held
# against.
MEGATRON_DEEPSPEED_FP16 = Implementation(
    weights=2,
    grads=2,
    optimizer=12,
    master=4,
    compute_copy=0,
    flash_attention=False,
    keeps_outputs=True,
    balance="number",
    bucket=2 * 2 * 500_000_000,
    update_copy=4,
    fixed_gib=4.5,
    pace=MEGATRON_DEEPSPEED_PACE,
)
# Its bf16 accumulates in fp32 beside the gradients in bf16.
MEGATRON_DEEPSPEED_BF16 = replace(MEGATRON_DEEPSPEED_FP16, accumulation=4, update_copy=0)

# nanotron: bf16 weights, fp32 master weights and Adam; gradients in bf16, in the buckets of DistributedDataParallel,
# and accumulated in fp32; what is gathered for a product is kept; blocks on stages by FLOPs. Its memory is torch's
# own count, without a context.
NANOTRON = Implementation(
    weights=2,
    grads=2,
    accumulation=4,
    optimizer=12,
    master=4,
    compute_copy=0,
    sequence_parallel=True,
    gathered_inputs=True,
    balance="work",
    fixed_gib=0.0,
    slack=0.0,
    pace=NANOTRON_PACE,
)

# llm-foundry on torch's FSDP: fp32 weights and Adam in shards, all computed and reduced in bf16 ("PURE"), flash
# attention, a fused cross-entropy (its default) that reads logits in bf16 and writes their gradient; the ends belong
# to the root unit, which stays gathered.
LLM_FOUNDRY = Implementation(shards_weights_from=1, exchange=4, gathered_ends=2, logit=4)

# torchtitan on FSDP2, December 2024: fp32 weights and Adam in shards, gradients reduced in fp32, torch's
# cross-entropy on whole logits: in bf16, in fp32, their log-softmax and its gradient. Over tensor ranks ("loss
# parallel") that gradient is made in steps: zeros, exponentials, their sum, its multiple. The ends belong to the root
# unit. In a pipeline gradients stay whole until the last micro-batch (zero = 1). Its memory is torch's own count of
# what is reserved.
TORCHTITAN = Implementation(
    shards_weights_from=1,
    exchange=6,
    gathered_ends=2,
    sequence_parallel=True,
    gathered_inputs=True,
    selective="products",
    keeps_outputs=True,
    sharded_logit=18,
    balance="number",
    fixed_gib=0.0,
)
