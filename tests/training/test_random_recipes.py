"""Random recipes: a run that is stopped, damaged and moved again and again is the undisturbed run, bit for bit, and
its export computes the same logits in transformers.

`RANDOM_RECIPES=200 pytest tests/training/test_random_recipes.py` tries 200. docs/log.md has the last numbers.
The runs are too short for the spike guard; test_spikes.py and test_recovery.py test it.
"""

import os
import random
import shutil
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import torch
import transformers

from leaven.data.tokens import TokenSet, prepare
from leaven.errors import InputError
from leaven.planning.trainable import require_trainable
from leaven.recipe.files import parse_recipe, read_recipe, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.load import export_run, load_run
from leaven.training.loop import Diverged
from leaven.training.metrics import Step
from leaven.training.run_folder import RunFolder, checkpoints
from leaven.training.trainer import train

RECIPES = int(os.environ.get("RANDOM_RECIPES", "4"))


LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "norm_placement": "pre"}
GPT2 = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "norm_placement": "pre", "bias": True}
QK_NORM = {"qk_norm": True, "qk_norm_per_head": False, "qk_norm_whole": False}
MIXTRAL = {"number": 4, "active": 2, "d_expert": 16}
# Shapes that transformers has, over a random shape: Llama, Mistral, Qwen3, GPT-2, OLMo 2, Mixtral.
KNOWN: list[dict[str, Any]] = [
    LLAMA,
    LLAMA | {"window": 8},
    LLAMA | QK_NORM,
    GPT2 | {"tied_embeddings": True},
    LLAMA | QK_NORM | {"norm_placement": "output", "qk_norm_whole": True},
    LLAMA | {"experts": MIXTRAL, "tied_embeddings": False},
]


def known_model(draw: random.Random) -> dict[str, Any]:
    """Return a random shape that transformers has."""
    random_shape = model(draw)
    sizes = ("n_layers", "n_heads", "d_head", "d_ff", "vocab_size", "seq_len", "tied_embeddings")
    shape = {name: random_shape[name] for name in sizes if name in random_shape}
    shape |= {"n_kv_heads": shape["n_heads"], "d_model": shape["n_heads"] * shape["d_head"]}
    return shape | draw.choice(KNOWN)


def model(draw: random.Random) -> dict[str, Any]:
    heads, d_head, maybe = draw.choice((1, 2, 4)), draw.choice((4, 8)), lambda: draw.random() < 0.25
    shape: dict[str, Any] = {
        "n_layers": draw.choice((1, 2, 3)),
        "d_model": draw.choice((heads * d_head, 24)),
        "n_heads": heads,
        "n_kv_heads": draw.choice([kv for kv in (1, 2, 4) if heads % kv == 0]),
        "d_head": d_head,
        "d_ff": draw.choice((16, 24, 40)),
        "vocab_size": draw.choice((257, 300, 320)),
        "seq_len": draw.choice((16, 32, 48)),
        "norm": draw.choice(("rmsnorm", "layernorm")),
        "activation": draw.choice(("swiglu", "geglu", "gelu", "relu", "squared_relu")),
        "positions": draw.choice(("rope", "rope", "learned", "alibi")),
        "norm_placement": draw.choice(("pre", "pre", "output", "sandwich")),
    }
    if shape["d_model"] != heads * d_head:
        shape["d_attention"] = heads * d_head
    names = ("qk_norm", "tied_embeddings", "embedding_norm", "bias", "parallel_branches")
    shape |= {name: True for name in names if maybe()}
    if shape.get("qk_norm") and maybe():
        shape[draw.choice(("qk_norm_per_head", "qk_norm_whole"))] = True
    values = {"dropout": 0.1, "rotary_fraction": 0.5, "attention_bias": "qkv", "window": 8, "logit_softcap": 15.0}
    shape |= {name: value for name, value in values.items() if maybe()}
    if maybe():
        active = draw.choice((1, 2))
        shape["experts"] = {
            "number": draw.choice((2, 4)),
            "active": active,
            "d_expert": 16,
            "shared": draw.choice((0, 1)),
            "router": draw.choice(("softmax", "sigmoid")),
            "normalise": active > 1 and maybe(),
            "balance": draw.choice(("loss", "bias", "both", "none")),
        }
        shape |= {"norm_placement": "pre", "activation": "swiglu", "bias": False}
    return shape


