"""Message templates: their formats; every template is used, and its fields exist."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from leaven.catalogue import messages
from leaven.catalogue.messages import filled
from leaven.catalogue.neighbours import Votes
from leaven.catalogue.starter.request import StarterRequest
from leaven.catalogue.starter.starter import starter

B = 10**9
RARE = 11  # templates that no request below needs


def test_field_formats() -> None:
    votes = Votes(0.1, {"a": 0.1, "b": 0.1, "c": 0.033})
    facts = {"votes": votes, "n": 1_500_000_000, "names": ["x", "y"], "none": None, "yes": True}
    templates = {
        "{votes:each .2g}": ["a 0.1, b 0.1, c 0.033"],
        "{votes:range .2g}": ["0.1 (0.033 .. 0.1)"],
        "{votes:count g}": ["2 of 3 lineages (a, b); others: c 0.033"],
        "{n:q} of {names:size}: {names:names}": ["1.50 B of 2: x, y"],
        "{none:.2g}": [],
        "{none.value:q} {unknown}": [],
        "{yes:if}so": ["so"],
        "{yes:unless}not so": [],
        "{none:unless}without": ["without"],
    }
    assert {template: filled(template, facts) for template in templates} == templates


def _templates(section: str) -> Iterator[str]:
    file = Path(messages.__file__).with_name("messages.toml")
    for entry in tomllib.loads(file.read_text(encoding="utf-8"))[section].values():
        yield from [entry] if isinstance(entry, str) else entry


def test_every_template_of_a_starter_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: set[str] = set()
    fill = messages._FORMATTER.vformat

    def record(template: str, args: tuple[()], facts: dict[str, object]) -> str:
        text = fill(template, args, facts)  # raises where the part is left out
        printed.add(template)
        return text

    monkeypatch.setattr(messages._FORMATTER, "vformat", record)
    requests = [
        StarterRequest("tuned", 300_000, 6_000_000),
        StarterRequest("tuned", 300_000, 6_000_000, proxy=43_300),
        StarterRequest("dear", 125_000_000, 2_500_000_000),
        StarterRequest("long", B, 20 * B, seq_len=32_768, vocab=32_768, source="x", text_tokens=B),
        StarterRequest("few", B, 20 * B, seq_len=131_072),
        StarterRequest("given", B, 20 * B, proxy=0),
        StarterRequest("given", B, 20 * B, proxy=10**8),
        StarterRequest("given", 125_000_000, 2_500_000_000, proxy=60_000_000),
        StarterRequest("short", 7 * B, 60 * B),
        StarterRequest("searched", B, 20 * B),
        StarterRequest("large", 70 * B, 15_000 * B),
        StarterRequest("beyond", 10_000 * B, 200_000 * B),
        *(
            StarterRequest("reference", 7 * B, 300 * B, reference=run)
            for run in ("olmo2-7b", "bloom-176b", "llama3-405b", "gopher-280b", "smollm2-1.7b", "glm-130b")
        ),
        StarterRequest("divided", 7 * B, 300 * B, reference="llama2-70b", gpus=96),
    ]
    for request in requests:
        assert all(starter(request).recipe.why.values()), request
    never = {part for section in ("reasons", "steps", "tuning", "uncertain") for part in _templates(section)}
    assert len(never - printed) <= RARE, never - printed
