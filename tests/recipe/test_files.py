"""The recipe file: round trips, comments, overrides, and errors for bad input."""

import tomllib
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from tests.errors import refused

from leaven.recipe.files import parse_recipe, read_recipe, render
from leaven.recipe.recipe import Recipe, differences, effective_differences


def test_comments_and_order_survive_a_change(tiny: Recipe, tiny_text: str) -> None:
    changed = tiny.replace({"hyperparameters.lr": 0.02, "why": {"hyperparameters.lr": "because"}})
    text = render(changed, tiny_text)
    assert "# as small as a transformer gets" in text
    assert "tokens = 256             # eight sequences" in text
    assert parse_recipe(text, "x") == changed
    assert text.index("[data]") < text.index("[batch]") < text.index("[why]")


def test_a_byte_order_mark_is_no_part_of_a_recipe(tiny: Recipe, tiny_text: str, tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_text(tiny_text, encoding="utf-8-sig")
    assert read_recipe(path) == tiny


def test_an_overridden_value_loses_its_reason(tiny: Recipe) -> None:
    text = render(tiny.replace({"why": {"hyperparameters.lr": "study x", "batch.tokens": "laws"}}))
    assert parse_recipe(text, "text", ["hyperparameters.lr=0.5"]).why == {"batch.tokens": "laws"}


def test_modules_depth_stages_and_why_round_trip(tiny: Recipe) -> None:
    rich = tiny.replace(
        {
            "hyperparameters.modules": {
                "attention.query": {"lr": 0.5, "init_std": 1.4},
                "embedding": {"lr": 4.0},
                "unembedding": {"lr": 1.0, "eps": 1.0},  # all ones: neutral, but stated
            },
            "hyperparameters.depth": {"lr": (1.0, 1.2, 0.8)},
            "hyperparameters.grad_clip": {"mode": "running", "limit": 1.0},
            "batch": {
                "tokens": 256,
                "stages": [{"from_tokens": 0, "tokens": 128}, {"from_tokens": 512, "tokens": 256}],
            },
            "scaling.base": {"width": 16, "depth": 2, "batch_tokens": 256, "tokens": 1024, "d_ff": 48},
            "why": {"hyperparameters.lr": 'a "quoted" reason\nover two lines'},
        }
    )
    assert parse_recipe(render(rich), "x") == rich
    assert parse_recipe(render(rich, render(tiny)), "x") == rich
    assert parse_recipe(render(tiny, render(rich)), "x") == tiny


def test_an_empty_table_of_the_earlier_file_stays(tiny: Recipe, tiny_text: str) -> None:
    text = f"{tiny_text}\n[hyperparameters.modules]\n# none yet\n"
    assert render(tiny, text) == text


def test_global_clipping_is_a_number_and_the_others_a_table(tiny: Recipe, tiny_file: Path) -> None:
    assert tomllib.loads(render(tiny))["hyperparameters"]["grad_clip"] == 1.0
    for text in ("2.5", '{mode = "global", limit = 2.5}'):
        recipe = read_recipe(tiny_file, [f"hyperparameters.grad_clip={text}"])
        assert recipe == tiny.replace({"hyperparameters.grad_clip": 2.5})
    module = read_recipe(tiny_file, ['hyperparameters.grad_clip={mode = "per-module"}'])
    assert tomllib.loads(render(module))["hyperparameters"]["grad_clip"] == {"mode": "per-module", "limit": 1.0}
    assert parse_recipe(render(module, render(tiny)), "x") == module
    assert parse_recipe(render(tiny, render(module)), "x") == tiny


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("data.tokens=1M", ("data", "tokens"), 1_000_000),
        ("hyperparameters.lr=2e-3", ("hyperparameters", "lr"), 0.002),
        ("schedule.decay=wsd", ("schedule", "decay"), "wsd"),
        ("model.qk_norm=false", ("model", "qk_norm"), False),
        ("hyperparameters.modules.mlp.out.lr=0.5", ("hyperparameters", "modules", "mlp.out", "lr"), 0.5),
    ],
)
def test_overrides(tiny_file: Path, override: str, path: tuple[str, ...], value: object) -> None:
    assert reduce(getitem, path, read_recipe(tiny_file, [override]).model_dump()) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.d_modle=64", "[model] d_modle: no such key; did you mean d_model?"),
        ("hyperparameters.modules.embedding.lrr=2", "lrr: no such key; did you mean lr?"),
        ("batch.ramp.start=3", "[batch.ramp] start: no such key; there are start_tokens, increment_tokens, over_tok"),
        ('model.d_model="wide"', "[model] d_model: input should be a valid integer, not 'wide'"),
        ("hyperparameters.lr=-1", "[hyperparameters] lr: input should be greater than 0, not -1"),
        ("hyperparameters.lr=0,002", "[hyperparameters] lr: input should be a valid number, not '0,002'"),
        ("hyperparameters.lr=nan", "[hyperparameters] lr: input should be a finite number"),
        ("hyperparameters.grad_clip=-1", "[hyperparameters.grad_clip] limit: input should be greater than or equal"),
        (
            "hyperparameters.modules.embedding.residual=2",
            "only the last matrix of a residual branch has one: att",
        ),
        ("model.d_model=65", "d_model 65 is not n_heads x d_head = 2 x 8 = 16; set d_model = 16"),
        ("batch.tokens=16", "a batch of 16 tokens is smaller than one sequence of 32"),
        ("batch.tokens=100", "not a whole number of sequences of 32; use 96 or 128"),
        ("schedule.decay=cosin", "should be 'cosine', 'linear', 'wsd', 'inverse_sqrt' or 'constant', not 'cosin'"),
        ("schedule.warmup_tokens=1M", "longer than the run"),
        (
            "hyperparameters.modules.attention.quary.lr=2",
            "no module 'attention.quary' in this model; did you mean at",
        ),
        ("scaling.base={width = 20, depth = 1, batch_tokens = 1, tokens = 1}", "scaling.base: width 20 does not"),
        ("name.x=3", "name is a value, not a table"),
        ("nothing", "write --set key.subkey=value"),
        (
            "hyperparameters.lr=0.01\nhyperparameters.weight_decay=0.3",
            "--set hyperparameters.lr: more than one value",
        ),
        ("schedule.decay=wsd\ndata.seed=3", "--set schedule.decay: more than one value"),
        ("data.seed=7 # \ndata.tokens=1M", "--set data.seed: more than one value, or a comment, follows the ="),
        ("data.seed=7 # x", "--set data.seed: more than one value, or a comment, follows the ="),
    ],
)
def test_bad_values_are_one_line_that_says_what_to_type(tiny_file: Path, override: str, message: str) -> None:
    with refused(message):
        read_recipe(tiny_file, [override])


