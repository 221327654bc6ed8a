"""Import of recipes from other configurations, and from leaven's own exports."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as sampled
from hypothesis import settings
from hypothesis import strategies as st
from tests.conftest import TINY
from tests.errors import refused
from tests.interop.configs.recipes import FAMILIES, MIXTURES, WINDOWED, megatron_like

from leaven.errors import InputError
from leaven.interop.configs import from_megatron, from_transformers
from leaven.interop.configs.export import export, write
from leaven.recipe.files import parse_recipe, render
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table

BLOOM = """\
#!/bin/bash
# as bigscience wrote it
NHIDDEN=14336; NLAYERS=70
SEQ_LEN=2048
export TRAIN_SAMPLES=220_000_000
GPT_ARGS=" \\
    --num-layers $NLAYERS --hidden-size ${NHIDDEN} --num-attention-heads ${NHEADS:-112} \\
    --seq-length $SEQ_LEN --max-position-embeddings $SEQ_LEN \\
    --micro-batch-size 2 --global-batch-size 2048 --rampup-batch-size 192 16 9_765_625 \\
    --train-samples $TRAIN_SAMPLES \\
    --tokenizer-name-or-path $TOKENIZER --init-method-std 0.0048 \\
    --attention-dropout 0 --hidden-dropout 0.0 --bf16 --seed 42 \\
    "
OPTIMIZER_ARGS=(
  --optimizer adam   # the usual
  --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
  '--lr' 6e-5 --min-lr 6e-6 --lr-decay-style cosine
  --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105
  --clip-grad 1.0 --weight-decay $WD )
torchrun --nnodes $(scontrol show) \\
  pretrain_gpt.py $GPT_ARGS "${OPTIMIZER_ARGS[@]}" --save "$CKPT/x" --vocab-size=250680
