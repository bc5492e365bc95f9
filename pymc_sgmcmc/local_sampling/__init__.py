"""Local variables sampled group by group inside of a gradient estimator."""

from pymc_sgmcmc.local_sampling.local import LocalSampling

__all__ = ["LocalSampling"]
