"""THE TABLE: one row an operator, attribute family and opset boundary; one module a family of rules.

A row is a `Case` of tests/harness.py. `tests/autodiff/test_rules.py` runs every row, and proves that rows equal rules.
"""

from importlib import import_module
from pkgutil import iter_modules

ROWS = [row for module in iter_modules(__path__) for row in import_module(f"{__name__}.{module.name}").ROWS]
