"""The table of docs/evidence/performance.md is up to date with the saved results."""

import json

from benchmarks.performance import PAGE, RESULTS, table


def test_the_page_has_the_table_of_the_saved_results() -> None:
    assert table(json.loads(RESULTS.read_text())) in PAGE.read_text(encoding="utf-8")
