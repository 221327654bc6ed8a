"""The table of docs/evidence/performance.md is up to date with the saved results; a profile groups operations."""

import json

import pytest
from benchmarks.performance import GPU_RESULTS, PAGE, RESULTS, gpu_tables, table
from benchmarks.profile_step import group_of


def test_the_page_has_the_table_of_the_saved_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table(json.loads(RESULTS.read_text())) in page
    if GPU_RESULTS.exists():
        assert gpu_tables(json.loads(GPU_RESULTS.read_text())) in page


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("mkldnn::_linear_pointwise", "products of linear layers and loss"),
        ("aten::mm", "products of linear layers and loss"),
        ("aten::baddbmm", "products of attention"),
        ("graph_0_cpp_fused__softmax_4", "softmax of attention and loss, exponentials"),
        ("aten::_fused_adamw_", "Adam and norms of gradients"),
        ("graph_0_cpp_fused_add_expand_mul_2", "norms, positions, activations, additions"),  # "exp" is in expand
        ("_LinearBackward", "Python and autograd"),
    ],
)
def test_an_operation_is_counted_in_its_group(name: str, group: str) -> None:
    assert group_of(name) == group
