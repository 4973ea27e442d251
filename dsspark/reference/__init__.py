"""Pure PyTorch references, one module a component. Imports neither Triton nor `dsspark.kernels`."""
