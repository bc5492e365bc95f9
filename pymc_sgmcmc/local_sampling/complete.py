"""The joint log density of records and local variables, as a function of the global position.

By Fisher's identity its gradient, averaged over the local variables given the records, is that of
the marginal log density: no integral is needed where the local variables are sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import pytensor.tensor as pt
from pymc.model import Model
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.tensor.variable import TensorVariable

from pymc_sgmcmc.compiling.compiled import NUMPY_MODE, compile_on_arrays
from pymc_sgmcmc.marginal.blocks import split_blocks
from pymc_sgmcmc.marginal.check import checked_density
from pymc_sgmcmc.marginal.likelihood import Groups
from pymc_sgmcmc.marginal.marginalize import names_of, without_locals
from pymc_sgmcmc.marginal.quadrature import LARGEST_LAPLACE, laplace
from pymc_sgmcmc.marginal.search import structure_of
from pymc_sgmcmc.posterior.graphs import by_weights, rebuild


class CompleteData:
    r"""Joint log density :math:`\log p(y_g, u_g \mid \theta)` of groups at a position.

    Parameters
    ----------
    model : pymc.Model
    names : str, variable or sequence of these
        The local variables.
    laplace_wanted : bool
        Whether a log density of the rows is needed, from which a centre is computed.

    Attributes
    ----------
    density : GroupDensity
    groups : pymc.Model
        A model of the global variables alone, whose rows are groups. The log density of a row is
        Laplace's approximation, or a stand-in where that is not wanted or there are too many local
        quantities for it.
    rows : str
        Name of its observed variable whose rows are the groups.
    has_laplace : bool
        Whether it is Laplace's approximation.
    groups_evaluated : int
        How many densities of single groups were evaluated by functions of `compile`.
    """

    groups_evaluated = 0

    def __init__(
        self,
        model: Model,
        names: str | TensorVariable | Sequence[str | TensorVariable],
        *,
        laplace_wanted: bool = True,
    ):
        self.model = model
        self.density = density = checked_density(model, structure_of(model, names_of(names)))
        self.has_laplace = laplace_wanted and density.block_size <= LARGEST_LAPLACE
        if self.has_laplace:
            marginal = laplace(density)
        else:
            (marginal,) = density.at([density.value], density.split(density.start))
        self.groups = without_locals(model, density, marginal)
        self.rows: str = self.groups.observed_RVs[-1].name
        self._functions = Groups(model, density)
        # PyMC may give the variables of the model of groups another order.
        layout = self._functions.layout
        order = [layout.names.index(value.name) for value in self.groups.value_vars]
        self._layout = layout.reordered(order)
        self._digests = {data.name: _digest(data) for data in model.data_vars}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the local variables."""
        return self.density.structure.names

    @property
    def n_groups(self) -> int:
        """G, the number of groups."""
        return self.density.structure.n_groups

    @property
    def block_size(self) -> int:
        """q, the number of local quantities of one group."""
        return self.density.block_size

    @property
    def dtype(self) -> str:
        """Floating type of the local variables."""
        return self.density.block.dtype

    def changed_data(self) -> str | None:
        """Name of data of the model that have changed since construction, or None."""
        for name, digest in self._digests.items():
            if _digest(self.model[name]) != digest:
                return name
        return None

    # --- Symbolic pieces --------------------------------------------------------------------

    def log_density(
        self, position: TensorVariable, numbers: TensorVariable, block: TensorVariable
    ) -> TensorVariable:
        """Joint log density of each of the groups with these numbers, shape (groups,)."""
        return self._at(self._value, position, numbers, block)

    def gradient(
        self, position: TensorVariable, numbers: TensorVariable, block: TensorVariable
    ) -> TensorVariable:
        """Gradient by the position of the sum over these groups, shape (d,)."""
        return self._at(self._gradient, position, numbers, block)

    def row_gradients(
        self, position: TensorVariable, numbers: TensorVariable, block: TensorVariable
    ) -> TensorVariable:
        """Gradient by the position of each group apart, shape (groups, d)."""
        weights = pt.vector("weights", dtype=self.dtype)
        weighted = self._layout.gradient((weights * self._value).sum())
        n_groups = self.density.numbers.shape[0]
        gradients = by_weights(weighted, self._layout.dimension, weights, n_groups)
        return self._at(gradients, position, numbers, block)

    def gradient_by_block(
        self, position: TensorVariable, numbers: TensorVariable, block: TensorVariable
    ) -> TensorVariable:
        """Gradient of each group by its local variables, shape (groups, q)."""
        gradient = pt.stack(self.density.gradient, axis=1)
        return self._at(self._functions.at_position(gradient), position, numbers, block)

    def start(
        self, position: TensorVariable, numbers: TensorVariable, block: TensorVariable
    ) -> TensorVariable:
        """Support points of the prior of these groups, shape (groups, q)."""
        return self._at(self._functions.at_position(self.density.start), position, numbers, block)

    def global_variables(self, position: TensorVariable) -> dict[str, TensorVariable]:
        """The global random variables on which the groups depend, on their own scale."""
        values = {
            name: self._functions.at_position(variable)
            for name, variable in self.density.parameters.items()
        }
        pieces = self._layout.split(position)
        return dict(zip(values, rebuild(list(values.values()), pieces), strict=True))

    @cached_property
    def _value(self) -> TensorVariable:
        return self._functions.at_position(self.density.value)

    @cached_property
    def _gradient(self) -> TensorVariable:
        return self._layout.gradient(self._value.sum())

    def _at(
        self,
        graph: TensorVariable,
        position: TensorVariable,
        numbers: TensorVariable,
        block: TensorVariable,
    ) -> TensorVariable:
        replacements = {
            **self._layout.split(position),
            self.density.numbers: numbers,
            self.density.block: pt.specify_shape(block, (None, self.block_size)),
        }
        return rebuild([graph], replacements)[0]

    # --- Numbers ----------------------------------------------------------------------------

    def starting_blocks(self, position: np.ndarray) -> np.ndarray:
        """Support points of the prior of all groups, shape (G, q)."""
        function = self.compile(lambda *at: [self.start(*at)])
        return np.concatenate(
            [
                function(position, numbers, np.zeros((len(numbers), self.block_size)))[0]
                for numbers in self.chunks()
            ]
        )

    def chunks(self) -> list[np.ndarray]:
        """Numbers of all groups, in chunks of bounded memory."""
        return self._functions.chunks(1)

    def compile(
        self,
        make: Callable[..., list[TensorVariable]],
        extra: Sequence[TensorVariable] = (),
        evaluations: int = 1,
    ) -> Callable[..., list[np.ndarray]]:
        """Function of a position, numbers of groups, a block and further arrays.

        Parameters
        ----------
        make : callable
            Outputs of symbolic arguments, in the same order.
        extra : sequence of TensorVariable
            Placeholders of the further arrays.
        evaluations : int
            How often a call evaluates the density of each group, for `groups_evaluated`.
        """
        dimension = self._layout.dimension
        position = pt.tensor("position", shape=(dimension,), dtype=self._layout.dtype)
        numbers = pt.tensor("numbers", shape=(None,), dtype="int64")
        block = pt.tensor("block", shape=(None, self.block_size), dtype=self.dtype)
        inputs = [position, numbers, block, *extra]
        function = compile_on_arrays(inputs, make(*inputs), NUMPY_MODE, allow_input_downcast=True)

        def evaluate(*arrays: np.ndarray) -> list[np.ndarray]:
            self.groups_evaluated += evaluations * len(arrays[1])
            with np.errstate(all="ignore"):
                return function(*arrays)

        return evaluate

    def point(self, blocks: np.ndarray) -> dict[str, np.ndarray]:
        """Values of the local value variables, from the blocks of all groups."""
        return split_blocks(self.density.structure, blocks)


def _digest(data: SharedVariable) -> bytes:
    values = np.ascontiguousarray(data.get_value(borrow=True))
    return hashlib.blake2b(values.tobytes() + str(values.shape).encode()).digest()
