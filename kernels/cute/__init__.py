"""CuTe DSL kernels for what only moves bytes: MXFP8 encode and decode, merging partials."""
