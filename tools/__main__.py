"""Write the generated pages and pictures of docs/: `python -m tools`. The tests compare the files with this output."""

from tools import differentiability, layers, operators, reference, schema

for module in (differentiability, layers, operators, reference, schema):
    for path, text in module.files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
