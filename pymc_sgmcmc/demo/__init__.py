"""The job behind ``python -m pymc_sgmcmc``: a Bayesian logistic regression, checked.

Data flow one way through small functions that can be used and tested alone:
`data` (a table, its design matrix, a simulated larger one) → `reference` (the Laplace
approximation from all rows, in NumPy) → `fit` (PyMC and a step method of this package) →
`report` (summary beside the reference, cost, trace file, plot). `cli` is the shell round them.
"""
