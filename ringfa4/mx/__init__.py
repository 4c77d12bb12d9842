"""MXFP8: the format, its bytes, and K/V in it on the wire (start with :mod:`ringfa4.mx.wire`)."""
