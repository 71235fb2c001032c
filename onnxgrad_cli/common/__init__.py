"""What every layer may use and what knows no graph: catalogues, options of functions, narration, JSON."""
