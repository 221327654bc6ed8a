"""Writes and reads models in Hugging Face's format, without the ``transformers`` library.

leaven's models have forward multipliers (:func:`leaven.scaling.table.folding`). Some models of Hugging
Face have constants instead (:meth:`leaven.interop.architectures.Architecture.factors`). Writing
multiplies weights by the multipliers and divides them by the constants. Reading does the reverse.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from leaven import __version__, storage
from leaven.data.tokenizer import given_tokenizer
from leaven.distributed.pieces import Piece, cut
from leaven.errors import InputError
from leaven.interop.architectures import Architecture, Config, Stored, holding, shape_values
from leaven.interop.configs.draft import TOKENS_PER_PARAMETER, Draft, Imported, likely_batch, likely_lr
from leaven.interop.configs.export import environment
from leaven.interop.configs.from_transformers import read_model
from leaven.interop.huggingface_config import HuggingFaceModel, read_config, read_json
from leaven.recipe.files import parse_recipe, read_text
from leaven.recipe.recipe import Recipe, effective_differences, flatten
from leaven.recipe.shape import BRANCH_ENDS, ModelShape, Role
from leaven.recipe.units import format_quantity, listed
from leaven.scaling.table import ParameterTable, folding
from leaven.storage import share, written_folder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
READ_DTYPES = ("F64", "F32", "BF16", "F16")  # as safetensors names them; quantised weights have other dtypes
WHOLE = "model.safetensors"  # the file with all weights; several files (shards) have other names
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")  # of PEFT; transformers adds them to the weights
SHARD_BYTES = 5 * 10**9
SAMPLES, SAMPLE_BYTES = 64, 2**16  # of a file
WHOLE_TENSOR = 2**18  # bytes; larger tensors are compared by samples
TENSOR_SAMPLES, TENSOR_SAMPLE_BYTES = 4, 2**14
LONGEST_HEADER = 10**8  # bytes, as in the library safetensors
STDLIB_LICENCE = "PSF-2.0 (the source code of Python's standard library)"
# Keys of [model] whose values may differ from those of the start weights. With learned positions, seq_len may not.
_FREE = {"seq_len", "dropout", "rope_theta"}
# Name of the biases of a layer's router. They are not parameters, because they are trained without gradients.
ROUTER_BIAS = "layers.{}.mlp.router.bias"


# Write ------------------------------------------------------------------------------------------------------------


def write_huggingface(
    folder: Path,
    shape: ModelShape,
    table: ParameterTable,
    weights: Mapping[str, Tensor],
    *,
    tokenizer: str,
    end_of_text: tuple[str, int],
    router_bias_LE: Tensor | None = None,
    card: str | None = None,
    dtype: str = "fp32",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model into a new folder in Hugging Face's format: completely, or not at all.

    Args:
        weights: leaven's tensors by name.
        tokenizer: the text of a tokenizer.json.
        end_of_text: the token that ends a document, and its id.
        router_bias_LE: the biases that routers add to the scores of experts, by layer and expert; None if all are 0.
        card: the text of README.md; without one, there is no README.md.
        dtype: a key of ``DTYPES``. Biases of routers stay in fp32.
        shard_bytes: the largest size of a file of weights. A larger tensor gets a file of its own.

    Raise InputError if no architecture has this shape, the folder cannot be written, or a weight is not finite.
    """
    architecture = holding(shape)
    token, id = end_of_text
    ends = {"bos_token_id": id, "eos_token_id": id}  # as in GPT-2, the same token begins and ends a document
    documents: dict[str, dict[str, Any]] = {
        # Every version of transformers reads "torch_dtype", although newer versions write "dtype".
        "config.json": architecture.config(shape) | ends | {"torch_dtype": str(DTYPES[dtype]).removeprefix("torch.")},
        "generation_config.json": ends | {"pad_token_id": id},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token,
            "eos_token": token,
            "model_max_length": shape.seq_len,
            "clean_up_tokenization_spaces": False,
        },
    }
    numbers, offsets = DTYPES[dtype], architecture.offsets(shape)
    factors = _factors(architecture, shape, table, documents["config.json"])
    shards = _shards(architecture.tensors(shape), shard_bytes // numbers.itemsize)
    if len(shards) > 1:
        size = sum(each.size for shard in shards.values() for each in shard)
        documents["model.safetensors.index.json"] = {
            "metadata": {"total_size": size * numbers.itemsize},
            "weight_map": {each.name: file for file, shard in shards.items() for each in shard},
        }
    texts = {name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()}
    texts |= {"tokenizer.json": tokenizer} | ({"README.md": card} if card else {})
    with written_folder(folder) as temporary:
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        biases = () if router_bias_LE is None else router_bias_LE.unbind()
        held = dict(weights) | {ROUTER_BIAS.format(layer): bias for layer, bias in enumerate(biases)}
        for file, shard in shards.items():
            tensors = {}
            for each in shard:
                kind = torch.float32 if each.of_router_bias else numbers
                tensors[each.name] = tensor = _joined(each, held, factors, offsets).to(kind).contiguous()
                if not tensor.isfinite().all():
                    raise InputError(
                        f"{each.name}: not every weight is finite in {dtype}; use another dtype or checkpoint"
                    )
            try:
                save_file(tensors, temporary / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(str(error)) from None
            share(temporary / file)


def _factors(
    architecture: Architecture, shape: ModelShape, table: ParameterTable, config: Config
) -> dict[str, float]:
    """Return {leaven's weight name: factor} for ``stored = factor x weight - offset``. A missing factor is 1."""
    factors = dict(folding(shape, table))
    for name, factor in architecture.factors(shape, config).items():
        factors[name] = factors.get(name, 1.0) / factor
    return factors


def _shards(stored: Iterable[Stored], limit: int) -> dict[str, list[Stored]]:
    """Distribute tensors over files of at most ``limit`` elements. A larger tensor gets a file of its own."""
    shards: list[list[Stored]] = []
    room = 0
    for each in stored:
        if not shards or each.size > room:
            shards.append([])
            room = limit
        shards[-1].append(each)
        room -= each.size
    if len(shards) == 1:
        return {WHOLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def _joined(
    stored: Stored, held: Mapping[str, Tensor], factors: Mapping[str, float], offsets: Mapping[str, float]
) -> Tensor:
    """Return a tensor as a file stores it: factor x tensor - offset, joined from leaven's tensors.

    A tensor that is missing in ``held``, such as a bias that leaven's model lacks, counts as 0.
    """
    parts = []
    for name, shape in stored.parts.items():
        part = torch.zeros(shape)
        if name in held:
            part = held[name] if stored.expert is None else held[name][stored.expert]
            part = part.detach().cpu() * factors.get(name, 1.0)
            part -= offsets.get(name, 0.0)
        parts.append(_by_entry(name, part, 2, stored.paired // 2) if stored.paired else part)
    by_head = [part.reshape(stored.heads, -1, *part.shape[1:]) for part in parts]
    joined = torch.cat(by_head, dim=1).flatten(0, 1) if len(parts) > 1 else parts[0]
    return joined.T if stored.transposed else joined


def _split(stored: Stored, tensor: Tensor) -> list[Tensor]:
    """Return leaven's tensors within a stored tensor, before factors and offsets are applied."""
    joined = tensor.T if stored.transposed else tensor
    rows = [shape[0] // stored.heads for shape in stored.parts.values()]
    by_head = torch.split(joined.reshape(stored.heads, -1, *joined.shape[1:]), rows, dim=1)
    parts = [part.flatten(0, 1) for part in by_head]
    if not stored.paired:
        return parts
    return [_by_entry(name, part, stored.paired // 2, 2) for name, part in zip(stored.parts, parts, strict=True)]


def _by_entry(name: str, part: Tensor, rows: int, columns: int) -> Tensor:
    """Return a parameter with reordered entries in each head: written to a table by row, read by column.

    The table has the shape ``rows`` x ``columns``. With 2 x 3, a b c d e f becomes a d b e c f; 3 x 2 reverses this.
    """
    dim = part.ndim - 1 if ".norm." in name else 0  # a gain is (d_head) or (heads, d_head)
    table = part.reshape(*part.shape[:dim], -1, rows, columns, *part.shape[dim + 1 :])
    return table.transpose(dim + 1, dim + 2).reshape(part.shape)


_CARD_RECIPE = "\n```toml\n"  # precedes the recipe in a model card
_MOST_NAMED = 10  # values that a warning about a model card names


def model_card(
    recipe: Recipe,
    text: str,
    *,
    architecture: str,
    tokens: int,
    dtype: str,
    events: Iterable[Mapping[str, Any]],
    averaged: bool = False,
    licence: str | None = None,
    during: Sequence[str] = (),
) -> str:
    """Return the model card of a run's checkpoint as Markdown. ``text`` is the text of the recipe file. ``during``:
    phrases about what rewinds changed in the course of the run.

    ``architecture`` is the model's class in transformers. The checkpoint was trained on ``tokens`` tokens. With
    ``averaged``, the weights are averages over steps, and the card shows the loss of the averages.
    """
    measured: list[Mapping[str, Any]] = []
    for each in events:
        if each["event"] == "validation" and isinstance(each.get("loss"), int | float):
            if isinstance(each.get("tokens"), int) and each["tokens"] <= tokens:
                measured.append(each)
        elif isinstance(to := each.get("to_tokens"), int):  # a rewind, which undoes later steps
            measured = [validation for validation in measured if validation["tokens"] <= to]
    if averaged:
        means = [(each["tokens"], each["averaged_loss"]) for each in measured if "averaged_loss" in each]
        measured = [{"tokens": at, "loss": loss, "bits_per_byte": None} for at, loss in means]
    if licence is None and [source.source for source in recipe.data.sources] == ["python-stdlib"]:
        licence = STDLIB_LICENCE
    return (
        environment("")
        .get_template("model_card.md.j2")
        .render(
            recipe=recipe,
            text=text.strip(),
            architecture=architecture,
            tokens=tokens,
            finished=tokens >= recipe.data.tokens,
            dtype=dtype,
            averaged=averaged,
            validation=measured[-1] if measured else None,
            licence=licence,
            during=during,
            version=__version__,
            values=flatten(recipe.model_dump()),
            quantity=format_quantity,
            cell=_cell,
        )
    )


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


# Read -------------------------------------------------------------------------------------------------------------


def read_huggingface(folder: Path) -> HuggingFaceModel:
    """Return a description of the model in a folder, or raise InputError. Its weights must fit its config.json."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give one with config.json, model.safetensors and tokenizer.json")
    if adapter := next((name for name in ADAPTERS if (folder / name).exists()), None):
        raise InputError(f"{folder}: {adapter}: leaven does not read adapters; merge it into the weights with PEFT")
    plain = read_config(folder / "config.json")
    architecture = plain.architecture
    with _opened(plain) as tensors:
        bias = f"{architecture.ends['unembedding']}.bias"
        if architecture.logits_bias and bias in tensors and _read(tensors, bias, folder).any():
            raise InputError(f"{folder}: {bias} is not 0, and leaven's models have no bias on the logits")
        tied = [f"{architecture.ends[module]}.weight" for module in ("embedding", "unembedding")]
        if plain.shape.tied_embeddings and tensors.keys() >= set(tied):  # some programs save the tied matrix twice
            embedding, unembedding = (_read(tensors, name, folder) for name in tied)
            if not torch.equal(embedding.to(unembedding.dtype), unembedding):
                raise InputError(
                    f"{folder}: {tied[0]} and {tied[1]} differ, but config.json ties them; set tie_word_embeddings "
                    "to false there"
                )
        slices = {name: file.get_slice(there) for name, (file, there) in tensors.items()}
        shapes = {name: tuple(each.get_shape()) for name, each in slices.items()}
        dtypes = {name: each.get_dtype() for name, each in slices.items()}
    for stored in architecture.tensors(plain.shape):
        found = shapes.pop(stored.name, None)
        if found != stored.shape:
            what = "is missing" if found is None else f"is {found}, not the {stored.shape} of config.json"
            raise InputError(f"{folder}: {stored.name} {what}; the folder is damaged or contains files of two models")
        if dtypes[stored.name] not in READ_DTYPES:
            known = ", ".join(READ_DTYPES)
            raise InputError(
                f"{folder}: {stored.name} has dtype {dtypes[stored.name]}, and leaven reads {known}; save the model "
                "without quantisation"
            )
    if plain.shape.tied_embeddings:
        shapes.pop(tied[1], None)
    spare = [name for name in shapes if not name.endswith(tuple(architecture.buffers))]
    if plain.further_tokens:  # these layers come after the others
        beyond = f"{architecture.blocks}.{plain.shape.n_layers}."
        spare = [name for name in spare if not name.startswith(beyond)]
    if spare:
        raise InputError(
            f"{folder}: contains {spare[0]}, which the {architecture.name} of its config.json does not have; "
            "give a folder whose weights fit its config.json"
        )
    return plain


def weights_fingerprint(folder: Path) -> str:
    """Return a hash of a folder's config.json and weight files, from `SAMPLES` pieces of each file."""
    content = blake2b(digest_size=16)
    for path in _weight_files(folder):
        with suppress(OSError), storage.open_file(path) as file:
            size = path.stat().st_size
            content.update(f"{path.name} {size} ".encode())
            for sample in range(SAMPLES):
                file.seek(sample * size // SAMPLES)
                content.update(file.read(SAMPLE_BYTES))
    return content.hexdigest()


def tensors_fingerprint(folder: Path) -> str:
    """Return a hash of a folder's config.json and of the tensors in its safetensors files.

    Every tensor is read: small ones whole, large ones in pieces. :func:`weights_fingerprint` may skip tensors.
    """
    content = blake2b(digest_size=16)
    for path in _weight_files(folder):
        with suppress(OSError, ValueError, TypeError, KeyError), storage.open_file(path) as file:
            length = min(int.from_bytes(file.read(8), "little"), LONGEST_HEADER)
            header = file.read(length)
            tensors = storage.json_object(header) or {}
            tensors.pop("__metadata__", None)
            content.update(header)
            end = 0
            for start, stop in sorted(tensor["data_offsets"] for tensor in tensors.values()):
                if not end <= start <= stop:  # damaged; bytes that are read several times could be very many
                    break
                end = stop
                size = stop - start
                pieces = [(0, size)]
                if size > WHOLE_TENSOR:
                    last = size - TENSOR_SAMPLE_BYTES
                    places = (number * last // (TENSOR_SAMPLES - 1) for number in range(TENSOR_SAMPLES))
                    pieces = [(place, TENSOR_SAMPLE_BYTES) for place in places]
                for place, n_bytes in pieces:
                    file.seek(8 + length + start + place)
                    content.update(file.read(n_bytes))
    return content.hexdigest()


def _weight_files(folder: Path) -> Iterator[Path]:
    """Yield config.json and the files ``*.safetensors*`` that the index lists or that begin with config or model."""
    index = b""
    with suppress(OSError):
        index = storage.read(folder / "model.safetensors.index.json")
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors*")]):
        if path.name.startswith(("config", "model")) or json.dumps(path.name).encode() in index:
            yield path


def require_start(shape: ModelShape, folder: Path) -> HuggingFaceModel:
    """Return a description of the model in a folder. Raise InputError if a run of ``shape`` cannot start from it."""
    plain = read_huggingface(folder)
    free = _FREE - {"seq_len"} if shape.positions == "learned" else _FREE
    if shape.experts and not shape.experts.dense_layers:
        free = free | {"d_ff"}  # no layer has an MLP
    there, here = ({k: v for k, v in shape_values(each).items() if k not in free} for each in (plain.shape, shape))
    for values in (there, here):  # a balance loss does not change what the model computes
        if values.get("experts.balance") == "none":
            values["experts.balance"] = "loss"
    if there != here:
        key = next(key for key in here | there if here.get(key) != there.get(key))
        raise InputError(
            f"[start] weights: {folder} has {key} {there.get(key)}, [model] has {here.get(key)}; "
            "set [model] to the shape of the weights, or leave [start] out"
        )
    return plain


def start_cautions(recipe: Recipe, tokenizer: Path | None, end: int | None) -> list[str]:
    """Return warnings about differences between the recipe and the model in [start], and about matrices of zeros.

    The model may have another rope_theta, longer sequences, other token ids than those of ``tokenizer``, or other
    tokens around documents. ``end`` is the id of the token that ends documents in training.
    """
    if (folder := recipe.start.folder) is None:
        return []
    of_tokenizer = tokenizer and tokenizer_caution(folder, tokenizer)
    of_ends = ends_caution(folder, tokenizer, end) if tokenizer and end is not None else None
    found = [of_tokenizer, of_ends, zeros_caution(folder)]
    with suppress(InputError):  # a run that resumes does not need the weights
        there, here = read_huggingface(folder).shape, recipe.model
        if there.rope_theta != here.rope_theta and here.positions == "rope":
            found.append(
                f"model.rope_theta is {here.rope_theta:,}, and the model in {folder} has {there.rope_theta:,}"
            )
        if here.seq_len < there.seq_len:
            lengths = f"sequences have {here.seq_len:,} tokens, and the model in {folder} takes {there.seq_len:,}"
            found.append(f"{lengths}; an export states {here.seq_len:,}")
    return [caution for caution in found if caution]


def not_exported(folder: Path) -> str | None:
    """Return a warning that names what an export of a run that started from ``folder`` lacks beside its weights."""
    names = ("chat_template.jinja", "special_tokens_map.json", "generation_config.json")
    found = [name for name in names if (folder / name).exists()]
    with suppress(InputError):
        stated = read_json(folder / "tokenizer_config.json")
        found += ["the chat_template of tokenizer_config.json"] * ("chat_template" in stated)
    if not found:
        return None
    return f"not in the export: {listed(found, 'and')} of {folder}; copy what the model still needs"


def tokenizer_caution(folder: Path, tokenizer: Path) -> str | None:
    """Return a warning if a token id means different tokens in ``folder`` and in the file ``tokenizer``. Otherwise
    return None, also if a file cannot be read."""
    there = folder / "tokenizer.json"
    try:
        known, own = (given_tokenizer(str(path), sys.maxsize) for path in (there, tokenizer))
    except InputError:
        return None
    assert known is not None
    assert own is not None
    vocabulary = own.get_vocab()
    other = sum(known.id_to_token(id) not in {None, token} for token, id in vocabulary.items())
    if not other:
        return None
    return (
        f"{other:,} of {len(vocabulary):,} token ids mean other tokens in data.tokenizer than in the tokenizer of "
        f"[start] weights; if this is not intended, set data.tokenizer = {json.dumps(str(there))}"
    )


def ends_caution(folder: Path, tokenizer: Path, end: int) -> str | None:
    """Return a warning if training puts another token at the end of documents than the model in ``folder``, or no
    token at their start where ``tokenizer`` puts one. Otherwise return None, also if a file cannot be read.

    ``end`` is the id of the token that ends documents in training.
    """
    if tokenizer_caution(folder, tokenizer) is not None:
        return None
    try:
        stated = read_json(folder / "config.json").get("eos_token_id")
        given = given_tokenizer(str(tokenizer), sys.maxsize)
    except InputError:
        return None
    assert given is not None
    name = given.id_to_token(end)
    known = [
        id for id in (stated if isinstance(stated, list) else [stated]) if isinstance(id, int) and 0 <= id < 2**32
    ]
    if known and end not in known:
        theirs = listed([given.id_to_token(id) or str(id) for id in known], "or")
        return (
            f"in training, documents end with {name}, but the model in {folder} ends texts with {theirs} "
            f"(eos_token_id in its config.json); after training, the model ends texts with {name}"
        )
    first, plain = (given.encode("a", add_special_tokens=special).tokens[:1] for special in (True, False))
    if first and first not in (plain, [name]):
        return (
            f"the tokenizer puts {first[0]} before a text, but training does not; documents are only separated by "
            f"{name}, which is also the bos_token of an exported model"
        )
    return None


def zeros_caution(folder: Path) -> str | None:
    """Return a warning if matrices of a model are zeros, as after an interrupted copy. If not, return None.

    Two rows of each matrix are read. The unembedding and the last matrix of each branch are skipped, because models
    may start with zeros there. Also return None if the folder cannot be read.
    """
    try:
        plain = read_huggingface(folder)
    except InputError:
        return None
    read = {
        each.name
        for each in plain.shape.parameters()
        if each.role.is_matrix and each.role is not Role.UNEMBEDDING and each.module not in BRANCH_ENDS
    }
    matrices = [each for each in plain.architecture.tensors(plain.shape) if read & each.parts.keys()]
    zeros = []
    with _opened(plain) as tensors:
        for each in matrices:
            file, there = tensors[each.name]
            tensor, edge = file.get_slice(there), each.shape[0] // 16  # the first and last tokens may be unused
            if any(not tensor[row : row + 1].any() for row in (edge, each.shape[0] - 1 - edge)):
                zeros.append(each.name)
    if not zeros:
        return None
    return (
        f"{len(zeros):,} of {len(matrices):,} matrices in {folder} are zeros, in whole or in part, such as "
        f"{zeros[0]}; if a copy or a download of them was interrupted, repeat it; if they are zeros on purpose, "
        "ignore this"
    )


def recipe_from(plain: HuggingFaceModel, name: str, *, source: str, tokens: int | None = None) -> Imported:
    """Return a recipe that starts from a model's weights and trains on the data ``source``.

    The recipe has no ``scaling.base``, so its scaling rule changes nothing. ``tokens`` defaults to 20 per parameter.
    """
    tokenizer, shape = plain.folder / "tokenizer.json", plain.shape
    if not tokenizer.is_file():
        raise InputError(
            f"{plain.folder}: no tokenizer.json; save the model's tokenizer there with transformers' save_pretrained"
        )
    given_tokenizer(str(tokenizer), shape.vocab_size)
    draft = Draft(f"{plain.folder}/config.json")
    read_model(draft, plain)
    why = f"a {plain.architecture.name} model: its weights, divided by the recipe's multipliers; init_std is not used"
    draft.set("start.weights", str(plain.folder), why)
    draft.values["data.source"] = source
    draft.set("data.tokenizer", str(tokenizer), "the model's own tokenizer: the embedding was trained for its ids")
    duration = tokens or TOKENS_PER_PARAMETER * shape.params_active
    guess = f"{TOKENS_PER_PARAMETER} tokens per parameter, as from scratch (Chinchilla); fewer may be enough here"
    draft.set("data.tokens", duration, "--tokens" if tokens else guess)
    draft.set("schedule.warmup_tokens", duration // 100, "1% of the run, because Adam's moments start from 0")
    draft.set("batch.tokens", *likely_batch(shape, duration))
    lr, why = likely_lr(shape, duration)
    draft.set(
        "hyperparameters.lr",
        lr,
        f"{why}; config.json has no lr. Continued pre-training works best when the lr rises again to about the peak "
        "of pre-training (Ibrahim et al. 2024, arXiv 2403.08763); tune the lr",
    )
    return Imported(draft.recipe(name), tuple(draft.unknown), tuple(draft.unread))


def card_caution(recipe: Recipe) -> str | None:
    """Return a warning if the model card in the folder of [start] has a recipe (:func:`model_card`) with other values
    than ``recipe``, or None."""
    card = (recipe.start.folder or Path()) / "README.md"
    try:
        text = read_text(card).rpartition(_CARD_RECIPE)[2].rpartition("\n```")[0]
        theirs = parse_recipe(text, str(card))
    except InputError:  # a model card of somebody else, or none
        return None
    adopted = ("start.", "data.source", "data.tokenizer", "data.tokens")
    others = [path for path, *_ in effective_differences(theirs, recipe) if not path.startswith(adopted)]
    if more := len(others[_MOST_NAMED:]):
        others[_MOST_NAMED:] = [f"{more} more"]
    if not others:
        return None
    return (
        f"the recipe in {card} has other values, which are not taken: {listed(others, 'and')}; to train with them, "
        "copy that recipe, and give it the tables [start] and [data] of the new one"
    )


@torch.no_grad()
def start_from(held: Sequence[Piece], shape: ModelShape, table: ParameterTable, folder: Path) -> None:
    """Copy the weights in a folder into ``held``, the whole or sharded parameters of this process."""
    plain = require_start(shape, folder)
    pieces, read = {piece.name: piece for piece in held}, set()
    factors = _factors(plain.architecture, shape, table, plain.config)
    offsets = plain.architecture.offsets(shape)
    with _opened(plain) as tensors:
        for stored in plain.architecture.tensors(shape):
            if not pieces.keys() & stored.parts.keys():
                continue
            for name, part in zip(stored.parts, _split(stored, _read(tensors, stored.name, folder)), strict=True):
                piece = pieces[name]
                read.add(name)
                local, offset = piece.local, piece.offset
                if stored.expert is not None:
                    if not 0 <= stored.expert - offset[0] < len(local):
                        continue  # another process has this expert
                    local, offset = local[stored.expert - offset[0]], offset[1:]
                mine = cut(part, offset, local.shape).to(torch.float32)
                if name in offsets:
                    mine = mine + offsets[name]
                local.copy_(mine / factors.get(name, 1.0))
    assert read == pieces.keys(), f"no weights for {sorted(pieces.keys() - read)}"


def router_biases(shape: ModelShape, folder: Path) -> Tensor:
    """Return the biases that a model's routers add to the scores of experts, as (layers, experts)."""
    assert shape.experts is not None
    plain = require_start(shape, folder)
    bias_LE = torch.zeros(shape.n_layers, shape.experts.number)
    names = {ROUTER_BIAS.format(layer): layer for layer in range(shape.n_layers)}
    with _opened(plain) as tensors:
        for stored in plain.architecture.tensors(shape):
            if stored.of_router_bias:
                bias_LE[names[next(iter(stored.parts))]] = _read(tensors, stored.name, folder)
    return bias_LE


def _read(tensors: Mapping[str, tuple[Any, str]], name: str, folder: Path) -> Tensor:
    try:
        file, there = tensors[name]
        found: Tensor = file.get_tensor(there)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder}: {name} cannot be read ({error}); copy or save the model again") from None
    return found


@contextmanager
def _opened(plain: HuggingFaceModel) -> Iterator[dict[str, tuple[Any, str]]]:
    """Open a model's weight files, and yield {full name of a tensor: (open file, name in the file)}."""
    files, index = [WHOLE], plain.folder / "model.safetensors.index.json"
    if index.exists():
        places = read_json(index).get("weight_map")
        # Only names of files: a path might lead out of the folder.
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and file.endswith(".safetensors") and not {"/", "\\", "\0"} & set(file)
            for file in places.values()
        ):
            raise InputError(f"{index}: weight_map must map tensors to files in its folder; save the model again")
        # save_pretrained may leave the index of an earlier model, or its model.safetensors, which transformers reads.
        shards = sorted(set(places.values()))
        if WHOLE in shards or not (plain.folder / WHOLE).exists():
            files = shards
        elif any((plain.folder / file).exists() for file in shards):
            raise InputError(
                f"{plain.folder}: {WHOLE} contains one model, and the files that {index.name} lists contain another; "
                "remove the files of one model"
            )
    tensors: dict[str, tuple[Any, str]] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                storage.require_file(plain.folder / file)
                opened: Any = stack.enter_context(safe_open(plain.folder / file, "pt"))
            except FileNotFoundError:
                raise InputError(
                    f"{plain.folder}: no {file}; save the model there with save_pretrained of transformers"
                ) from None
            except OSError as error:
                why = f"cannot be read: {error.strerror or error}; make it readable, or save the model again"
                raise InputError(f"{plain.folder / file}: {why}") from None
            except SafetensorError as error:
                why = f"damaged, or not a safetensors file ({error}); save the model again"
                raise InputError(f"{plain.folder / file}: {why}") from None
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                whole = plain.architecture.whole_name(name)
                if whole in tensors:
                    raise InputError(
                        f"{plain.folder / file}: {name} and {tensors[whole][1]} are the same tensor; remove one"
                    )
                tensors[whole] = (opened, name)
        yield tensors
