"""Planning: sequence lengths in, plans out. Pure: numpy, numba and the standard library."""
