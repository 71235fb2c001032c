"""The output of all commands: results, progress and errors, on a terminal, as JSON, and for GitHub Actions."""