"""


def test_a_megatron_script_with_variables_and_arrays() -> None:
    found = from_megatron.read(BLOOM, "tr11.sh", "bloom")
    recipe = found.recipe
    shape = recipe.model
    assert (shape.n_layers, shape.d_model, shape.n_heads, shape.d_ff) == (70, 14_336, 112, 57_344)
    assert (shape.norm, shape.bias, shape.tied_embeddings, shape.activation) == ("layernorm", True, True, "gelu")
    assert shape.vocab_size == 250_752  # padded to 128
    assert recipe.data.tokens == 220_000_000 * 2048
    assert recipe.batch.tokens == 2048 * 2048
    assert recipe.batch.ramp is not None
    assert recipe.batch.ramp.start_tokens == 192 * 2048
    assert recipe.batch.ramp.over_tokens == 9_765_625 * 2048
    assert recipe.schedule.warmup_tokens == 183_105 * 2048
    assert (recipe.hyperparameters.lr, recipe.schedule.min_lr_ratio) == (6e-5, 0.1)
    assert recipe.hyperparameters.weight_decay == 0.01
    assert "$WD is unknown" in recipe.why["hyperparameters.weight_decay"]
    assert "parses and ignores" in recipe.why["batch.ramp"]
    assert "--tokenizer-name-or-path" in found.unread
    out = parameter_table(recipe)["layers.3.mlp.out.weight"]
    assert out.init_std == pytest.approx(0.0048 / 140**0.5)
    assert parse_recipe(render(recipe), "x") == recipe


MINIMAL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128"
EXPERTS = "--num-experts 8 --disable-bias-linear"


def test_missing_flags_are_estimated_and_listed() -> None:
    found = from_megatron.read(MINIMAL.replace(" --", "\n--"), "args.txt", "x")
    recipe = found.recipe
    assert recipe.hyperparameters.beta2 == 0.999
    assert recipe.model.dropout == 0.1
    told = "\n".join(found.unknown)
    assert re.findall(r"^[\w.]+", told, re.MULTILINE) == [
        "model.vocab_size", "layout.dp", "data.tokens", "batch.tokens", "hyperparameters.lr", "data.source",
    ]  # fmt: skip
    assert recipe.why["hyperparameters.lr"].startswith("not in args.txt: the peak of ")


def test_steps_and_fractions_become_tokens() -> None:
    text = f"{MINIMAL} --global-batch-size 8 --train-iters 1000 --lr 1e-3 --lr-warmup-fraction 0.05 --swiglu"
    recipe = from_megatron.read(f"{text} --vocab-size 500 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt "
                                "--lr-wsd-decay-iters 200", "a", "x").recipe  # fmt: skip
    assert recipe.data.tokens == 1000 * 8 * 128
    assert recipe.schedule.warmup_tokens == 50 * 8 * 128
    assert (recipe.schedule.decay, recipe.schedule.decay_ratio) == ("wsd", 0.2)
    assert recipe.model.d_ff == 128  # 4 x 64 x 2 / 3 = 170, down to 64s
    ramped = from_megatron.read(f"{text} --rampup-batch-size 2 2 300", "a", "x").recipe
    assert ramped.steps == 1000
    stepped = text.replace("--global-batch-size 8", "--step-batch-size-schedule '0:2 0.1M:4 1M:8'")
    recipe = from_megatron.read(stepped, "a", "x").recipe
    assert [stage.tokens for stage in recipe.batch.stages] == [256, 512, 1024]
    assert recipe.batch.stages[1].from_tokens == 99_968  # 100,000 in whole samples of 128


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--num-experts 8", "--num-experts: leaven supports only experts without biases; add --disable-bias-linear"),
        ("--num-experts 8 --moe-expert-capacity-factor 1", "leaven does not have experts that drop tokens"),
        (
            f"{EXPERTS} --moe-layer-freq 2",
            "supports only patterns in which the layers without experts come first, such as",
        ),
        (f"{EXPERTS} --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 48", "only multiples of"),
        (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "sinkhorn: leaven supports only seq_aux_loss,"),
        (f"{EXPERTS} --expert-model-parallel-size 8 --pipeline-model-parallel-size 2", "needs 16 processes"),
        ("--multi-latent-attention", "leaven does not have multi-latent attention"),
        ("--optimizer sgd", "--optimizer sgd: leaven supports only adam"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy full",
            "-strategy full: leaven supports only no_shard,",
        ),
        ("--data-parallel-sharding-strategy full", "--data-parallel-sharding-strategy full: leaven supports only"),
        ("--recompute-granularity some", "--recompute-granularity some: leaven supports only full, selective"),
        ("--lr nan", "--lr nan must be a finite number"),
        ("--lr", "--lr has no value"),
        ("--num-attention-heads 5", "is not a multiple of --num-attention-heads 5"),
        ("--num-attention-heads 0", "--num-attention-heads 0 must be at least 1"),
        ("--global-batch-size 8 --rampup-batch-size 3 2 100", "not a batch that leaven supports"),
        ("--global-batch-size 8 --rampup-batch-size 2 2.5 300", "--rampup-batch-size: 2.5 is not a whole number"),
        ("--step-batch-size-schedule 5", "write it as TOKENS:BATCH"),
        ("--bf16 --fp16", "--bf16 and --fp16: these are two precisions; remove one"),
        ("--mtp-num-layers 1", "--mtp-num-layers 1: leaven does not have multi-token prediction"),
        ("--mtp_num_layers=1", "--mtp-num-layers 1: leaven does not have multi-token prediction"),
        (f"{EXPERTS} --moe-router-num-groups 4", "--moe-router-num-groups 4: leaven does not have groups of"),
        ("--group-query-attention --num-query-groups $G", "$G, which is unknown until the script runs"),
        ("--swiglu --squared-relu", "--swiglu and --squared-relu: these are two activations; remove one"),
        ("--ffn-hidden-size $FFN", "$FFN, which is unknown until the script runs; write the number"),
        ("--save 'x", "leaven cannot read line 1 (unmatched ')"),
        ("--window-size 8", "--window-size 8: leaven supports only LEFT,0"),
        ("--window-size 8,0 --window-attn-skip-freq 0", "all layers have a window except every N-th layer"),
        (f"--window-size 8,0 --window-attn-skip-freq '[1]*{'9' * 5000}'", "or a pattern of 2 layers"),
        ("--num-layers 1000000000 --window-size 3,0", "--num-layers: leaven supports at most 2,000 layers"),
        (f"{EXPERTS} --num-layers 1000000000 --moe-layer-freq '([0]*1+[1]*999999)*1000'", "at most 2,000 layers"),
        (f"{EXPERTS} --moe-layer-freq '([0]*1+[{'1,' * 50_000}1]*999999)*999999'", "without experts come first"),
    ],
)
def test_unsupported_megatron_flags_are_refused(more: str, says: str) -> None:
    with refused("args.sh: ", says):
        from_megatron.read(f"{MINIMAL} --vocab-size 512 {more}", "args.sh", "x")


@pytest.mark.parametrize(
    "more",
    [
        "--num-experts 0 --moe-router-topk 2",  # Megatron then sets no experts
        "--mtp-num-layers 0",
        "--rotary-seq-len-interpolation-factor 1",
        "--moe-router-num-groups 1 --moe-router-group-topk 1",
    ],
)
def test_values_that_turn_a_part_off_are_read(more: str) -> None:
    found = from_megatron.read(f"{MINIMAL} --vocab-size 512\n{more}", "args.sh", "x")
    assert found.recipe.model == from_megatron.read(f"{MINIMAL} --vocab-size 512", "args.sh", "x").recipe.model
    assert found.unread == ()


def test_grouped_queries_have_one_group_unless_the_script_gives_a_number() -> None:
    recipe = from_megatron.read(f"{MINIMAL} --vocab-size 512 --group-query-attention", "args.sh", "x").recipe
    assert recipe.model.n_kv_heads == 1
    assert recipe.why["model.n_kv_heads"] == "Megatron's default of --num-query-groups, with --group-query-attention"


@pytest.mark.parametrize(
    ("flags", "steps", "why"),
    [
        ("--train-iters 1000 --lr-warmup-iters 333 --lr-warmup-samples 0", 333, "--lr-warmup-iters"),
        ("--train-iters 1000 --lr-warmup-fraction 0.1 --lr-warmup-iters 0", 100, "--lr-warmup-fraction"),
        ("--train-samples 8000 --lr-warmup-samples 0 --lr-warmup-fraction 0.1", 100, "--lr-warmup-fraction"),
        ("--train-samples 8000 --lr-warmup-samples 80 --lr-warmup-iters 0", 10, "--lr-warmup-samples"),
        ("--train-iters 1000 --lr-warmup-iters 0", 0, "--lr-warmup-iters"),
    ],
)
def test_a_warmup_flag_of_0_leaves_the_other_one(flags: str, steps: int, why: str) -> None:
    recipe = from_megatron.read(f"{MINIMAL} --global-batch-size 8 {flags}", "args.sh", "x").recipe
    assert recipe.schedule.warmup_tokens == steps * 8 * 128
    assert recipe.why["schedule.warmup_tokens"] == why


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        ("--train-iters 1000 --lr-warmup-iters 10", "--lr-warmup-iters needs the --global-batch-size"),
        ("--global-batch-size 8 --lr-warmup-fraction 0.1", "--lr-warmup-fraction needs the number of training steps"),
    ],
)
def test_a_warmup_without_batch_or_duration_is_listed(flags: str, needs: str) -> None:
    found = from_megatron.read(f"{MINIMAL} {flags}", "args.sh", "x")
    assert found.recipe.schedule.warmup_tokens == 0
    assert f"schedule.warmup_tokens: 0 is used, because {needs}" in found.unknown


@pytest.mark.parametrize(
    ("strategy", "zero"),
    [(None, 0), ("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3), ("$SHARDING", 0)],
)
def test_sharding_strategies_of_megatron_fsdp(strategy: str | None, zero: int) -> None:
    more = f"--data-parallel-sharding-strategy {strategy}" if strategy else ""
    text = f"{MINIMAL} --vocab-size 512 --use-distributed-optimizer --use-megatron-fsdp {more}"
    found = from_megatron.read(text, "args.sh", "x", ranks=2)
    assert found.recipe.layout.zero == zero
    assert any("$SHARDING is unknown" in line for line in found.unknown) == (strategy == "$SHARDING")


SHAPE = f"{MINIMAL} --vocab-size 512"


def test_experts_on_the_processes_of_ranks() -> None:
    text = f"{MINIMAL} --vocab-size 512 {EXPERTS} --moe-aux-loss-coeff 0.02"
    found = from_megatron.read(f"{text} --expert-model-parallel-size 4", "args.sh", "x", ranks=8)
    assert (found.recipe.layout.ep, found.recipe.layout.dp) == (4, 8)
    assert found.recipe.model.experts is not None
    assert found.recipe.model.experts.balance_loss == 0.02
    assert [line for line in found.unread if "-type aux_loss: leaven supports only seq_aux_loss" in line]
    with refused("args.sh: ", "needs 4 processes or a multiple of that"):
        from_megatron.read(f"{text} --expert-model-parallel-size 4", "args.sh", "x", ranks=6)


def test_flags_of_megatron_deepspeed_and_older_versions() -> None:
    text = f"{MINIMAL} --vocab-size=512 --embed-layernorm --glu-activation swiglu --add-qkv-bias"
    found = from_megatron.read(f"{text} --layernorm-epsilon 1e-6", "args.sh", "x")
    shape = found.recipe.model
    assert (shape.vocab_size, shape.embedding_norm, shape.activation, shape.bias) == (512, True, "swiglu", True)
    assert (shape.norm_eps, shape.d_ff) == (1e-6, 256)  # its gated units are as wide as plain ones
    assert found.unread == ()
    qwen2 = "--disable-bias-linear --add-qkv-bias --position-embedding-type rope --rotary-percent 0.5"
    shape = from_megatron.read(f"{MINIMAL} --vocab-size 512 {qwen2}", "args.sh", "x").recipe.model
    assert (shape.bias, shape.attention_bias, shape.rotary_fraction) == (False, "qkv", 0.5)
    windows = {"": (8, 0), "2": (8, 2), "'([1]*1+[0]*1)*1'": (8, 2), "[1,1]": (8, 0), "1": (None, 0)}
    for skip, expected in windows.items():
        given = "--window-size (7,0)" + (f" --window-attn-skip-freq {skip}" if skip else "")
        shape = from_megatron.read(f"{MINIMAL} --vocab-size 512 {given}", "args.sh", "x").recipe.model
        assert (shape.window, shape.global_every) == expected
    ignored = from_megatron.read(f"{MINIMAL} --vocab-size 512 --num-query-groups 2", "args.sh", "x")
    assert ignored.recipe.model.n_kv_heads == 4
    assert ignored.unread == ("--num-query-groups: Megatron reads it only with --group-query-attention",)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--min-lr 1e-4 --decoupled-lr 1e-2 --decoupled-min-lr 1e-3", None),
        ("--min-lr 1e-4 --decoupled-lr 1e-2 --decoupled-min-lr 1e-5", "final lr 1e-05 of embedding"),
        ("--min-lr 1e-4 --decoupled-lr 1e-2", "final lr 0.0001 of embedding"),  # Megatron takes --min-lr for all
        ("--reset-position-ids --reset-attention-mask --eod-mask-loss", None),
        ("--reset-position-ids --reset-attention-mask", "no --eod-mask-loss: with isolated documents"),
        ("--eod-mask-loss", "--eod-mask-loss: with packed documents"),
        ("--reset-attention-mask", "--reset-attention-mask alone"),
        ("--max-position-embeddings 128", None),
        ("--max-position-embeddings 256", "--max-position-embeddings 256"),
        ("--max-position-embeddings 256 --position-embedding-type rope", "--max-position-embeddings"),
        ("--position-embedding-type rope --use-rotary-position-embeddings", None),
        ("--no-bias-gelu-fusion", "--no-bias-gelu-fusion: exact gelu"),
        ("--openai-gelu", None),
        ("--no-bias-gelu-fusion --swiglu", "--no-bias-gelu-fusion"),  # a kernel
        ("--window-size -1,0", None),
        ("--global-batch-size 8 --train-iters 100 --lr-decay-iters 100", None),
        ("--global-batch-size 8 --train-iters 100 --lr-decay-iters 50", "--lr-decay-iters: 51,200 tokens"),
        ("--global-batch-size 8 --train-iters 100 --train-samples 80", "--train-iters"),
        ("--global-batch-size 8 --train-iters 100 --lr-warmup-iters 5 --lr-warmup-samples 9", "--lr-warmup-iters"),
        ("--step-batch-size-schedule 0:2 --rampup-batch-size 2 2 300", "--rampup-batch-size"),
        ("--use-megatron-fsdp --use-distributed-optimizer", None),
    ],
)
def test_what_leaven_cannot_take_from_megatron_is_listed(flags: str, says: str | None) -> None:
    unread = from_megatron.read(f"{MINIMAL} --vocab-size 512 --lr 1e-3 {flags}", "args.sh", "x").unread
    assert len(unread) == (says is not None)
    assert says is None or unread[0].startswith(says)


# Round trips ------------------------------------------------------------------------------------------------------

COMPUTED = ("model", "batch", "schedule", "data", "precision")


def assert_same(ours: Recipe, found: Recipe, skip: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Assert that two recipes are equal in all values that both formats have, including the resolved table."""
    for part in COMPUTED:
        left, right = (getattr(each, part).model_dump() for each in (ours, found))
        for key, value in left.items():
            if f"{part}.{key}" in {"data.source", "data.tokenizer", "data.corrupt_share", "batch.micro_batch"} | skip:
                continue
            if key == "decay_ratio" and ours.schedule.decay != "wsd":
                continue
            if key == "rope_theta" and ours.model.positions != "rope":
                continue
            # The cooldown is a whole number of samples there, or of steps.
            near = ours.batch.tokens / ours.data.tokens if key == "decay_ratio" else None
            expected = pytest.approx(value, rel=1e-6, abs=near) if isinstance(value, float) else value
            assert right[key] == expected, f"{part}.{key}"
    assert found.hyperparameters.grad_clip == ours.hyperparameters.grad_clip
    for left, right in zip(parameter_table(ours).rows, parameter_table(found).rows, strict=True):
        for quantity in ("init_mean", "init_std", "lr", "weight_decay", "beta1", "beta2", "eps", "multiplier"):
            assert getattr(right, quantity) == pytest.approx(getattr(left, quantity), rel=1e-6), (left.name, quantity)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """Return numbers with six digits."""
    return st.floats(low, high).map(lambda value: float(f"{value:.6g}"))


