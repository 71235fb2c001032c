"""`onnxgrad completion`: what lets a shell complete commands, options and values."""

from __future__ import annotations

import click

from onnxgrad_cli.cli.console import Console, speaks

VARIABLE = "_ONNXGRAD_COMPLETE"
"""The variable by which a shell asks for completions, as click names it."""

LINES = {
    "bash": 'eval "$(onnxgrad completion bash)"    in ~/.bashrc',
    "zsh": 'eval "$(onnxgrad completion zsh)"     in ~/.zshrc',
    "fish": "onnxgrad completion fish | source     in ~/.config/fish/config.fish",
}


@click.command(short_help="Let a shell complete what is typed.", epilog="\b\n" + "\n".join(LINES.values()))
@click.argument("shell", type=click.Choice(list(LINES)), metavar="bash|zsh|fish")
@speaks
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> int:
    """Print the script by which a shell completes commands, options and values of onnxgrad."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(ctx.find_root().command, {}, "onnxgrad", VARIABLE).source()
    console = ctx.find_object(Console)
    assert console is not None
    console.result({"shell": shell, "script": script}, script, verbatim=True)
    return 0
