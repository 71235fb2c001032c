"""Options without a value, and values and paths that are empty."""

from __future__ import annotations

import re
from pathlib import Path

import click
import numpy as np
import onnx
import pytest

from onnxgrad_cli.adapters.formats import AdapterTarget
from onnxgrad_cli.cli import cli
from onnxgrad_cli.errors import UsageError
from onnxgrad_cli.jobs.build import run_build
from tests.cli.test_bad_input import refused
from tests.cli_harness import (
    Shell,
)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            ("--untie", "--loss", "mse"),
            ["--untie requires a value, GLOB, but '--loss' is another option", "--untie=--loss"],
        ),
        (("-o", "--force"), ["-o requires a value, FILE, but '--force' is another option", "--out=--force"]),
        (("--untie",), ["'--untie' requires an argument"]),
    ],
)
def test_an_option_without_its_value_takes_no_other_option_for_it(
    shell: Shell, typed: tuple[str, ...], words: list[str]
) -> None:
    refused(shell, 2, *words, command=("build", "mlp.onnx", *typed))


@pytest.mark.parametrize("option", ["--transform=", "--lora=", "--recompute=", "--loss="])
def test_no_value_is_empty(shell: Shell, option: str) -> None:
    """As a shell makes one of a variable that is not set."""
    np.savez("d.npz", x=np.ones((4, 4), np.float32), label=np.ones((4, 2), np.float32))
    refused(shell, 2, command=("train", "mlp.onnx", "--data", "d.npz", "-o", "t.onnx", option))


def test_no_path_is_empty(shell: Shell) -> None:
    """As a shell makes one of a variable that is not set; Python would take it for the working directory."""
    Path("empty.toml").write_text('out = ""\n')
    params = [(name, param) for name, command in cli.commands.items() for param in command.params]
    paths = [(name, param) for name, param in params if isinstance(param.type, click.Path)]
    assert {name for name, _ in paths} >= set(cli.commands)
    kinds = re.compile("FILE|DIR|FOLDER|DATA|MODEL")
    others = {param.name for _, param in params if kinds.search(param.metavar or "")} - {p.name for _, p in paths}
    assert others == {"losses", "metrics", "transform"}, "these may be names, or a function in a file"
    for name, param in paths:
        with pytest.raises(click.BadParameter, match="empty string"):
            param.type.convert("", param, click.Context(cli.commands[name]))
    build = ("build", "mlp.onnx", "--label", "t")
    for command in (
        (*build, "-o", ""), (*build, "--report", ""), (*build, "--config", "empty.toml"), (*build, "--rules="),
        ("train", "mlp.onnx", "--data", "d.npz", "--run", ""), ("train", "mlp.onnx", "--data", ""),
        ("train", "mlp.onnx", "--data", "d.npz", "--adapter", ""), ("build", ""), ("view", ""),
        ("export", "w.bin", "--model", ""), ("explain", "mlp.onnx", "--data", "d", "-o", ""),
        ("pack", "", "--data", "d"), ("build", "mlp.onnx", "-O", ""), ("build", "mlp.onnx", "--out-dir="),
    ):  # fmt: skip
        refused(shell, 2, "expected a path, got an empty string", command=command)
    for call in (lambda: run_build(""), lambda: run_build("mlp.onnx", ""), lambda: AdapterTarget("")):
        with pytest.raises(UsageError, match="empty string"):
            call()


def test_a_value_may_look_like_an_option_where_it_is_meant(shell: Shell) -> None:
    assert shell("build", "mlp.onnx", "--label=--loss", "-o", "out/train.onnx").code == 0
    assert "--loss" in {value.name for value in onnx.load("out/train.onnx").graph.input}
    refused(shell, 1, "no such file", command=("inspect", "--", "--label"))
