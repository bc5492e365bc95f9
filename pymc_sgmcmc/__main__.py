"""``python -m pymc_sgmcmc``: see `pymc_sgmcmc.demo`."""

import sys

from pymc_sgmcmc.demo.cli import main

# Processes that sample in parallel may import this module under another name.
if __name__ == "__main__":
    sys.exit(main())
