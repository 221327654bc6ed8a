"""The formats of fields in message templates."""

from leaven.catalogue.messages import filled
from leaven.catalogue.neighbours import Votes


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
