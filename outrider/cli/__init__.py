"""The `outrider` command: results on stdout, everything else on stderr."""

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Sequence

import tyro

from outrider.cli.arguments import (
    Bench,
    BenchAb,
    BenchAcceptance,
    BenchNumerics,
    BenchStartup,
    BenchStep,
    Calibrate,
    Command,
    Demo,
    Generate,
    Inspect,
    Logits,
    Replay,
    Verify,
)
from outrider.cli.bench import run_bench_ab
from outrider.cli.bench_acceptance import run_bench_acceptance
from outrider.cli.bench_numerics import run_bench_numerics
from outrider.cli.bench_startup import run_bench_startup
from outrider.cli.bench_step import run_bench_step
from outrider.cli.calibrate import run_calibrate
from outrider.cli.demo import run_demo
from outrider.cli.generate import run_generate
from outrider.cli.inspect import run_inspect
from outrider.cli.logits import run_logits
from outrider.cli.replay import run_replay
from outrider.cli.verify import run_verify
from outrider.errors import UserError

__all__ = ["main"]

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
    match command:
        case Generate():
            return run_generate(command)
        case Demo():
            return run_demo(command)
        case Bench():
            return _run_bench(command)
        case Inspect():
            return run_inspect(command)
        case Logits():
            return run_logits(command)
        case Verify():
            return run_verify(command)
        case Calibrate():
            return run_calibrate(command)
        case Replay():
            return run_replay(command)
        case _:
            raise AssertionError(f"command {type(command).__name__} has no function")


def _run_bench(command: Bench) -> int:
    match command.kind:
        case BenchAb() as kind:
            return run_bench_ab(kind)
        case BenchNumerics() as kind:
            return run_bench_numerics(kind)
        case BenchStep() as kind:
            return run_bench_step(kind)
        case BenchAcceptance() as kind:
            return run_bench_acceptance(kind)
        case BenchStartup() as kind:
            return run_bench_startup(kind)
