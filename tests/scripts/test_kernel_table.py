"""Attention of families whose heads are odd compiles for chips that are not here."""

import pytest

from scripts.planning import kernel_table


@pytest.mark.parametrize(
    ("family", "operation", "kernel"),
    [
        pytest.param("phi3", "pages", "pallas", marks=pytest.mark.slow),
        pytest.param("gemma4_text", "decode", "pallas", marks=pytest.mark.slow),  # heads of 256 and of 512
        pytest.param("qwen3_next", "decode", "pallas", marks=pytest.mark.seeds),
        pytest.param("gemma3n_text", "prefill", "xla", marks=pytest.mark.slow),
        pytest.param("deepseek_v2", "rows backward", "flash", marks=pytest.mark.slow),
    ],
)
def test_a_gpu_compiles_it_by_its_kernel(family, operation, kernel):
    (row,) = kernel_table.compiled(family, "h100", [operation])
    assert "refused" not in row
    assert row["kernel"] == kernel and row["temporary_bytes"] > 0


def test_chips_with_the_same_kernels_share_a_line_and_what_does_not_compile_is_said():
    rows = [
        {"family": "llama", "chip": chip, "operation": operation, "kernel": "flash"} | refused
        for chip, refused in (("h100", {}), ("b200", {}), ("v5p", {"refused": "no"}))
        for operation in kernel_table.OPERATIONS[:2]
    ]
    assert kernel_table.table(rows).splitlines()[2:] == [
        "| llama | h100, b200 | flash | flash | — | — | — |",
        "| llama | v5p | flash does not compile | flash does not compile | — | — | — |",
    ]
