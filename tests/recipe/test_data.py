import pytest
from tests.errors import refused

from leaven.recipe.files import parse_recipe, render
from leaven.recipe.recipe import Recipe

SEVERAL = """source = [  # mixed
    { source = "web/*.parquet", weight = 3 },
    { source = "code.jsonl.zst", weight = 1, text = "content" },
]"""


@pytest.fixture
def several(tiny_text: str) -> str:
    return "\n".join(SEVERAL if line.startswith("source") else line for line in tiny_text.splitlines()) + "\n"


def test_sources_and_their_comments_survive_a_change_elsewhere(several: str) -> None:
    recipe = parse_recipe(several, "x.toml")
    assert [(s.source, s.weight, s.text) for s in recipe.data.sources] == [
        ("web/*.parquet", 3.0, "text"),
        ("code.jsonl.zst", 1.0, "content"),
    ]
    assert render(recipe, several) == several
    changed = render(recipe.replace({"data.tokens": 20_480}), several)
    assert changed == several.replace("10_240", "20_480")


def test_sources_are_written_and_read_back(several: str, tiny_text: str) -> None:
    recipe = parse_recipe(several, "x.toml")
    for text in (render(recipe), render(recipe, tiny_text)):
        assert parse_recipe(text, "y.toml") == recipe
    assert parse_recipe(render(parse_recipe(tiny_text, "x.toml"), several), "y.toml").data.source.endswith("*.txt")
    assert 'text = "text"' not in render(recipe, tiny_text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[]", "[data] source: tuple should have at least 1 item"),
        ('[{sorce="x"}]', "[data.source.0] sorce: no such key; did you mean source?"),
        ('[{source="x", weight=0}]', "[data.source.0] weight: input should be greater than 0, not 0"),
        ('[{source="x"}, {source="x"}]', "[data] source 'x' appears twice; give it once, with the sum of"),
        ('[{source="x", weight=0.1234567}, {source="y"}]', "[data] weights 0.123457, 1 have no common denominator"),
    ],
)
def test_wrong_sources_are_refused_in_one_line(tiny_text: str, given: str, message: str) -> None:
    with refused(message):
        parse_recipe(tiny_text, "x.toml", [f"data.source={given}"])


def test_replace_leaves_its_arguments_unchanged(tiny: Recipe) -> None:
    experts = {"number": 4, "active": 2, "d_expert": 32}
    changes = {"model.experts": experts, "model.experts.balance": "both"}
    changed = tiny.replace({"model.d_ff": 64} | changes)
    assert changed.model.experts.balance == "both"
    assert experts == {"number": 4, "active": 2, "d_expert": 32}
