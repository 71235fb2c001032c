"""Definitions: express operators without a gradient rule by operators that have one; one module per family.

A definition is `definition(op, *inputs, **attributes)` and returns the operator's outputs; see `registry.definition`.
Importing this package registers all definitions.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