def random_recipe(draw: random.Random, corpus: Path, known: bool) -> Recipe:
    """Return a random recipe that can be trained, with 12 to 40 steps. If ``known``, transformers has the model."""
    while True:
        shape = known_model(draw) if known else model(draw)
        sequences, seq_len = draw.choice((4, 6, 8)), shape["seq_len"]
        batch = sequences * seq_len
        tokens = batch * draw.randrange(12, 40) + draw.choice((0, 7, batch // 2))
        several = [{"source": f"{corpus}/*[02468].txt", "weight": 3.0}, {"source": f"{corpus}/*[13579].txt"}]
        clips = (1.0, 0.0, {"mode": "per-module", "limit": 0.5}, {"mode": "running", "limit": 1.2})
        ramp = {"start_tokens": seq_len, "increment_tokens": seq_len, "over_tokens": tokens // 2}
        document: dict[str, Any] = {
            "name": "random",
            "model": shape,
            "data": {
                "source": draw.choice((several, f"{corpus}/*.txt")),
                "tokens": tokens,
                "seed": draw.randrange(5),
                "documents": draw.choice(("packed", "isolated")),
            },
            "batch": {"tokens": batch, "micro_batch": draw.choice(("auto", 1, 2, 3, 8))},
            "schedule": {
                "warmup_tokens": draw.choice((0, batch * 3)),
                "decay": draw.choice(("cosine", "linear", "wsd", "constant")),
            },
            "hyperparameters": {
                "lr": draw.choice((0.003, 0.01, 0.02)),
                "init_std": 0.1,
                "optimizer": draw.choice(("adamw", "adamw", "adam", "muon")),
                "grad_clip": draw.choice(clips),
                "z_loss": draw.choice((0.0, 1e-3)),
                "modules": draw.choice(({}, {"attention.out": {"lr": 1.5, "residual": 0.7}})),
                "depth": draw.choice(({}, {"lr": [1.0, 0.5], "residual": [1.0, 1.3]})),
            },
            "stability": {
                "keep": draw.choice((1, 2, 3)),
                "checkpoint_every_tokens": draw.choice((batch * 3, batch * 5 + 1, batch * 50)),
            },
            "evaluation": {"tokens": draw.choice((seq_len * 4, 10**6)), "every_tokens": batch * 7 + 3},
            "scaling": {"rule": draw.choice(("complete-d-p", "completep", "mup", "standard"))},
            "precision": {"compute": draw.choice(("fp32", "fp32", "bf16", "fp16"))},
            "layout": {"recompute": draw.choice(("none", "selective", "full"))},
        }
        if draw.random() < 0.3:
            document["batch"]["ramp"] = ramp | {"rule": draw.choice(("fixed", "scaled"))}
        if draw.random() < 0.3:
            document["average"] = draw.choice(({"last": 0.3}, {"half_life_tokens": batch * 4}))
        if draw.random() < 0.25:
            document["stability"]["noise_scale_every_tokens"] = batch * 4
        try:
            recipe = parse_recipe(tomlkit.dumps(document), "random.toml")
            require_trainable(recipe, 1)
        except InputError:  # the drawn options exclude one another
            continue
        return recipe


def disturb(run: RunFolder, draw: random.Random) -> None:
    """Damage the newest checkpoint, move the folder, leave a torn line or a temporary folder, or do nothing."""
    kind = draw.random()
    if kind < 0.15 and len(found := checkpoints(run.checkpoints)) > 1:
        file = draw.choice(sorted(found[-1].iterdir()))
        damaged = bytearray(file.read_bytes())
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
    elif kind < 0.25:
        shutil.copytree(run.path, run.path.with_name("copy"))
        shutil.rmtree(run.path)
        run.path.with_name("copy").rename(run.path)
    elif kind < 0.35:
        with run.metrics_file.open("ab") as file:
            file.write(b'{"torn')
    elif kind < 0.45:
        (run.checkpoints / ".tmp-x").mkdir(exist_ok=True)


def interrupted(recipe: Recipe, tokens: TokenSet, folder: Path, draw: random.Random) -> tuple[float | None, ...]:
    """Train until the run is finished, with a stop after 1 to 11 steps each time. Return the losses."""
    left = 0  # steps until the next stop

    def on_step(step: Step) -> None:
        nonlocal left
        left -= 1

    def stop() -> bool:
        return left <= 0

    for start in count():
        left = draw.randrange(1, 12)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what `disturb` did
            ended = train(recipe, tokens, folder, on_step=on_step, stop=stop, history=False)
        if ended.finished:
            return ended.loss, ended.averaged_loss
        if start < 20:
            disturb(RunFolder(folder), draw)
    raise AssertionError


def trained_steps(folder: Path) -> list[tuple[object, ...]]:
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "noise_scale")
    return [tuple(line.get(key) for key in keys) for line in RunFolder(folder).metrics()]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(RECIPES))
@pytest.mark.filterwarnings("ignore")
def test_a_disturbed_run_is_the_undisturbed_one(seed: int, corpus: Path, tmp_path: Path) -> None:
    draw = random.Random(seed)
    known = bool(seed % 2)
    recipe = random_recipe(draw, corpus, known)
    write_recipe(recipe, tmp_path / "again.toml")
    assert read_recipe(tmp_path / "again.toml") == recipe
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    try:
        whole = train(recipe, tokens, tmp_path / "whole", history=False)
    except Diverged as error:
        pytest.skip(str(error))
    assert interrupted(recipe, tokens, tmp_path / "run", draw) == (whole.loss, whole.averaged_loss)
    assert trained_steps(tmp_path / "run") == trained_steps(tmp_path / "whole")
    for averaged in {False, recipe.average is not None}:
        runs = [load_run(tmp_path / name, averaged=averaged) for name in ("whole", "run")]
        assert all(torch.equal(tensor, runs[1].weights[name]) for name, tensor in runs[0].weights.items())
        if not known:
            continue
        export_run(runs[1], tmp_path / f"exported-{averaged}")
        ids = torch.randint(0, recipe.model.vocab_size, (2, recipe.model.seq_len))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"exported-{averaged}")
        with torch.no_grad():
            ours = runs[1].model(ids)
            torch.testing.assert_close(
                theirs.eval()(ids).logits, ours, rtol=1e-3, atol=2e-4 * float(ours.abs().max())
            )
