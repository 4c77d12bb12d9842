"""ringfa4: ring attention (see README.md)."""

from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():  # a checkout: kernels/, comm/, launch/ lie beside this package
    __path__.append(str(_root))
