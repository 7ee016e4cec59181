"""Cases and checks of the kernels, for the tests, `tools.ptx`, `bench.kernels` and `bench.gpu`."""