VALUES = st.fixed_dictionaries(
    {
        "hyperparameters.lr": numbers(1e-5, 0.1),
        "hyperparameters.init_std": numbers(1e-3, 1.0),
        "hyperparameters.weight_decay": numbers(0, 1),
        "hyperparameters.beta2": numbers(0.5, 0.9999),
        "hyperparameters.eps": numbers(1e-12, 1e-4),
        "hyperparameters.grad_clip": numbers(0, 4),
        "schedule.min_lr_ratio": numbers(0, 1),
        "schedule.warmup_tokens": st.integers(1, 9).map(lambda n: n * 256),
        "data.tokens": st.integers(10, 60).map(lambda n: n * 256),
        "data.seed": st.integers(1, 99),  # 0 is another one in Megatron
        "model.norm_eps": numbers(1e-8, 1e-3),
        "precision.compute": st.sampled_from(["fp32", "bf16", "fp16"]),
    }
)


def base() -> Recipe:
    return parse_recipe(TINY, "tiny.toml")


@settings(max_examples=12)
@sampled(
    values=VALUES,
    family=st.sampled_from(["llama", "qwen3", "gpt2", "neox", "windowed", *MIXTURES]),
    decay=st.sampled_from(["cosine", "linear", "wsd", "inverse_sqrt", "constant"]),
    ramp=st.booleans(),
)
def test_round_trip_through_megatron(values: dict[str, Any], family: str, decay: str, ramp: bool) -> None:
    steps = {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 1_000}
    more = {"schedule.decay": decay} | ({"batch.ramp": steps} if ramp else {})
    recipe = megatron_like(base().replace((FAMILIES | MIXTURES | {"windowed": WINDOWED})[family] | values | more))
    exported = export("megatron", recipe)
    assert exported.losses == []
    found = from_megatron.read(exported.files[""], "args.sh", "tiny").recipe
    assert_same(recipe, found, {"batch.ramp", "batch.stages"})
    assert [each.batch_tokens for each in found.batches.segments] == [
        each.batch_tokens for each in recipe.batches.segments
    ]
    assert found.steps == recipe.steps


