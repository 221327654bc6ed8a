"""The table of docs/evidence/performance.md is up to date with the saved results."""

import json

from benchmarks.performance import GPU_RESULTS, PAGE, RESULTS, gpu_tables, table


def test_the_page_has_the_table_of_the_saved_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table(json.loads(RESULTS.read_text())) in page
    if GPU_RESULTS.exists():
        assert gpu_tables(json.loads(GPU_RESULTS.read_text())) in page
