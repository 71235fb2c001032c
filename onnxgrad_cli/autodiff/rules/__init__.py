"""The gradient rules. Each family of operators has a module, and each rule is a short function.

A rule is `rule(op, g, y, *inputs, **attributes)` and returns one cotangent per input; see `registry.rule`. Importing
this package registers all rules.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
