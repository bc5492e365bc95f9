"""Tools on the trace of a run: arrays in, arrays out, under a thin layer of xarray."""
