"""What makes PyTensor and Numba faster or right, and knows nothing of statistics.

An entry of ``docs/upstream.md`` says what to report of each, and when the file can go.

* `compiled`: functions for set-up and checks, by NumPy where that is quick.
* `numpy_linker`, `numpy_functions`: graphs evaluated by NumPy with little time beside it.
* `blockwise`: operations on all rows at once in place of loops over them.
* `whole_numbers`, `negative_binomial`: densities of counts at the cost of other densities.
* `large_constants`, `graph_notes`: constants and notes that PyTensor need not read.
* `numba_loop`: a loop of transitions, and products of matrices, that Numba compiles.
* `noise`: normal numbers.
"""
