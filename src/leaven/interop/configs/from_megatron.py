"""Import a recipe from a Megatron-LM argument list.

``targets/megatron_flags.toml`` has the flags, their defaults and the corresponding keys of a recipe. Megatron uses
the same lr, decay and standard deviation for all matrices except the embedding and the ends of branches; the recipe
has multipliers for these modules, and no scaling rule.
"""

import math
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leaven.interop.configs import shell
from leaven.interop.configs.draft import Draft, Imported
from leaven.interop.configs.export import target
from leaven.recipe.batch import Batch, BatchSchedule
from leaven.recipe.errors import InputError
from leaven.recipe.files import explain
from leaven.recipe.shape import BRANCH_ENDS

TABLE = tomllib.loads((Path(__file__).parent / "targets/megatron_flags.toml").read_text(encoding="utf-8"))
FLAGS: dict[str, dict[str, Any]] = TABLE["flags"]
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


class MegatronFlags:
    """The known flags of an argument list, parsed, with Megatron's defaults."""

    def __init__(self, text: str, origin: str, draft: Draft) -> None:
        self.origin = origin
        self.given: dict[str, Any] = {}  # a number, a word, or True of a switch
        self.waiting: dict[str, str] = {}  # what a value waits for: variables that the file does not set
        for flag, words in shell.parse(text, origin).values.items():
            name = flag.replace("_", "-")
            name = TABLE["aliases"].get(name, name)
            for unsupported, what in TABLE["unsupported"].items():
                if name == unsupported or (unsupported.endswith("*") and name.startswith(unsupported[:-1])):
                    raise InputError(f"{origin}: --{flag}: leaven has no {what}")
            kind = FLAGS[name]["kind"] if name in FLAGS else None
            waiting = [variable for word in words[:1] for variable in shell.open_variables(word)]
            if kind is None:
                draft.unread.append(f"--{flag}")
            elif kind == "switch":
                self.given[name] = True
            elif waiting:
                self.waiting[name] = ", ".join(waiting)
                draft.unknown.append(f"--{flag}: {self.waiting[name]} is not set in the file")
            elif not words:
                raise InputError(f"{origin}: --{flag} has no value")
            else:
                self.given[name] = " ".join(words) if kind == "word" else as_number(words[0], flag, origin)

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def __getitem__(self, name: str) -> Any:
        """Return the value of a flag, or Megatron's default.

        Raises:
            InputError: if there is neither, or an integer flag has another value.
        """
        row = FLAGS[name]
        value = self.given.get(name, row.get("default"))
        if value is None and row["kind"] in {"word", "switch"}:
            return "" if row["kind"] == "word" else False
        if value is None and name in self.waiting:
            raise InputError(f"{self.origin}: --{name} waits for {self.waiting[name]}; write the number")
        if value is None:
            raise InputError(f"{self.origin}: no --{name}, without which there is no recipe; add it")
        if row["kind"] == "number":
            return float(value)
        if row["kind"] == "count":
            if value != int(value):
                raise InputError(f"{self.origin}: --{name} {value:g}: has to be a whole number")
            return int(value)
        return value

    def occurs(self, name: str) -> bool:
        """Return whether a flag is in the file, even if its value is an unset variable."""
        return name in self.given or name in self.waiting

    def choice(self, name: str, known: dict[str, str]) -> str:
        """Return leaven's name for the value of a flag."""
        if self[name] not in known:
            raise InputError(f"{self.origin}: --{name} {self[name]}: leaven reads {', '.join(known)}")
        return known[self[name]]

    def why(self, *names: str) -> str:
        """Return the origin of a value, for the reasons."""
        there = [f"--{name}" for name in names if name in self.given]
        for name in names:
            if name in self.waiting:
                return f"Megatron's default, for --{name} waits for {self.waiting[name]}"
        return " and ".join(there) if there else f"Megatron's default of --{names[0]}"


