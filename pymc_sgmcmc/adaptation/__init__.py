"""What a chain changes between blocks of transitions, from what it has seen."""

from pymc_sgmcmc.adaptation.base import Adaptation, AdaptationState, Seen

__all__ = ["Adaptation", "AdaptationState", "Seen"]
