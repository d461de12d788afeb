"""``python -m flash_attn doctor [--json]``."""

from __future__ import annotations

import argparse
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
    arguments = parser.parse_args(argv)
    return doctor.main(as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
