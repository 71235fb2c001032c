"""`python -m tools` writes the generated pages and pictures of docs/ anew; the tests compare them."""

from tools import layers, reference, schema

for path, text in {**layers.files(), **reference.files(), **schema.files()}.items():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
