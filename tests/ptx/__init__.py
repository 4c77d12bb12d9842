"""Execute the PTX of CuTe DSL kernels on the CPU; README.md has the design and what is modelled."""
