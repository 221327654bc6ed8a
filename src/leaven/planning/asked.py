"""What may be planned: a recipe, or a published run by its id, as a person asks for it."""

from dataclasses import replace

from leaven.catalogue.runs import find_run
from leaven.planning.arrangement import parse_layout
from leaven.planning.hardware import Cluster, parse_cluster
from leaven.planning.implementations import LEAVEN_BF16, MEGATRON, Implementation
from leaven.planning.layouts import Job
from leaven.planning.plan import Plan, plan_job
from leaven.planning.published import published_blueprint
from leaven.planning.states import Moments, with_moments
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe

# As benchmarks/memory.py holds it against leaven's own steps: no copies in bf16, and logits in fp32.
LEAVEN_FP32 = replace(LEAVEN_BF16, compute_copy=0, element=4, logit=8, exchange=8)
_MEGATRON_FLASH = replace(MEGATRON, flash_attention=True)


def plan_recipe(recipe: Recipe, gpus: str, layout: str | None = None, moments: Moments = "adam") -> Plan:
    """Plan a recipe on ``64xH100-80GB``, in a layout written ``tp=8,pp=12,zero=1,mbs=2`` or in the best one.

    Blocks are compiled in either if they are in the recipe's own layout and nothing else is written.
    fp16 is planned as bf16 is: every accelerator has the same peak for both. ``moments`` of another optimiser than
    Adam are planned, and not trained.

    Raises:
        InputError: as :func:`plan_job`, and for a recipe in fp32 on an accelerator whose peak in fp32 is not known.
    """
    cluster, code = in_precision(parse_cluster(gpus), recipe.precision.compute)
    compiled = recipe.layout.compile
    asked, micro_batch = (
        parse_layout(layout, cluster.gpus, recipe.model, compile=compiled) if layout else (None, None)
    )
    if micro_batch is None and recipe.batch.micro_batch != "auto":
        micro_batch = recipe.batch.micro_batch
    smallest = min(tokens for _, tokens in recipe.batch.sizes)
    code = code if moments == "adam" else with_moments(code, moments)
    job = Job(
        recipe.model,
        recipe.batch.tokens,
        cluster,
        micro_batch,
        smallest,
        code,
        compile=asked.compile if asked else compiled,
    )
    return plan_job(job, recipe.data.tokens, asked, recipe.batch)


def in_precision(cluster: Cluster, compute: str) -> tuple[Cluster, Implementation]:
    """A cluster with its speed in a recipe's precision, and what leaven keeps in it."""
    if compute != "fp32":
        return cluster, LEAVEN_BF16
    accelerator = cluster.accelerator
    peak = accelerator.peak("fp32")
    if peak is None:
        raise InputError(
            f"no peak of {accelerator.name} in fp32 is known, in which this recipe computes; "
            f"plan it with --set precision.compute=bf16"
        )
    slower = replace(accelerator, peak_tflops=peak, best_matmul_tflops=accelerator.matmul("fp32"))
    return replace(cluster, accelerator=slower), LEAVEN_FP32


def plan_run(id: str, gpus: str, layout: str | None = None, moments: Moments = "adam") -> Plan:
    """Plan a published run by its id, of any architecture, as Megatron with flash attention would train it.

    Its own sequence, batch and tokens; the vocabulary is padded to whole 128s. Nothing is ruled out for being beyond
    leaven's own trainer.

    Raises:
        InputError: if there is no such run, or too little of it is published to plan it.
    """
    run = find_run(id)
    seq_len = run.data.seq_len if run.data else None
    known = {"sequence length": seq_len, "batch": run.batch_tokens, "number of tokens": run.tokens}
    missing = [name for name, value in known.items() if value is None]
    if seq_len is None or run.batch_tokens is None or run.tokens is None:
        raise InputError(f"{id}: no {' and no '.join(missing)} is published; plan a recipe: leaven new --from {id}")
    model = published_blueprint(run.arch, seq_len)
    model = replace(model, vocab_size=-(-model.vocab_size // 128) * 128)
    cluster = parse_cluster(gpus)
    asked, micro_batch = parse_layout(layout, cluster.gpus, model) if layout else (None, None)
    job = Job(
        model,
        _sequences(run.batch_tokens, seq_len) * seq_len,
        cluster,
        micro_batch,
        code=_MEGATRON_FLASH if moments == "adam" else with_moments(_MEGATRON_FLASH, moments),
        by_leaven=False,
        compile=asked is not None and asked.compile,
    )
    return plan_job(job, run.tokens, asked)


def _sequences(batch_tokens: int, seq_len: int) -> int:
    """Of a batch that was published as a round number of tokens the roundest count that is within 5%: 16M tokens in
    sequences of 8,192 are 2,048."""
    count = batch_tokens / seq_len
    if count == int(count):
        return int(count)
    units = [2**n for n in range(20, -1, -1)]
    near = [round(count / unit) * unit for unit in units]
    return next((sequences for sequences in near if abs(sequences / count - 1) <= 0.05), max(round(count), 1))
