"""Imports a recipe from a list of Megatron-LM arguments.

``targets/megatron_flags.toml`` contains the flags, their defaults and the corresponding keys of a recipe.
"""

import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from leaven.errors import InputError
from leaven.interop.configs.draft import Draft, Imported, Settings, as_number
from leaven.interop.configs.megatron_arguments import TABLE, kind_of, parse_arguments
from leaven.recipe.batch import Batch, BatchSchedule
from leaven.recipe.files import validated
from leaven.recipe.shape import MAX_LAYERS, ModelShape


def read(text: str, origin: str, name: str, ranks: int | None = None) -> Imported:
    """Convert a shell script, or a list of Megatron's arguments, to a recipe called ``name``.

    ``origin`` names the script in messages. ``ranks`` is the number of processes of the run, if known.
    Raise InputError if a flag is missing, or if leaven does not support its value.
    """
    given = _read_flags(text, Draft(origin))
    draft = given.draft
    given.choice("optimizer")
    for flag in ("lr", "init-method-std"):  # other values are divided by these
        if flag in given and given[flag] <= 0:
            raise InputError(f"{origin}: --{flag} {given[flag]:g} must be above 0")
    _sizes(given)
    _kind(given)
    _documents(given)
    if "window-size" in given:
        _window(given)
    if "num-experts" in given:
        _experts(given)
    given.put_all()
    shape = draft.shape()
    _modules(given, shape)
    _batch_and_duration(given, shape.seq_len)
    _schedule(given, shape.seq_len)
    _layout(given, ranks)
    _list_ignored(given)
    if "leaven_table" in text:
        draft.unread.append(
            "the values that leaven_table.py sets for single parameters; the recipe has the values of the flags"
        )
    return draft.finish(name, shape)


def _read_flags(text: str, draft: Draft) -> Settings:
    """Return the flags that leaven reads from a training script. Add other flags to ``draft.unread``, and values that
    are unknown until the script runs to ``draft.unknown``."""
    origin = draft.origin
    flags = Settings(draft, origin, TABLE["flags"], default="Megatron's default of --{}", prefix="--")
    parsed = parse_arguments(text, origin)
    for flag, words in parsed.flags.items():
        kind = kind_of(flag)
        if flag in parsed.unknown and kind:
            flags.unset[flag] = parsed.unknown[flag]
            draft.unknown.append(f"--{flag}: {flags.unset[flag]} is unknown until the script runs")
            continue
        for unsupported, what in TABLE["unsupported"].items():
            if fnmatchcase(flag.replace("_", "-"), unsupported):
                raise InputError(f"{origin}: --{flag}: leaven does not have {what}")
        if kind is None:
            draft.unread.append(f"--{flag}")
        elif kind == "switch":
            flags.given[flag] = True
        elif not words:
            raise InputError(f"{origin}: --{flag} has no value")
        else:
            flags.given[flag] = " ".join(words) if kind == "word" else as_number(words[0], f"{origin}: --{flag}")
            _require_neutral(flags, flag)
    for name in parsed.open:
        unused = name.endswith("(no command uses it)")
        what = "not read; add them if the run has them" if unused else "unknown until the script runs"
        draft.unknown.append(f"{name}: its flags are {what}")
    if parsed.defaults:
        names = ", ".join(parsed.defaults)
        draft.unknown.append(
            f"{names}: leaven uses the script's default; the environment or an argument may set another value"
        )
    if flags.given.get("num-experts") == 0:  # Megatron reads 0 as no experts
        del flags.given["num-experts"]
    return flags


def _require_neutral(flags: Settings, flag: str) -> None:
    row = flags.table[flag]
    if "neutral" in row and flags[flag] != row["neutral"]:
        raise InputError(f"{flags.label(flag)} {flags.given[flag]:g}: leaven does not have {row['other']}")


