"""What writes pages and pictures of docs/ from the code; `python -m tools` writes them all."""
