"""``python -m pymc_sgmcmc``: see `pymc_sgmcmc.main`."""

import sys

from pymc_sgmcmc.main import main

# Processes that sample in parallel may import this module under another name.
if __name__ == "__main__":
    sys.exit(main())
