"""Benchmarks: kernels against references, eager baselines, peers and the bytes that have to move. See docs/benchmarks.md."""
