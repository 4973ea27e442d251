"""Triton kernels, one module a component: the same names and signatures as `dsspark.reference`, plus `config=`.

Nothing here imports the references. Without a GPU the kernels run in Triton's interpreter if `TRITON_INTERPRET=1` was set before
they were decorated, that is, before this package is imported.
"""