@settings(max_examples=12)
@sampled(
    values=VALUES,
    family=st.sampled_from(["llama", "qwen3", "neox"]),
    decay=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
)
def test_round_trip_through_transformers(
    tmp_path_factory: Any, values: dict[str, Any], family: str, decay: str
) -> None:
    more = {"schedule.decay": decay, "model.dropout": 0.0}
    if decay == "wsd":  # with another floor its warm-up differs
        more["schedule.min_lr_ratio"] = 0.0
        more["data.tokens"] = 40 * 256
    recipe = base().replace(FAMILIES[family] | values | more)
    exported = export("transformers", recipe)
    assert exported.losses == []
    folder = tmp_path_factory.mktemp("hf") / "out"
    write(exported, folder)
    found = from_transformers.read(folder, "tiny")
    skip = {"schedule.min_lr_ratio"} if decay == "constant" else set()
    assert_same(recipe, found.recipe, skip)
    line = "parameters.json: settings of single parameters, and perhaps a schedule; leaven reads"
    assert f"{line} training_args.json instead" in found.unread


def test_files_with_other_values_beside_an_export_are_listed(tmp_path: Path) -> None:
    for target in ("automodel", "megatron-module"):
        write(export(target, base()), tmp_path / target)
    found = from_transformers.read(tmp_path / "automodel", "x").unread
    assert [line.partition(":")[0] for line in found] == ["parameters.json", "automodel.yaml"]
    assert all(line.endswith("; leaven reads config.json instead") for line in found)
    flags = (tmp_path / "megatron-module/args.sh").read_text()
    assert "the values that leaven_table.py sets for single parameters; the recipe has the values of the flags" in (
        from_megatron.read(flags, "args.sh", "x").unread
    )


