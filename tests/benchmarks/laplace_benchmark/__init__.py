"""Models, contenders and references of ``why_not_laplace.py``.

All of them see a model as its unconstrained position, and give means, standard deviations and the
5 and 95 % quantiles of its coordinates.
"""
