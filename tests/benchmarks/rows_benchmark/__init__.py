"""Parts of `many_rows.py`: the files, this package on them, and what a user would do instead."""

PRIOR_SD = 10.0
"""Of intercept and slopes."""
