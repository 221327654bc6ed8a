"""Runs on token ids of other programs: their losses are those of the text, and a run without a tokenizer gets no
text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.written import documents, hugging_face, megatron
from tests.errors import refused
from tokenizers import Tokenizer

from leaven.cli.next_commands import after_train
from leaven.data.tokens import prepare
from leaven.recipe.recipe import Recipe
from leaven.training.load import export_run, load_run
from leaven.training.run_folder import RunFolder
from leaven.training.trainer import train


def run(recipe: Recipe, folder: Path, **how: Any) -> Any:
    return train(recipe, prepare(recipe.data, recipe.model.vocab_size), folder, **how)


def lines(folder: Path) -> list[tuple[float, ...]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in RunFolder(folder).metrics()]


@pytest.mark.long
@pytest.mark.parametrize("how", ["packed", "isolated"])
def test_losses_are_those_of_the_same_tokens_from_text(tiny: Recipe, how: str, tmp_path: Path) -> None:
    """The files have the tokens of the text without end-of-text tokens, which leaven adds again."""
    text = tiny.replace({"data.documents": how, "data.tokens": 1_280})
    tokens = prepare(text.data, text.model.vocab_size)
    assert tokens.tokenizer_path is not None
    sides = [(ids[:], np.flatnonzero(ids[:] == tokens.end_of_text) + 1) for ids in (tokens.train, tokens.validation)]
    split = [np.split(*side) for side in sides]
    train_ids, validation_ids = ([part[:-1].tolist() for part in parts if len(part)] for parts in split)
    source = {
        "source": megatron(tmp_path / "train.bin", train_ids, code=4),
        "validation": hugging_face(tmp_path / "validation", validation_ids),
    }
    ids = text.replace({"data.source": [source], "data.end_of_text": tokens.end_of_text})
    named = ids.replace({"data.tokenizer": str(tokens.tokenizer_path), "data.end_of_text": None})
    of_text, of_ids, of_named = (
        run(recipe, tmp_path / name) for name, recipe in (("text", text), ("ids", ids), ("named", named))
    )
    assert lines(tmp_path / "text") == lines(tmp_path / "ids") == lines(tmp_path / "named")
    assert of_text.loss == of_ids.loss == of_named.loss
    assert of_text.bits_per_byte == of_named.bits_per_byte is not None
    assert of_ids.bits_per_byte is None


def mixed(tiny: Recipe, folder: Path, texts: list[list[int]]) -> Recipe:
    sources = [
        {"source": megatron(folder / "a.bin", texts), "weight": 3.0},
        {"source": hugging_face(folder / "set", documents(1)), "weight": 1.0},
    ]
    return tiny.replace({"data.source": sources, "data.tokens": 5_120})


def test_a_file_that_changed_since_is_noticed(tiny: Recipe, tmp_path: Path) -> None:
    recipe = mixed(tiny, tmp_path, documents())
    parts = RunFolder(tmp_path / "parts")
    run(recipe, parts.path, stop=lambda: len(parts.metrics()) >= 2)
    before = lines(parts.path)
    changed = documents()
    changed[30][5] += 1
    megatron(tmp_path / "a.bin", changed)
    with refused("was trained on other text", "have changed since"):
        run(recipe, parts.path)
    assert lines(parts.path) == before


def test_a_run_ends_texts_with_the_token_that_ended_its_documents(tiny: Recipe, tmp_path: Path) -> None:
    """Also if the tokenizer has another token of a usual name, which is special or comes first."""
    text = prepare(tiny.data, tiny.model.vocab_size)
    tokenizer = Tokenizer.from_file(str(text.tokenizer_path))
    tokenizer.add_special_tokens(["<|im_end|>"])
    end = tokenizer.token_to_id("<|im_end|>")
    tokenizer.save(str(tmp_path / "chat.json"))
    shape = {"model.vocab_size": end + 1, "data.tokens": 256, "schedule.warmup_tokens": 0}
    ids = {"data.source": [{"source": megatron(tmp_path / "a.bin", documents())}], "data.end_of_text": end}
    recipe = tiny.replace(shape | ids | {"data.tokenizer": str(tmp_path / "chat.json")})
    run(recipe, tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert loaded.end_of_text == end
    export_run(loaded, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == (end, end)
    run(tiny.replace(shape | {"data.tokenizer": str(tmp_path / "chat.json")}), tmp_path / "text")
    assert load_run(tmp_path / "text").end_of_text == text.end_of_text
    older = replace(load_run(tmp_path / "text"), trained_end="first")
    assert older.end_of_text == text.end_of_text
    with refused(f"no token {end}, which ended documents in training"):
        _ = replace(loaded, tokenizer=Tokenizer.from_file(str(text.tokenizer_path))).end_of_text


def test_without_a_tokenizer_text_is_refused(tiny: Recipe, tmp_path: Path) -> None:
    recipe = mixed(tiny, tmp_path, documents()).replace({"data.tokens": 256, "schedule.warmup_tokens": 0})
    run(recipe, tmp_path / "run")
    assert len(after_train(tmp_path / "run", recipe)) == 1
    (tmp_path / "run" / "tokenizer.json").touch()
    assert len(after_train(tmp_path / "run", recipe)) == 3
    with refused("tokenizer.json: damaged", "replace it with the tokenizer.json that the run was trained with"):
        load_run(tmp_path / "run")
    experts = {"number": 4, "active": 2, "d_expert": 8, "shared": 1, "router": "softmax"}  # in no architecture
    assert len(after_train(tmp_path / "run", recipe.replace({"model.experts": experts}))) == 2
    (tmp_path / "run" / "tokenizer.json").unlink()
    with refused("no tokenizer.json", "trained on token ids", "copy the tokenizer.json"):
        load_run(tmp_path / "run")
    with refused('documents = "isolated" needs the id', "set end_of_text in [data]"):
        run(recipe.replace({"data.documents": "isolated"}), tmp_path / "isolated")
    assert not (tmp_path / "isolated").exists()
