"""``python -m flash_attn`` with one of doctor, wheels and warm."""

from __future__ import annotations

import argparse
import importlib
import sys

from . import doctor, warm


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code is the command's."""
    parser = argparse.ArgumentParser(prog="python -m flash_attn", description="flash_attn's command line")
    commands = parser.add_subparsers(dest="command", required=True)
    codes = ", ".join(f"{code} ({kind})" for kind, code in doctor.EXIT_CODES.items())
    doctor_command = commands.add_parser(
        "doctor",
        help="what is installed, and what clashes",
        description="Lists torch, driver, GPUs and what this installation holds, then what clashes. "
        f"Exit code 0: nothing clashes; else the first of {codes} that does.",
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
    warm_command = commands.add_parser(
        "warm",
        help="compile what calls would compile at first use",
        description="Compiles the kernels that the wheel lacks into the cache (FLASH_ATTN_CACHE_DIR), for the GPUs of "
        "this machine or for others. What the wheel or the cache has is left alone.",
    )
    warm_command.add_argument("--arch", nargs="+", default=[], metavar="CAPABILITY", help="such as 9.0 or 100")
    warm_command.add_argument("--kernels", nargs="+", default=[], metavar="GLOB", help="by key: '*-bf16-d64-*'")
    warm_command.add_argument("--head-dims", nargs="+", type=int, default=[], metavar="N", help="such as 64 128")
    warm_command.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: cores, at most 8)")
    arguments = parser.parse_args(argv)
    if arguments.command == "wheels" and wheelhouse is not None:
        return int(wheelhouse.main(arguments))
    if arguments.command == "warm":
        return warm.main(arguments.arch, arguments.kernels, arguments.head_dims, jobs=arguments.jobs)
    return doctor.main(as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
