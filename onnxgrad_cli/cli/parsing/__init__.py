"""Options that several commands share, their help, and their values from files and the environment."""
