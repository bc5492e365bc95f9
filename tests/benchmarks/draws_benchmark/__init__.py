"""The contenders of ``effective_draws.py``, each in a process of its own.

A contender is a module ``contender_<name>`` with ``PACKAGES``, the distributions whose versions
are worth reporting, and one function::

    def sample(problem: Problem, mark: Callable[..., None]) -> np.ndarray

which does all that a user's program does with the data, and returns the draws, shape (draws, p).
It calls ``mark()`` when set-up and tuning are done and, if there is work after the last draw,
``mark(True)`` before it; the last call of each counts. Of the attributes of `problem` it may use
the data and the prior, and the curvature for a step size tuned by hand.
"""

CONTENDERS = (
    "ours", "sample", "corrected", "euler", "euler_fine", "blackjax", "blackjax_fine", "sgmcmcjax",
    "hmcecs", "nutpie", "advi", "pathfinder", "laplace", "psis",
)  # fmt: skip
"""Contenders in the order of the table's lines."""

DRAWS = 10_000
"""Draws of samplers whose draws take little time: the standard deviation of a coordinate, from some
thousand effective draws, then has a Monte Carlo error of about one per cent."""

LONG = 50_000
"""Draws of this package, so that what is measured is not the cost of a call."""