def test_recomputation_under_its_new_name(tmp_path: Path) -> None:
    for old in ({}, {"gradient_checkpointing": True}):
        arguments = {"max_steps": 10, "activation_checkpointing": True}
        found = from_transformers.read(folder(tmp_path, CONFIG, arguments | old), "x")
        assert (found.recipe.layout.recompute, found.unread) == ("full", ())


def test_a_tokenizer_and_dropout_of_another_kind_are_listed(tmp_path: Path) -> None:
    there = folder(tmp_path, CONFIG | {"attention_dropout": 0.1}, {"max_steps": 10})
    (there / "tokenizer.json").touch()
    found = from_transformers.read(there, "x")
    assert found.recipe.model.dropout == 0.1
    assert set(found.unread) == {
        "attention_dropout: leaven's dropout also applies to the embedding and the branches",
        "tokenizer.json: the model's tokenizer; to use it, set data.tokenizer",
    }


LAYOUTS = [
    {"layout.dp": 2, "layout.tp": 2, "layout.pp": 2, "layout.zero": 1},
    {"layout.dp": 2, "batch.micro_batch": 4, "layout.recompute": "full"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_round_trip_keeps_batch_and_tokens_of_every_layout(tmp_path: Path, layout: dict[str, Any]) -> None:
    recipe = base().replace(layout | {"data.tokens": 300 * 256, "data.seed": 1})
    alike = megatron_like(recipe)
    write(export("transformers", recipe), tmp_path / "hf")
    script = export("megatron", alike).files[""]
    imported = from_transformers.read(tmp_path / "hf", "tiny").recipe
    scripted = from_megatron.read(script, "args.sh", "tiny", recipe.layout.ranks).recipe
    for found, ours in ((imported, recipe), (scripted, alike)):
        assert_same(ours, found)
        assert (found.data.tokens, found.batch.tokens) == (recipe.data.tokens, recipe.batch.tokens)
        assert (found.schedule.warmup_tokens, found.steps) == (recipe.schedule.warmup_tokens, recipe.steps)
        assert found.layout.dp == recipe.layout.dp
        if "batch.micro_batch" in layout:
            assert found.batch.micro_batch == recipe.batch.micro_batch


def test_ranks_scale_batch_and_tokens(tmp_path: Path) -> None:
    arguments = {"max_steps": 100, "per_device_train_batch_size": 4}
    path = folder(tmp_path, CONFIG, arguments)
    alone, eight = from_transformers.read(path, "x"), from_transformers.read(path, "x", 8)
    assert any("--ranks N" in line for line in alone.unknown)
    assert not any("layout.dp" in line for line in eight.unknown)
    assert eight.recipe.data.tokens == 8 * alone.recipe.data.tokens == 8 * 100 * 4 * 128
    with pytest.raises(InputError, match="--ranks 3: tp x pp x cp is 2"):
        from_megatron.read(f"{MINIMAL} --tensor-model-parallel-size 2", "args.sh", "x", 3)


@pytest.mark.parametrize("file", ["config.json", "training_args.json"])
def test_a_key_that_is_there_twice_is_refused(tmp_path: Path, file: str) -> None:
    path = folder(tmp_path, CONFIG, {"max_steps": 100})
    text = (path / file).read_text()
    (path / file).write_text(text.replace("{", '{"seed": 7, "seed": 8, ', 1))
    with refused(f'{path / file}: cannot be read as JSON (one JSON object has the key "seed" 2 times; keep one)'):
        from_transformers.read(path, "x")


@pytest.mark.parametrize("family", sorted(MIXTURES.keys() - {"deepseek-v3"}))  # whose loss transformers does not have
def test_experts_come_back_from_transformers(tmp_path: Path, family: str) -> None:
    recipe = base().replace(MIXTURES[family])
    write(export("transformers", recipe), tmp_path / "hf")
    imported = from_transformers.read(tmp_path / "hf", "tiny")
    ours, found = recipe.model.experts, imported.recipe.model.experts
    assert ours is not None
    assert found is not None
    assert found.balance_loss == pytest.approx(ours.balance_loss)
    same = {"balance_loss": 0.01, "router_z_loss": 0.0}  # there is no z-loss in transformers
    assert found.model_copy(update=same) == ours.model_copy(update=same)
    document = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(document | {"output_router_logits": False}))
    unknown = " ".join(from_transformers.read(tmp_path / "hf", "tiny").unknown)
    assert ("model.experts.balance_loss" in unknown) is (ours.balance == "loss")


# transformers -----------------------------------------------------------------------------------------------------


def folder(path: Path, config: dict[str, Any] | None, arguments: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    for name, document in (("config.json", config), ("training_args.json", arguments)):
        if document is not None:
            (path / name).write_text(json.dumps(document))
    return path


CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
          "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 128}  # fmt: skip


def test_an_error_has_the_name_of_the_file_that_was_given(tmp_path: Path) -> None:
    renamed = folder(tmp_path, CONFIG) / "args.json"
    for document, says in (
        ({"learning_rate": 1e-3}, "has neither"),
        (CONFIG | {"hidden_act": "x"}, "activation 'x'"),
    ):
        renamed.write_text(json.dumps(document))
        with pytest.raises(InputError, match=f"^{re.escape(str(renamed))}: {says}"):
            from_transformers.read(renamed, "x")


def test_config_json_with_and_without_training_arguments(tmp_path: Path) -> None:
    alone = from_transformers.read(folder(tmp_path, CONFIG) / "config.json", "x")
    assert [line.split(":")[0] for line in alone.unknown] == [
        "model.seq_len",
        "schedule.decay, schedule.min_lr_ratio, precision.compute, hyperparameters.weight_decay, "
        "hyperparameters.beta1, hyperparameters.beta2, hyperparameters.eps, hyperparameters.grad_clip, data.seed",
        "data.tokens", "batch.tokens", "hyperparameters.lr", "schedule.warmup_tokens", "data.source",
    ]  # fmt: skip
    assert alone.recipe.why["schedule.decay"].endswith("config.json: leaven's default")
    assert alone.recipe.why["model.d_model"] == "hidden_size of config.json"
    arguments = {"max_steps": 100, "per_device_train_batch_size": 4, "learning_rate": 1e-4, "warmup_steps": 0.1,
                 "lr_scheduler_type": "cosine", "report_to": "none", "label_smoothing_factor": 0.1}  # fmt: skip
    folder(tmp_path, None, arguments)
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "training_args.json"):
        found = from_transformers.read(path, "x")
        recipe = found.recipe
        assert (recipe.batch.tokens, recipe.data.tokens) == (4 * 128, 100 * 4 * 128)
        assert recipe.schedule.warmup_tokens == 10 * 4 * 128
        assert (recipe.hyperparameters.beta2, recipe.hyperparameters.weight_decay) == (0.999, 0.0)
        assert "default" in recipe.why["hyperparameters.beta2"]
        assert found.unread == ("label_smoothing_factor",)
        assert "model.seq_len: 128 is used, the longest sequence of the model; if you train" in found.unknown[0]
    exported = from_transformers.read(folder(tmp_path, CONFIG | {"leaven": {"dp": 1}}), "x")
    assert not any(line.startswith("model.seq_len") for line in exported.unknown)


def test_a_mixture_of_experts_is_compared_with_mixtures(tmp_path: Path) -> None:
    """The config of OLMoE 1B-7B, of which a token uses 1.28 B parameters."""
    config = {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
              "num_experts": 64, "num_experts_per_tok": 8, "num_key_value_heads": 16}  # fmt: skip
    why = from_transformers.read(folder(tmp_path, config), "x").recipe.why
    for path in ("hyperparameters.lr", "schedule.warmup_tokens"):
        assert "olmoe-1b-7b" in why[path]


def assert_trainer_defaults(found: Any) -> None:
    values, schedule = found.recipe.hyperparameters, found.recipe.schedule
    assert (schedule.decay, schedule.min_lr_ratio, schedule.warmup_tokens) == ("linear", 0.0, 0)
    assert (values.weight_decay, values.beta2, values.grad_clip.limit) == (0.0, 0.999, 1.0)
    (listed,) = [line for line in found.unknown if line.endswith("the Trainer's defaults are used")]
    assumed = ("weight_decay", "beta2", "grad_clip", "schedule.decay", "min_lr_ratio", "warmup_tokens", "data.seed")
    assert all(key in listed for key in assumed)


def test_a_model_that_the_trainer_saved_without_its_state(tmp_path: Path) -> None:
    folder(tmp_path, CONFIG)
    (tmp_path / "training_args.bin").write_bytes(b"a pickle")
    found = from_transformers.read(tmp_path, "x", 2)
    assert_trainer_defaults(found)
    assert (found.recipe.batch.tokens, found.recipe.hyperparameters.lr) == (2 * 8 * 128, 5e-5)


@pytest.mark.parametrize(
    ("arguments", "batch", "micro_batch", "unread"),
    [
        ({"accelerator_config": {"split_batches": True}}, 12, 3, ()),
        ({"accelerator_config": {"split_batches": False}}, 24, 6, ()),
        ({"accelerator_config": "x.json"}, 24, 6,
         ("accelerator_config x.json: this file may change the batch size",)),
        ({"per_gpu_train_batch_size": 2}, 8, 2, ()),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}, 24, 6,
         ("gradient_accumulation_kwargs of accelerator_config",)),
    ],
)  # fmt: skip
def test_batches_that_are_split_or_of_older_versions(
    tmp_path: Path, arguments: dict[str, Any], batch: int, micro_batch: int, unread: tuple[str, ...]
) -> None:
    both = {"max_steps": 100, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    found = from_transformers.read(folder(tmp_path, CONFIG, both | arguments), "x", 2)
    assert (found.recipe.batch.tokens, found.recipe.batch.micro_batch) == (batch * 128, micro_batch)
    assert found.recipe.data.tokens == 100 * batch * 128
    assert found.unread == unread


def test_a_warmup_that_is_a_share_of_epochs(tmp_path: Path) -> None:
    arguments = {"num_train_epochs": 2, "warmup_ratio": 0.1, "max_steps": -1}
    recipe = from_transformers.read(folder(tmp_path, CONFIG, arguments), "x").recipe
    assert recipe.schedule.warmup_tokens == round(0.1 * recipe.data.tokens)


def test_no_norm_to_clip_to_is_no_clipping(tmp_path: Path) -> None:
    for norm, clip in ((None, 0), (0.5, 0.5)):
        recipe = from_transformers.read(folder(tmp_path, CONFIG, {"max_grad_norm": norm}), "x").recipe
        assert recipe.hyperparameters.grad_clip.limit == clip


def test_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    folder(tmp_path, CONFIG)
    log = [{"learning_rate": 0.0, "step": 1}, {"learning_rate": 3e-4, "step": 2}, {"eval_loss": 1.0, "step": 2}]
    state = {"max_steps": 100, "train_batch_size": 4, "log_history": log, "global_step": 2}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "training_args.bin").write_bytes(b"a pickle")
    found = from_transformers.read(tmp_path, "x", 2)
    assert (found.recipe.batch.tokens, found.recipe.data.tokens) == (2 * 4 * 128, 100 * 2 * 4 * 128)
    assert found.recipe.hyperparameters.lr == 3e-4
    assert any("gradient_accumulation_steps" in line for line in found.unknown)
    assert [line.split(":")[0] for line in found.unread] == ["training_args.bin"]
    assert_trainer_defaults(found)
    folder(
        tmp_path, None, {"max_steps": 7, "learning_rate": 1e-4, "label_smoothing_factor": 0.0, "num_train_epochs": 3}
    )
    argued = from_transformers.read(tmp_path, "x")
    assert (argued.recipe.data.tokens, argued.unread) == (7 * 8 * 128, ())
    (tmp_path / "training_args.json").unlink()
    faults: list[tuple[dict[str, Any], str]] = [
        (state | {"max_steps": -1}, "trainer_state.json: max_steps -1 must be at least 1"),
        (state | {"log_history": {"a": 1}}, "trainer_state.json: log_history must be a list"),
        (state | {"log_history": ["a"]}, "trainer_state.json: log_history must be a list"),
        ({}, "trainer_state.json: train_batch_size is missing"),
    ]
    for document, message in faults:
        (tmp_path / "trainer_state.json").write_text(json.dumps(document))
        with refused(message):
            from_transformers.read(tmp_path, "x")


