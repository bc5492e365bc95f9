"""What the benchmark programs share: the runner, clocks, tables, peers and models."""

METHODS = ("sgld", "sgld-cv")
"""The methods measured: SGLD, and SGLD with control variates (SGLD-CV)."""
DTYPES = ("float64", "float32")