@pytest.mark.parametrize(
    ("two", "says"),
    [
        (("data.seed=1", "data.seed=2"), "the same value; leave one out"),
        (
            ("hyperparameters.modules.mlp.out.lr=2.0", 'hyperparameters.modules."mlp.out".lr=3.0'),
            "the same value; leave one out",
        ),
        (("batch.tokens=512", "batch={tokens=1024}"), "a table and a value in it; write both in one"),
    ],
)
def test_one_value_is_set_only_once(tiny_file: Path, two: tuple[str, str], says: str) -> None:
    for first, second in (two, two[::-1]):
        with refused(f"--set {first} and --set {second} set {says}"):
            read_recipe(tiny_file, [first, second])


def test_a_table_and_a_value_that_it_lacks_are_both_set(tiny_file: Path) -> None:
    assert read_recipe(tiny_file, ["batch={tokens=1024}", "batch.micro_batch=4"]).batch.micro_batch == 4
    assert read_recipe(tiny_file, ["evaluation=", "evaluation.tokens=512"]).evaluation.tokens == 512
    for lost in (["batch.micro_batch=4", "batch={tokens=1024}"], ["evaluation.tokens=512", "evaluation="]):
        with refused("set a table and a value in it; write both in one"):
            read_recipe(tiny_file, lost)


def test_a_reason_is_removed_in_any_spelling_of_its_value(tiny: Recipe) -> None:
    why = {"hyperparameters.modules.mlp.out.lr": "measured", "data.seed": "stays"}
    text = render(tiny.replace({"why": why}))
    changed = parse_recipe(text, "x", ['hyperparameters.modules."mlp.out".lr=3.0'])
    assert changed.why == {"data.seed": "stays"}


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("name = \n")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.toml").write_text("")
    for name, message in {
        "absent.toml": "no such file",
        "": "a folder",
        "bad.toml": "bad.toml: not TOML: Invalid value (at line 1",
        "binary.toml": "not a text file",
        "empty.toml": "missing; it has no default, so write it",
    }.items():
        with refused(message):
            read_recipe(tmp_path / name)


def test_a_z_loss_is_written_only_if_there_is_one(tiny: Recipe) -> None:
    """So recipes without one have the hashes that they had before leaven knew a z-loss."""
    assert "z_loss" not in render(tiny)
    assert "z_loss" not in tiny.model_dump(mode="json")["hyperparameters"]
    assert "z_loss = 0.0001" in render(tiny.replace({"hyperparameters.z_loss": 1e-4}))
    assert tiny.replace({"hyperparameters.z_loss": 0.0}) == tiny


def test_differences_leave_out_what_does_not_change_the_loss(tiny: Recipe) -> None:
    other = tiny.replace({"hyperparameters.lr": 0.02, "name": "other", "layout.dp": 2, "why": {"a": "b"}})
    assert differences(tiny, other) == [("hyperparameters.lr", 0.01, 0.02)]


def test_a_module_without_multipliers_has_multipliers_of_1(tiny: Recipe) -> None:
    embedding = "hyperparameters.modules.embedding"
    plain = tiny.replace({"hyperparameters.modules": {}})
    stated, other = (plain.replace({embedding: {"lr": lr}}) for lr in (1.0, 4.0))
    assert effective_differences(plain, stated) == effective_differences(stated, plain) == []
    assert effective_differences(plain, other) == [(f"{embedding}.lr", 1.0, 4.0)]
    both = other.replace({"hyperparameters.modules.mlp.out.residual": 0.5})
    assert effective_differences(both, other) == [("hyperparameters.modules.mlp.out.residual", 0.5, 1.0)]
