"""Values come back from arrays and JSON as they were, and nothing else does."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pymc_sgmcmc.sampling.encode import BIT_GENERATORS, decode, encode


def there_and_back(value):
    arrays = {}
    document = json.loads(json.dumps(encode(value, "value", arrays)))
    assert all(array.flags.c_contiguous for array in arrays.values())
    return decode(document, arrays)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
        np.arange(12.0)[::-2],
        np.eye(4)[:, ::2],
        np.zeros((0, 3)),
        np.zeros((3, 0)).T,
        np.asarray(True),
        np.asarray(2.5, dtype=np.float32),
        np.array([np.nan, -0.0, np.inf, 5e-324]),
        np.arange(3, dtype=np.uint64) + 2**63,
    ],
    ids=str,
)
def test_arrays_keep_their_numbers_and_their_order_in_memory(array):
    found = there_and_back(array)
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    for order in ("c_contiguous", "f_contiguous"):
        if getattr(array.flags, order):
            assert getattr(found.flags, order)


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_generators_go_on_and_spawn(name):
    seed = np.random.SeedSequence([3, 2**100], spawn_key=(4,))
    rng = np.random.Generator(getattr(np.random, name)(seed))
    rng.spawn(2)
    rng.integers(10, dtype=np.int32)  # Half of a number is left over.
    rng.standard_normal(3)
    found = there_and_back({"rng": rng})["rng"]
    for generator in (lambda rng: rng, lambda rng: rng.spawn(1)[0]):
        numbers = [
            (part.integers(10, dtype=np.int32), part.random())
            for part in map(generator, (rng, found))
        ]
        assert numbers[0] == numbers[1]


def test_other_values():
    value = {
        "a": (1, 2.5, None, True, "word"),
        "b": [{"c": np.float32(0.1), "array": 2**200}, ()],
        "nan": float("nan"),
    }
    found = there_and_back(value)
    assert np.isnan(found.pop("nan"))
    assert repr(found) == repr({name: value[name] for name in ("a", "b")})
    assert type(found["b"][0]["c"]) is np.float32


def test_arrays_have_names_of_their_own():
    """Names of variables may have characters that names in a zarr group have not."""
    value = {"a/b": np.zeros(1), "a_b": np.ones(1), "outer::x": np.ones(2), "": np.zeros(2)}
    arrays = {}
    encode(value, "draws", arrays)
    assert len(arrays) == 4
    assert not [name for name in arrays if "/" in name or ":" in name]
    found = there_and_back(value)
    assert all(np.array_equal(found[name], value[name]) for name in value)


@pytest.mark.parametrize("value", [object(), np.array([None]), np.array(["a"]), {1, 2}, print])
def test_values_that_are_refused(value):
    with pytest.raises(TypeError, match=r"`value\.part`"):
        encode({"part": value}, "value", {})


@pytest.mark.parametrize("name", ["seed", "__builtins__", "Generator", "mtrand"])
def test_other_names_than_those_of_generators_are_refused(name):
    arrays = {}
    document = encode(np.random.default_rng(1), "value", arrays)
    document["generator"][0]["mapping"]["bit_generator"] = name
    with pytest.raises(ValueError, match="is no generator of NumPy"):
        decode(document, arrays)
    with pytest.raises(ValueError, match="has no values such as"):
        decode({"code": "1 / 0"}, {})
