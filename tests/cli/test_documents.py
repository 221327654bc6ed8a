"""Every document is described in docs, and commands print what is described."""

import json
from pathlib import Path

import pytest
from benchmarks.documents_page import PAGE, page
from pydantic import ValidationError
from tests.cli.conftest import Verb

from leaven.documents import Document, catalogue, checks, planning, runs

DOCUMENTS = {
    each.SCHEMA: each
    for module in (catalogue, checks, planning, runs)
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, Document) and each is not Document
}


def test_the_page_of_documents_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "type: python benchmarks/documents_page.py"


@pytest.mark.parametrize(
    ("command", "schema"),
    [
        ("recipes list --params 1B..2B", "run-summary"),
        ("recipes show bloom-176b", "published-run"),
        ("recipes nearest --params 7B --tokens 2T", "near-run"),
        ("recipes diff pythia-70m bloom-176b", "difference"),
        ("recipes diff RECIPE bloom-176b", "recipe-difference"),
        ("laws --params 1B --tokens 20B --batch-tokens 1M", "law"),
        ("laws --flops 1e21", "optimum"),
        ("hardware H100-80GB", "accelerator"),
        ("show --rule mup", "rule"),
        ("show RECIPE", "show"),
        ("transfer RECIPE --width 32", "show"),
        ("plan RECIPE --gpus 8xH100-80GB --layout dp=8 --explain tp=2 --price 2", "plan"),
        ("plan --budget 8xH100x3d --mfu 0.4", "budget"),
        ("new OUT --params 100M --tokens 2B", "new"),
        ("export config RECIPE --to litgpt -o OUT --lossy", "export-config"),
    ],
)
def test_a_verb_prints_its_document(leaven: Verb, tiny_file: Path, tmp_path: Path, command: str, schema: str) -> None:
    words = command.replace("RECIPE", str(tiny_file)).replace("OUT", str(tmp_path / "out.toml")).split()
    code, out, err = leaven(*words, "--json")
    assert code == 0, err
    printed = json.loads(out)
    for each in printed if isinstance(printed, list) else [printed]:
        assert each["schema"] == f"leaven.{schema}/1"
        assert DOCUMENTS[each["schema"]].model_validate(each).dump() == each


def test_another_schema_is_an_error_and_a_newer_key_is_ignored() -> None:
    with pytest.raises(ValidationError, match=r"the schema is leaven.report/2, expected leaven.report/1"):
        runs.ReportDocument.model_validate({"schema": "leaven.report/2", "path": "x"})
    assert runs.ReportDocument.model_validate({"path": "x", "new": "y"}).dump().keys() == {"path", "schema"}
