"""Undominated rows, compared with a test of every pair."""

import numpy as np
import pytest

from jaxrlhf.planner.search.pool_options import undominated


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_rows_are_left_out_only_where_another_is_no_worse_in_any_column(columns):
    draw = np.random.default_rng(columns)
    for _ in range(100):
        rows = draw.integers(0, 4, (draw.integers(0, 12), columns)).astype(float)
        kept = [
            one
            for one, row in enumerate(rows)
            if not any((o <= row).all() and ((o < row).any() or other < one) for other, o in enumerate(rows))
        ]
        assert undominated(rows).tolist() == kept