def test_branch_ends_of_gpt2_start_smaller(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 4, "vocab_size": 512}
    rows = parameter_table(from_transformers.read(folder(tmp_path, config), "x").recipe)
    assert rows["layers.1.mlp.out.weight"].init_std == pytest.approx(0.02 / 4)
    assert rows["layers.1.mlp.in.weight"].init_std == 0.02


KWARGS = {"lr_scheduler_type": "cosine_with_min_lr"}


@pytest.mark.parametrize(
    ("config", "arguments", "says"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, None, "architecture MambaForCausalLM"),
        (CONFIG, {"learning_rate": "fast"}, "learning_rate fast must be a number"),
        (CONFIG, {"gradient_accumulation_steps": 1.5}, "must be a whole number"),
        (CONFIG, {"bf16": "False"}, "bf16 'False' must be true or false"),
        (CONFIG, {"weight_decay": 0.1, "adam_beta2": None}, "adam_beta2 is null; write a number"),
        (CONFIG, {"warmup_ratio": 1.0}, "warmup_ratio 1 is a share of the run in transformers 4"),
        (CONFIG, {"bf16": True, "fp16": True}, "bf16 and fp16 are two precisions; remove one"),
        (CONFIG, {"lr_scheduler_type": "reduce_lr_on_plateau"}, "leaven does not have this schedule"),
        (CONFIG, KWARGS | {"lr_scheduler_kwargs": {"min_lr_rate": [1]}}, "min_lr_rate [1] must be a number"),
        (CONFIG, KWARGS | {"lr_scheduler_kwargs": {"num_cycles": 1}}, "supports cosine_with_min_lr only with 0.5"),
        (CONFIG, {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 5},
         "per_device_train_batch_size 5 must be a multiple of the number of processes, 2,"),
        (None, {"learning_rate": 1.0}, "no config.json with the shape of a model is there"),
    ],
)  # fmt: skip
def test_unsupported_transformers_files_are_refused(tmp_path: Path, config: Any, arguments: Any, says: str) -> None:
    path = folder(tmp_path, config, arguments)
    with refused(says):
        from_transformers.read(path if config else path / "training_args.json", "x", 2)