def as_number(word: str, flag: str, origin: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise InputError(f"{origin}: --{flag} {word}: has to be a number") from None
    if not math.isfinite(number):
        raise InputError(f"{origin}: --{flag} {word}: has to be a finite number")
    return number


def read(text: str, origin: str, name: str, ranks: int | None = None) -> Imported:
    """Return the recipe of an argument list; ``ranks`` is the number of processes of the run.

    Raises:
        InputError: naming a flag that is missing, malformed or for an unsupported kind of model.
    """
    draft = Draft(origin)
    given = MegatronFlags(text, origin, draft)
    if given["optimizer"] != "adam":
        raise InputError(f"{origin}: --optimizer {given['optimizer']}: leaven has adam")
    for flag in ("lr", "init-method-std"):  # others are written relative to them
        if flag in given and given[flag] <= 0:
            raise InputError(f"{origin}: --{flag} {given[flag]:g}: has to be above 0")
    _sizes(given, draft)
    _kind(given, draft)
    for flag, row in FLAGS.items():
        path = row.get("path", "")
        if path and path not in draft.values:
            value = given.choice(flag, row["values"]) if "values" in row else given[flag]
            draft.set(path, value, given.why(flag))
    shape = draft.shape()
    _modules(given, draft, shape.n_layers, tied=shape.tied_embeddings, learned=shape.positions == "learned")
    _batch_and_duration(given, shape.seq_len, draft)
    _schedule(given, shape.seq_len, draft)
    _layout(given, draft, ranks)
    return draft.finish(name, shape)


def _sizes(given: MegatronFlags, draft: Draft) -> None:
    """Set sizes that follow from several flags, or from a missing one."""
    origin, heads, width = given.origin, given["num-attention-heads"], given["hidden-size"]
    if width % heads and not given.occurs("kv-channels"):
        raise InputError(f"{origin}: --hidden-size {width} does not divide by --num-attention-heads {heads}")
    d_head = given["kv-channels"] if given.occurs("kv-channels") else width // heads
    draft.set("model.d_head", d_head, given.why("kv-channels", "hidden-size"))
    if heads * d_head != width:
        draft.set("model.d_attention", heads * d_head, given.why("kv-channels"))
    if "group-query-attention" in given:
        draft.set("model.n_kv_heads", given["num-query-groups"], given.why("num-query-groups"))
    else:
        draft.set("model.n_kv_heads", heads, "--num-attention-heads: no --group-query-attention")
        if "num-query-groups" in given:
            draft.unread.append("--num-query-groups: Megatron reads it beside --group-query-attention only")

    if given.occurs("ffn-hidden-size"):
        draft.set("model.d_ff", given["ffn-hidden-size"], given.why("ffn-hidden-size"))
    elif "swiglu" in given:  # validate_args of arguments.py
        why = "4 x hidden size x 2 / 3, down to a multiple of 64, with --swiglu"
        draft.set("model.d_ff", int(4 * width * 2 / 3 / 64) * 64, why)
    else:
        draft.set("model.d_ff", 4 * width, "4 x hidden size: no --ffn-hidden-size")

    if "padded-vocab-size" in given:
        draft.set("model.vocab_size", given["padded-vocab-size"], given.why("padded-vocab-size"))
    elif "vocab-size" in given:
        multiple = given["make-vocab-size-divisible-by"] * given["tensor-model-parallel-size"]
        padded = -(-given["vocab-size"] // multiple) * multiple
        draft.set("model.vocab_size", padded, f"--vocab-size, padded to a multiple of {multiple}")
    else:
        draft.unknown.append("model.vocab_size: the tokenizer's; 50,304 (GPT-2's, padded) is used")
        draft.set("model.vocab_size", 50_304, "not in the file: that of GPT-2's tokenizer, padded")


def _kind(given: MegatronFlags, draft: Draft) -> None:
    """Set activation, positions, biases, tied embeddings and dropout."""
    origin = given.origin
    activations = {"swiglu": "swiglu", "squared-relu": "squared_relu"}
    found = {f"--{flag}": ours for flag, ours in activations.items() if flag in given}
    if "glu-activation" in given:  # Megatron-DeepSpeed's; it leaves --ffn-hidden-size at 4 x hidden size
        found["--glu-activation"] = given.choice("glu-activation", {"swiglu": "swiglu"})
    if len(set(found.values())) > 1:
        raise InputError(f"{origin}: {' and '.join(found)}: two activations; take one away")
    flag, ours = next(iter(found.items()), ("Megatron's default", "gelu"))
    draft.set("model.activation", ours, flag)

    if "use-rotary-position-embeddings" in given:
        draft.set("model.positions", "rope", "--use-rotary-position-embeddings")
    if given["rotary-percent"] != 1:
        raise InputError(f"{origin}: --rotary-percent: leaven rotates whole heads (1.0)")
    if "disable-bias-linear" in given and "add-qkv-bias" in given:
        raise InputError(f"{origin}: --add-qkv-bias: leaven has biases in all matrices or in none")
    draft.set("model.bias", "disable-bias-linear" not in given, given.why("disable-bias-linear"))
    untie = "untie-embeddings-and-output-weights"
    draft.set("model.tied_embeddings", untie not in given, given.why(untie))
    attention, hidden = given["attention-dropout"], given["hidden-dropout"]
    if attention != hidden:
        draft.unread.append(f"--attention-dropout {attention:g}: leaven has one rate, that of --hidden-dropout")
    draft.set("model.dropout", hidden, given.why("hidden-dropout", "attention-dropout"))


def _modules(given: MegatronFlags, draft: Draft, n_layers: int, *, tied: bool, learned: bool) -> None:
    """Set multipliers of modules, precision and document handling."""
    for module in BRANCH_ENDS:
        path = f"hyperparameters.modules.{module}.init_std"
        draft.set(path, 1 / math.sqrt(2 * n_layers), "Megatron starts these at 1 / sqrt(2 L) of it")
    if "embedding-init-method-std" in given:
        relative = given["embedding-init-method-std"] / given["init-method-std"]
        for module in ("embedding", "positions") if learned else ("embedding",):
            path = f"hyperparameters.modules.{module}.init_std"
            draft.set(path, relative, "--embedding-init-method-std / --init-method-std")
    if "lr" in given:
        draft.set("hyperparameters.lr", given["lr"], given.why("lr"))
    if "lr" in given and "decoupled-lr" in given:
        for module in ("embedding",) if tied else ("embedding", "unembedding"):
            relative = given["decoupled-lr"] / given["lr"]
            draft.set(f"hyperparameters.modules.{module}.lr", relative, "--decoupled-lr / --lr")
    compute = "bf16" if "bf16" in given else "fp16" if "fp16" in given else "fp32"
    draft.set("precision.compute", compute, given.why("bf16", "fp16"))
    isolated = "reset-position-ids" in given and "reset-attention-mask" in given
    why = given.why("reset-attention-mask", "reset-position-ids")
    draft.set("data.documents", "isolated" if isolated else "packed", why)


def _batch_and_duration(given: MegatronFlags, length: int, draft: Draft) -> None:
    if "micro-batch-size" in given:
        draft.set("batch.micro_batch", given["micro-batch-size"], given.why("micro-batch-size"))
    if "step-batch-size-schedule" in given:
        stages = _stages(given, length)
        draft.set("batch.stages", stages, given.why("step-batch-size-schedule"))
        draft.set("batch.tokens", stages[-1]["tokens"], given.why("step-batch-size-schedule"))
    elif "global-batch-size" in given:
        draft.set("batch.tokens", given["global-batch-size"] * length, "--global-batch-size x --seq-length")
        if "rampup-batch-size" in given:
            _ramp(given, length, draft)
    parts = {path.removeprefix("batch."): value for path, value in draft.values.items() if path.startswith("batch.")}
    parts.pop("micro_batch", None)
    try:
        sizes = Batch.model_validate(parts).sizes if parts else None
    except ValidationError as error:
        raise InputError(f"{given.origin}: no batch of leaven's: {explain(error)}") from None
    if "train-samples" in given:
        draft.set("data.tokens", given["train-samples"] * length, "--train-samples x --seq-length")
    elif "train-iters" in given and sizes is not None:
        tokens = BatchSchedule(sizes).tokens_at_step(given["train-iters"])
        draft.set("data.tokens", tokens, "--train-iters x batch")


def _stages(given: MegatronFlags, length: int) -> list[dict[str, int]]:
    def number(word: str) -> int:
        scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(word[-1:].upper(), 1)
        digits = word[:-1] if scale > 1 else word
        return int(as_number(digits, "step-batch-size-schedule", given.origin) * scale)

    stages = []
    for entry in re.split(r"[\s,]+", given["step-batch-size-schedule"].strip()):
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise InputError(f"{given.origin}: --step-batch-size-schedule {entry}: write it as TOKENS:BATCH")
        stages.append({"from_tokens": number(threshold) // length * length, "tokens": number(size) * length})
    return stages


def _ramp(given: MegatronFlags, length: int, draft: Draft) -> None:
    words = given["rampup-batch-size"].split()
    if len(words) != 3 or any(shell.open_variables(word) for word in words):
        draft.unknown.append(f"--rampup-batch-size {' '.join(words)}: wants START INCREMENT SAMPLES, all three set")
        return
    start, increment, samples = (int(as_number(word, "rampup-batch-size", given.origin)) * length for word in words)
    ramp = {"start_tokens": start, "increment_tokens": increment, "over_tokens": samples}
    draft.set("batch.ramp", ramp, "--rampup-batch-size, which a Megatron-LM since April 2026 parses and ignores")


def _schedule(given: MegatronFlags, length: int, draft: Draft) -> None:
    ours = {theirs: ours for ours, theirs in target("megatron").decays.items()}
    decay = given.choice("lr-decay-style", ours)
    draft.set("schedule.decay", decay, given.why("lr-decay-style"))
    if "lr" in given:
        ratio = float(f"{given['min-lr'] / given['lr']:.12g}")
        draft.set("schedule.min_lr_ratio", ratio, f"{given.why('min-lr')} / --lr")
    duration, batch = draft.values.get("data.tokens"), draft.values.get("batch.tokens")

    def span(prefix: str) -> int | None:
        """Return a number of tokens from --PREFIX-samples or --PREFIX-iters."""
        if f"{prefix}-samples" in given:
            return int(given[f"{prefix}-samples"] * length)
        return int(given[f"{prefix}-iters"] * batch) if f"{prefix}-iters" in given and batch is not None else None

    end = span("lr-decay")
    if end is not None and duration is not None and end != duration:
        draft.unread.append(f"--lr-decay-samples or -iters: {end:,} tokens; leaven's schedule ends with the run")
    warmup = span("lr-warmup")
    if warmup is None and "lr-warmup-fraction" in given and duration is not None:
        warmup = round(given["lr-warmup-fraction"] * (end or duration))
    why = given.why("lr-warmup-samples", "lr-warmup-iters", "lr-warmup-fraction")
    draft.set("schedule.warmup_tokens", warmup or 0, why)
    if decay != "wsd":
        return
    if given["lr-wsd-decay-style"] != "minus_sqrt":
        draft.unread.append(f"--lr-wsd-decay-style {given['lr-wsd-decay-style']}: leaven has minus_sqrt")
    cooldown = span("lr-wsd-decay")
    if cooldown is not None and duration:
        why = given.why("lr-wsd-decay-samples", "lr-wsd-decay-iters")
        draft.set("schedule.decay_ratio", cooldown / duration, why)


def _layout(given: MegatronFlags, draft: Draft, ranks: int | None) -> None:
    if "use-megatron-fsdp" in given:
        zero = SHARDING.get(given["data-parallel-sharding-strategy"], 0)
        draft.set("layout.zero", zero, given.why("data-parallel-sharding-strategy"))
    elif "use-distributed-optimizer" in given:
        draft.set("layout.zero", 1, "--use-distributed-optimizer")
    recompute = given["recompute-granularity"] or ("selective" if "recompute-activations" in given else "")
    if recompute in {"full", "selective"}:
        draft.set("layout.recompute", recompute, given.why("recompute-granularity", "recompute-activations"))
    virtual = "num-virtual-stages-per-pipeline-rank"
    if virtual in given:
        draft.set("layout.stages_per_rank", given[virtual], given.why(virtual))
        draft.set("layout.schedule", "interleaved", given.why(virtual))
    if ranks is None:
        draft.unknown.append("layout.dp: follows from the number of processes, which --ranks tells; here 1")
        return
    each = math.prod(draft.values[f"layout.{degree}"] for degree in ("tp", "pp", "cp"))
    if ranks % each:
        raise InputError(f"--ranks {ranks}: tp x pp x cp is {each} in {given.origin}; give a multiple of it")
    draft.set("layout.dp", ranks // each, f"--ranks {ranks} / (tp x pp x cp)")
