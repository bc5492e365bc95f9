"""What the benchmark programs share: the problem, the model, one core, fresh processes, reports."""

METHODS = ("sgld", "sgld-cv")
"""The methods measured: SGLD, and SGLD with control variates (SGLD-CV)."""
