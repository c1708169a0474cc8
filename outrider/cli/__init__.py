"""The `outrider` command: results on stdout, everything else on stderr."""

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

import tyro

from outrider.cli.arguments import (
    Bench,
    BenchAb,
    BenchAcceptance,
    BenchNumerics,
    BenchStartup,
    BenchStep,
    Calibrate,
    Chat,
    Command,
    Demo,
    Doctor,
    Generate,
    ImportGguf,
    Inspect,
    Logits,
    Replay,
    Verify,
)
from outrider.errors import UserError

__all__ = ["main"]

FUNCTIONS: Mapping[type, tuple[str, str]] = {
    Generate: ("outrider.cli.generate", "run_generate"),
    Demo: ("outrider.cli.demo", "run_demo"),
    BenchAb: ("outrider.cli.bench", "run_bench_ab"),
    BenchNumerics: ("outrider.cli.bench_numerics", "run_bench_numerics"),
    BenchStep: ("outrider.cli.bench_step", "run_bench_step"),
    BenchAcceptance: ("outrider.cli.bench_acceptance", "run_bench_acceptance"),
    BenchStartup: ("outrider.cli.bench_startup", "run_bench_startup"),
    Inspect: ("outrider.cli.inspect", "run_inspect"),
    Logits: ("outrider.cli.logits", "run_logits"),
    Verify: ("outrider.cli.verify", "run_verify"),
    Calibrate: ("outrider.cli.calibrate", "run_calibrate"),
    Replay: ("outrider.cli.replay", "run_replay"),
    Chat: ("outrider.cli.chat", "run_chat"),
    Doctor: ("outrider.cli.doctor", "run_doctor"),
    ImportGguf: ("outrider.cli.import_gguf", "run_import_gguf"),
}
"""Module and function of each command. A command imports what it needs, not what the others need."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    A wrong command line or a UserError becomes one line on stderr and status 2, without a traceback. Anything
    else is a fault of ours and keeps its traceback.
    """
    report = io.StringIO()
    try:
        with contextlib.redirect_stderr(report):
            command = tyro.cli(Command, args=arguments, prog="outrider", config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:  # status 0 after --help, which has gone to stdout
        if stop.code == EXIT_USER_ERROR:
            print("outrider:", _one_line(report.getvalue()), file=sys.stderr)
        raise
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="outrider: %(message)s")
    try:
        return _run(command)
    except UserError as error:
        print("outrider:", " ".join(str(error).split()), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("outrider: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; a second error at exit would say otherwise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _one_line(report: str) -> str:
    """The message of tyro's framed report, without its frame and the help texts it quotes."""
    frame = "-─│╭╮╰╯| "
    title, *parts = re.split(r"^[-─│╭╮╰╯| ]*[-─]{8,}[-─│╭╮╰╯| ]*$", report.strip("\n"), flags=re.MULTILINE)
    message = " ".join(line.strip(frame) for line in (parts or [title])[0].splitlines())
    return f"{' '.join(message.split())}; see outrider --help"


def _run(command: object) -> int:
    kind = command.kind if isinstance(command, Bench) else command
    module, function = FUNCTIONS[type(kind)]
    run: Callable[[object], int] = getattr(import_module(module), function)
    return run(kind)
