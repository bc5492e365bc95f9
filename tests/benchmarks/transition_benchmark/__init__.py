"""Parts of the transition-cost benchmark; the command line program is ``transition_cost.py``."""

CONTENDERS = ("ours", "numba", "sgmcmcjax", "blackjax")
"""Contenders in the order of the table's columns; each is a module ``contender_<name>``."""
