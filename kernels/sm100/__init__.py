"""MXFP8 attention on Blackwell (SM100, SM103): one persistent CuTe DSL kernel.

Left out: backward, and attention on other hardware.
"""
