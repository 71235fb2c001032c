"""From files to files: what each command does, as one call that neither prints nor exits."""
