"""``python -m flash_attn doctor [--json]`` and ``python -m flash_attn wheels [--for FACTS] [--to DIR] [--json]``."""

from __future__ import annotations

import argparse
import importlib
import sys

from . import doctor


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code is the command's."""
    parser = argparse.ArgumentParser(prog="python -m flash_attn", description="flash_attn's command line")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_command = commands.add_parser(
        "doctor",
        help="what is installed, and what clashes",
        description="Lists torch, driver, GPUs and what this installation holds, then what clashes. "
        "Exit code 0: nothing clashes; 1: something does.",
    )
    doctor_command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    try:
        wheelhouse = importlib.import_module("flash_attn._buildtools.wheelhouse")
    except ImportError:  # the source tree, where `python -m buildtools wheels` is the same command
        wheelhouse = None
    if wheelhouse is not None:
        wheels_command = commands.add_parser(
            "wheels", help="which published wheel is for which machine", description=wheelhouse.DESCRIPTION
        )
        wheelhouse.add_arguments(wheels_command)
    arguments = parser.parse_args(argv)
    if arguments.command == "wheels" and wheelhouse is not None:
        return int(wheelhouse.main(arguments))
    return doctor.main(as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
