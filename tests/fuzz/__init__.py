"""Hostile files, hostile data and hostile moments: what a user can meet, or an attacker send, against every command.

Three programs, each of which takes a number of cases and a seed, prints how its cases ended, keeps a reproducer of each
kind of failure, and fails if there is one: `files` (mutated models), `data` (damaged data, checkpoints,
settings, adapters, tokenizers, pictures, metadata) and `kills` (signals, full disks, two at a time).
"""