def _list_ignored(given: Settings) -> None:
    """Add to ``draft.unread`` the given flags that have an effect and that no reason or note of the draft names."""
    draft = given.draft
    named = set(re.findall(r"--([a-z0-9-]+)", "\n".join([*draft.why.values(), *draft.unknown, *draft.unread])))
    for flag, value in given.given.items():
        row = given.table[flag]
        if flag not in named and "unused" not in row and value != row.get("neutral", row.get("default")):
            draft.unread.append(f"--{flag}")


def _sizes(given: Settings) -> None:
    """Set the sizes that follow from several flags: head dimension, key/value heads, d_ff and vocabulary."""
    if given["num-layers"] > MAX_LAYERS:  # patterns of layers, which are read before the shape, have this length
        raise InputError(f"{given.label('num-layers')}: leaven supports at most {MAX_LAYERS:,} layers")
    draft, heads, width = given.draft, given["num-attention-heads"], given["hidden-size"]
    own_head_size = "kv-channels" in given or "kv-channels" in given.unset
    if width % heads and not own_head_size:
        raise InputError(
            f"{given.origin}: --hidden-size {width} is not a multiple of --num-attention-heads {heads}; correct one, "
            "or add --kv-channels"
        )
    d_head = given["kv-channels"] if own_head_size else width // heads
    given.put("model.d_head", d_head, "kv-channels", "hidden-size")
    if heads * d_head != width:
        given.put("model.d_attention", heads * d_head, "kv-channels")
    if "group-query-attention" in given:
        own_groups = "num-query-groups" in given or "num-query-groups" in given.unset
        groups = given["num-query-groups"] if own_groups else 1
        draft.set("model.n_kv_heads", groups, f"{given.why('num-query-groups')}, with --group-query-attention")
    else:
        draft.set("model.n_kv_heads", heads, "--num-attention-heads, without --group-query-attention")
        if "num-query-groups" in given:
            draft.unread.append("--num-query-groups: Megatron reads it only with --group-query-attention")

    if "ffn-hidden-size" in given or "ffn-hidden-size" in given.unset:
        given.put("model.d_ff", given["ffn-hidden-size"], "ffn-hidden-size")
    elif "swiglu" in given:  # as in validate_args of Megatron's arguments.py
        why = "4 x hidden size x 2 / 3, rounded down to a multiple of 64, with --swiglu"
        draft.set("model.d_ff", int(4 * width * 2 / 3 / 64) * 64, why)
    else:
        draft.set("model.d_ff", 4 * width, "4 x hidden size: no --ffn-hidden-size")

    if "padded-vocab-size" in given:
        return
    if "vocab-size" in given:
        multiple = given["make-vocab-size-divisible-by"] * given["tensor-model-parallel-size"]
        padded = -(-given["vocab-size"] // multiple) * multiple
        why = given.why("make-vocab-size-divisible-by", "tensor-model-parallel-size")
        draft.set("model.vocab_size", padded, f"--vocab-size, padded to a multiple of {multiple} ({why})")
    else:
        draft.unknown.append("model.vocab_size: 50,304 (GPT-2's, padded) is used; set your tokenizer's size instead")
        draft.set("model.vocab_size", 50_304, "not in the file: the vocabulary of GPT-2's tokenizer, padded")


def _kind(given: Settings) -> None:
    """Set activation, biases, positions, dropout and precision in ``given.draft``."""
    draft = given.draft
    activations = {"swiglu": "swiglu", "squared-relu": "squared_relu"}
    found = {f"--{flag}": ours for flag, ours in activations.items() if flag in given}
    if "glu-activation" in given:  # Megatron-DeepSpeed's; it leaves --ffn-hidden-size at 4 x hidden size
        found["--glu-activation"] = given.choice("glu-activation")
    if len(set(found.values())) > 1:
        raise InputError(f"{given.origin}: {' and '.join(found)}: these are two activations; remove one")
    unfused = [f"--{flag}" for flag in ("no-bias-gelu-fusion", "disable-bias-linear") if flag in given]
    if not found and "openai-gelu" in given:
        found = {"--openai-gelu": "gelu"}
    elif not found and unfused:
        draft.unread.append(f"{' and '.join(unfused)}: exact gelu; leaven has only the tanh approximation")
    flag, ours = next(iter(found.items()), ("Megatron's default", "gelu"))
    draft.set("model.activation", ours, flag)
    if "add-qkv-bias" in given and "disable-bias-linear" in given:
        draft.set("model.attention_bias", "qkv", "--add-qkv-bias")
    elif "add-qkv-bias" in given:
        draft.set("model.bias", True, "--add-qkv-bias and no --disable-bias-linear")
    _positions(given)
    attention = given["attention-dropout"]
    if attention == given["hidden-dropout"]:
        given.put("model.dropout", attention, "hidden-dropout", "attention-dropout")
    else:
        draft.unread.append(f"--attention-dropout {attention:g}: leaven has one rate, and uses --hidden-dropout")
    if "bf16" in given and "fp16" in given:
        raise InputError(f"{given.origin}: --bf16 and --fp16: these are two precisions; remove one")
    compute = "bf16" if "bf16" in given else "fp16" if "fp16" in given else "fp32"
    given.put("precision.compute", compute, "bf16", "fp16")


def _positions(given: Settings) -> None:
    rotary = "use-rotary-position-embeddings" in given or given["position-embedding-type"] == "rope"
    if rotary:
        given.put("model.positions", "rope", "use-rotary-position-embeddings", "position-embedding-type")
        given.put("model.rotary_fraction", given["rotary-percent"], "rotary-percent")
    rows = given["max-position-embeddings" if "max-position-embeddings" in given else "seq-length"]
    if rows == given["seq-length"]:
        given.put("model.seq_len", rows, "seq-length", "max-position-embeddings")
    elif not rotary:
        given.draft.unread.append(f"--max-position-embeddings {rows:,}: leaven has as many positions as --seq-length")


def _documents(given: Settings) -> None:
    draft, flags = given.draft, ("reset-attention-mask", "reset-position-ids")
    alone = [flag for flag in flags if flag in given]
    if len(alone) == 2:
        given.put("data.documents", "isolated", *flags, "eod-mask-loss")
        if "eod-mask-loss" not in given:
            draft.unread.append(
                "no --eod-mask-loss: with isolated documents, leaven never counts the loss of the token after an end "
                "of text"
            )
        return
    given.put("data.documents", "packed", *flags)
    draft.unread += [f"--{flag} alone: leaven supports {' and '.join(flags)} only together" for flag in alone]
    if "eod-mask-loss" in given:
        draft.unread.append(
            "--eod-mask-loss: with packed documents, leaven also counts the loss of the token after an end of text"
        )


def _window(given: Settings) -> None:
    """Set ``model.window`` and ``model.global_every`` (every n-th layer has no window) from Megatron's flags."""
    written = given["window-size"]
    sides = re.fullmatch(r"\(?(-1|\d{1,9}),0\)?", written.replace(" ", ""))
    if not sides:
        raise InputError(
            f"{given.origin}: --window-size {written}: leaven supports only LEFT,0, where LEFT is the number of "
            "earlier tokens to which a token attends, or -1 for all"
        )
    skip, layers = given["window-attn-skip-freq"], given["num-layers"]
    number, pattern = re.fullmatch(r"[1-9]\d{0,5}", skip), _pattern(skip, layers)
    every = int(skip) if number else pattern.find("0") + 1
    with_window = "".join("0" if every and (layer + 1) % every == 0 else "1" for layer in range(layers))
    if skip and not number and pattern != with_window:
        raise InputError(
            f"{given.origin}: --window-attn-skip-freq {skip}: in leaven, all layers have a window except every "
            f"N-th layer; write the number N, or a pattern of {layers} layers"
        )
    if sides[1] == "-1" or every == 1:
        given.put("model.window", None, "window-size", "window-attn-skip-freq")
    else:
        given.put("model.window", int(sides[1]) + 1, "window-size")
        given.put("model.global_every", every, "window-attn-skip-freq")


def _pattern(word: str, layers: int) -> str:
    """Return the digits of a pattern, for example "011011" for ``([0]*1+[1]*2)*2``.

    Return "" if ``word`` is not such a pattern, or if it does not have exactly ``layers`` digits.
    """
    term = r"\[[01](?:,[01])*\](?:\*\d{1,6})?"
    found = re.fullmatch(rf"\(?({term}(?:\+{term})*)\)?(?:\*(\d{{1,6}}))?", re.sub(r"\s", "", word))
    if not found:
        return ""
    terms = re.findall(r"\[([01,]+)\](?:\*(\d+))?", found[1])
    once, times = [(bits.replace(",", ""), int(times or 1)) for bits, times in terms], int(found[2] or 1)
    if sum(len(bits) * number for bits, number in once) * times != layers:
        return ""
    return "".join(bits * number for bits, number in once) * times


def _experts(given: Settings) -> None:
    origin, draft = given.origin, given.draft

    def put(key: str, value: object, *flags: str) -> None:
        given.put(f"model.experts.{key}", value, *flags)

    if "disable-bias-linear" not in given:
        raise InputError(
            f"{origin}: --num-experts: leaven supports only experts without biases; add --disable-bias-linear"
        )
    own = "moe-ffn-hidden-size" in given
    width = given["moe-ffn-hidden-size"] if own else draft.values["model.d_ff"]
    put("d_expert", width, "moe-ffn-hidden-size" if own else "ffn-hidden-size")
    active = given["moe-router-topk"]
    put("active", active, "moe-router-topk")
    shared = given["moe-shared-expert-intermediate-size"]
    if shared % width:
        raise InputError(
            f"{origin}: --moe-shared-expert-intermediate-size {shared}: leaven supports only multiples of the width "
            f"of an expert, {width}"
        )
    put("shared", shared // width, "moe-shared-expert-intermediate-size")
    put("dense_layers", _dense_layers(given), "moe-layer-freq")
    router = given.choice("moe-router-score-function")
    put("router", router, "moe-router-score-function")
    normalise = active > 1 and (router == "sigmoid" or "moe-router-pre-softmax" not in given)
    put("normalise", normalise, "moe-router-pre-softmax", "moe-router-score-function")
    put("weight_scale", given["moe-router-topk-scaling-factor"], "moe-router-topk-scaling-factor")
    put("router_z_loss", given["moe-z-loss-coeff"], "moe-z-loss-coeff")
    kind, coefficient = given["moe-router-load-balancing-type"], given["moe-aux-loss-coeff"]
    if kind not in {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}:
        raise InputError(
            f"{origin}: --moe-router-load-balancing-type {kind}: leaven supports only seq_aux_loss, aux_loss, "
            "global_aux_loss and none"
        )
    bias, loss = "moe-router-enable-expert-bias" in given, kind != "none" and coefficient > 0
    balance = {(True, True): "both", (True, False): "bias", (False, True): "loss", (False, False): "none"}[bias, loss]
    put("balance", balance, "moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-router-enable-expert-bias")
    if bias:
        put("bias_step", given["moe-router-bias-update-rate"], "moe-router-bias-update-rate")
    if loss:
        put("balance_loss", coefficient, "moe-aux-loss-coeff")
    if loss and kind != "seq_aux_loss":
        draft.unread.append(
            f"--moe-router-load-balancing-type {kind}: leaven supports only seq_aux_loss, and uses it with "
            "--moe-aux-loss-coeff"
        )


def _dense_layers(given: Settings) -> int:
    """Return the number of layers without experts, which must be the first layers."""
    written, layers = given["moe-layer-freq"], given["num-layers"]
    if written.strip() == "1":
        return 0
    pattern = _pattern(written, layers)
    if not re.fullmatch("0*1+", pattern):
        raise InputError(
            f"{given.origin}: --moe-layer-freq {written}: leaven supports only patterns in which the layers "
            f"without experts come first, such as ([0]*1+[1]*{layers - 1})"
        )
    return pattern.count("0")


def _modules(given: Settings, shape: ModelShape) -> None:

    def multiply(quantity: str, modules: Sequence[str], value: float, why: str) -> None:
        for module in modules:
            given.draft.set(f"hyperparameters.modules.{module}.{quantity}", value, why)

    why = "Megatron divides this std by sqrt(2 n_layers)"
    multiply("init_std", shape.branch_ends, 1 / math.sqrt(2 * shape.n_layers), why)
    if "embedding-init-method-std" in given:
        relative = given["embedding-init-method-std"] / given["init-method-std"]
        modules = ["embedding", "positions"] if shape.positions == "learned" else ["embedding"]
        multiply("init_std", modules, relative, "--embedding-init-method-std / --init-method-std")
    if "lr" in given and "decoupled-lr" in given:
        modules = ["embedding"] if shape.tied_embeddings else ["embedding", "unembedding"]
        why = f"{given.why('decoupled-lr', 'decoupled-min-lr')} / --lr"
        multiply("lr", modules, given["decoupled-lr"] / given["lr"], why)
        floor = given["decoupled-min-lr" if "decoupled-min-lr" in given else "min-lr"]
        share = given["min-lr"] / given["lr"]
        if not math.isclose(floor, share * given["decoupled-lr"], rel_tol=1e-6):
            given.draft.unread.append(
                f"final lr {floor:g} of {' and '.join(modules)} (--decoupled-min-lr, by default --min-lr): in "
                f"leaven, all modules end at the same share of their peak lr, {share:g}"
            )


def _batch_and_duration(given: Settings, length: int) -> None:
    """Set the batch, its ramp or stages, and the number of training tokens. A sequence has ``length`` tokens."""
    draft = given.draft
    if "step-batch-size-schedule" in given:
        stages = _stages(given, length)
        given.put("batch.stages", stages, "step-batch-size-schedule")
        given.put("batch.tokens", stages[-1]["tokens"], "step-batch-size-schedule")
    elif "global-batch-size" in given:
        draft.set("batch.tokens", given["global-batch-size"] * length, "--global-batch-size x --seq-length")
        words = given["rampup-batch-size"].split()
        if words and len(words) != 3:
            draft.unknown.append(f"--rampup-batch-size {' '.join(words)}: needs START INCREMENT SAMPLES as numbers")
        elif words:
            label = given.label("rampup-batch-size")
            numbers = [as_number(word, label) for word in words]
            if wrong := next((word for word, each in zip(words, numbers, strict=True) if each % 1), None):
                raise InputError(f"{label}: {wrong} is not a whole number")
            sizes = [int(each) * length for each in numbers]
            ramp = dict(zip(("start_tokens", "increment_tokens", "over_tokens"), sizes, strict=True))
            why = "--rampup-batch-size, which Megatron-LM since April 2026 parses and ignores"
            draft.set("batch.ramp", ramp, why)
    parts = {path.removeprefix("batch."): value for path, value in draft.values.items() if path.startswith("batch.")}
    parts.pop("micro_batch", None)
    batch = validated(Batch, parts, f"{given.origin}: not a batch that leaven supports") if parts else None
    if "train-samples" in given:
        draft.set("data.tokens", given["train-samples"] * length, "--train-samples x --seq-length")
    elif "train-iters" in given and batch is not None:
        tokens = BatchSchedule(batch.sizes).tokens_at_step(given["train-iters"])
        draft.set("data.tokens", tokens, "--train-iters x batch")


def _stages(given: Settings, length: int) -> list[dict[str, int]]:
    """Return ``batch.stages`` of a --step-batch-size-schedule such as "0:2 0.1M:4 1M:8" (tokens:sequences).

    The start of each stage is rounded down to whole sequences of ``length`` tokens.
    """
    label, stages = given.label("step-batch-size-schedule"), []
    for entry in re.split(r"[\s,]+", given["step-batch-size-schedule"].strip()):
        numbers = []
        for word in entry.split(":"):
            scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(word[-1:].upper(), 1)
            numbers.append(int(as_number(word[:-1] if scale > 1 else word, label) * scale))
        if len(numbers) != 2:
            raise InputError(f"{label} {entry}: write it as TOKENS:BATCH")
        stages.append({"from_tokens": numbers[0] // length * length, "tokens": numbers[1] * length})
    return stages


def _schedule(given: Settings, length: int) -> None:
    """Set final lr, warm-up and cooldown in ``given.draft``. ``length`` is the number of tokens in a sequence."""
    draft = given.draft
    if "lr" in given:
        ratio = float(f"{given['min-lr'] / given['lr']:.12g}")
        draft.set("schedule.min_lr_ratio", ratio, f"{given.why('min-lr')} / --lr")
    duration, batch = draft.values.get("data.tokens"), draft.values.get("batch.tokens")

    def span(*flags: str) -> tuple[str, int | None]:
        """Return the first given flag, and its value in tokens if known. ``flags`` end with -samples or -iters."""
        flag = next((flag for flag in flags if flag in given), "")
        size = length if flag.endswith("-samples") else batch
        return flag, int(given[flag] * size) if flag and size is not None else None

    flag, end = span("lr-decay-samples", "lr-decay-iters")
    if end is not None and duration is not None and end != duration:
        draft.unread.append(f"--{flag}: {end:,} tokens; leaven's schedule ends with the run")
    elif end is not None and duration is not None:
        draft.why["data.tokens"] += f", as --{flag}"
    flags = ("lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction")
    # 0 is Megatron's default of -samples and -iters. Megatron refuses -fraction, even of 0, beside one that is not 0.
    counting = [flag for flag in flags if flag in given and given[flag] != 0]
    warmup = None
    if counting and counting[0] == "lr-warmup-fraction":
        warmup = None if duration is None else round(given["lr-warmup-fraction"] * (end or duration))
    elif counting:
        _, warmup = span(counting[0])
    given.put("schedule.warmup_tokens", warmup or 0, *(counting[:1] or flags))
    if counting and warmup is None:
        need = "number of training steps" if counting[0] == "lr-warmup-fraction" else "--global-batch-size"
        draft.unknown.append(f"schedule.warmup_tokens: 0 is used, because --{counting[0]} needs the {need}")
    if draft.values["schedule.decay"] != "wsd":
        return
    if given["lr-wsd-decay-style"] != "minus_sqrt":
        draft.unread.append(f"--lr-wsd-decay-style {given['lr-wsd-decay-style']}: leaven supports only minus_sqrt")
    flag, cooldown = span("lr-wsd-decay-samples", "lr-wsd-decay-iters")
    if cooldown is not None and duration:
        given.put("schedule.decay_ratio", cooldown / duration, flag)


def _layout(given: Settings, ranks: int | None) -> None:
    """Set the keys of [layout] other than tp, pp, cp and ep, which the draft already has."""
    draft = given.draft
    zero = given.choice("data-parallel-sharding-strategy")
    if "use-megatron-fsdp" in given:
        flags = ("data-parallel-sharding-strategy", "use-megatron-fsdp", "use-distributed-optimizer")
        given.put("layout.zero", zero, *flags)
    if given["recompute-granularity"]:
        given.put("layout.recompute", given.choice("recompute-granularity"), "recompute-granularity")
    elif "recompute-activations" in given:
        given.put("layout.recompute", "selective", "recompute-activations")
    if "layout.stages_per_rank" in draft.values:
        draft.set("layout.schedule", "interleaved", draft.why["layout.stages_per_rank"])
    tp, pp, cp, ep = (draft.values[f"layout.{degree}"] for degree in ("tp", "pp", "cp", "ep"))
    each = tp * pp * cp
    if ((ranks or each) // each * cp) % ep:
        raise InputError(
            f"{given.origin}: --expert-model-parallel-size {ep} needs {each * ep // math.gcd(cp, ep)} processes or a "
            "multiple of that; give this number of processes with --ranks N"
        )
    if ranks is None:
        draft.unknown.append("layout.dp: 1 is used; give the number of processes with --ranks N")
        return
    if ranks % each:
        raise InputError(
            f"--ranks {ranks}: tp x pp x cp is {each} in {given.origin}; --ranks must be a multiple of that"
        )
    draft.set("layout.dp", ranks // each, f"--ranks {ranks} / (tp x pp x cp)")
