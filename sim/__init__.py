"""The simulator: a backend on SimPy with models of the link, the GPU and the host."""
