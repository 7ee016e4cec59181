"""Test cases and checks of the kernels, for the tests, `tools.ptx` and `bench.gpu`."""
