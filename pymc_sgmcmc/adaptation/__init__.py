"""Changes between blocks of transitions, from positions and gradients of the chain so far."""

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen

__all__ = ["Adaptation", "AdaptationState", "Seen"]
