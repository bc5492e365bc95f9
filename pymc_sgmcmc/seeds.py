"""Random generators of the seeds that users give."""

from __future__ import annotations

from typing import Any

import numpy as np
from pymc.util import get_random_generator


def generator(name: str, seed: Any) -> np.random.Generator:
    """Return the random generator of a seed that a user gave as a setting.

    Raises
    ------
    TypeError, ValueError
        Where it is no seed.
    """
    try:
        if isinstance(seed, bool | np.random.RandomState):
            raise TypeError
        return get_random_generator(seed)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"`{name}` should be a seed (a whole number that is not negative, or several) or a "
            f"`numpy.random.Generator`, but got {seed!r}."
        ) from None
