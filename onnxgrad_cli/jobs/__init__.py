"""Jobs: for each command one function that does its work, from input files to output files.

A job never prints, and never ends the process.
"""
