"""`wheels`: which published wheel is for this machine or for another one, why not the others, and a folder of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from .choose import Decision, choose, describe, parse_facts
from .errors import BuildError, FileNotThereError, ManifestError, NoWheelError
from .facts import read_facts
from .fetch import PROJECT, Limits, Place, fetch, parse_places, read_text
from .manifest import MANIFEST_NAME, Manifest, parse_manifest, read_manifest, read_wheel
from .variables import read_variables

DESCRIPTION = (
    "Shows which published wheel fits this machine, and the reasons against the nearest others; --to downloads it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for",
        dest="targets",
        action="append",
        metavar="FACTS",
        help="another machine, such as torch=2.6,abi=0,platform=manylinux_2_28_x86_64,python=3.12,driver=12.8,gpu=90; "
        "may be given several times",
    )
    parser.add_argument("--to", type=Path, metavar="DIR", help="download the wheels into this folder")
    parser.add_argument(
        "--from", dest="places", metavar="PLACE", help="an index URL, a mirror or a folder (default: FLASH_ATTN_WHEELS)"
    )
    parser.add_argument("--manifest", type=Path, help=f"the list of wheels (default: {MANIFEST_NAME} of PLACE)")
    parser.add_argument(
        "--all", action="store_true", help="the reasons against every other wheel, not the nearest alone"
    )
    parser.add_argument(
        "--timeout", type=float, default=Limits.silence_s, metavar="S", help="seconds of silence to bear"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(options: argparse.Namespace) -> int:
    """Run the command; 0 if each machine has a wheel. An error's exit code is its class's."""
    try:
        return _run(options)
    except BuildError as error:
        if options.json:
            print(
                json.dumps({"error": type(error).__name__, "exit_code": error.exit_code, "text": str(error)}, indent=1)
            )
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    variables = read_variables(os.environ)
    limits = Limits(silence_s=options.timeout)
    text = options.places or variables.wheels or ""
    places = parse_places(text) if text else []
    manifest = read_manifest(options.manifest) if options.manifest else _manifest_of(places, limits)
    places = places or [place for name in manifest.places for place in parse_places(name)]
    here = read_facts({}, sys.path, variables.force_cxx11_abi)  # this process's own torch: no build is running
    targets = [parse_facts(target, here) for target in options.targets or ()] or [here]
    decisions = [choose(target, manifest.wheels) for target in targets]
    downloaded: list[Path] = []
    if options.to and all(decision.wheel for decision in decisions):
        downloaded = _download(decisions, places, options.to, limits)
    if options.json:
        print(json.dumps(_as_json(manifest, decisions, downloaded), indent=1))
    else:
        for decision in decisions:
            print(_text(decision, everything=options.all))
        if downloaded:
            print(f"to install there: pip install --no-index --no-deps {' '.join(path.name for path in downloaded)}")
    return 0 if all(decision.wheel for decision in decisions) else NoWheelError.exit_code


def _text(decision: Decision, *, everything: bool) -> str:
    text = decision.text(limit=len(decision.rejected) if everything else 3)
    if decision.wheel:
        wheel = decision.wheel
        text += f"\n  {wheel.size} bytes, sha256 {wheel.sha256}, {wheel.variant}"
    return text


def _as_json(manifest: Manifest, decisions: Iterable[Decision], downloaded: Iterable[Path]) -> dict[str, object]:
    return {
        "version": manifest.version,
        "decisions": [decision.as_json() for decision in decisions],
        "wheels": [describe(wheel) for wheel in manifest.wheels],
        "downloaded": [str(path) for path in downloaded],
    }


def _download(decisions: Iterable[Decision], places: list[Place], folder: Path, limits: Limits) -> list[Path]:
    wheels = {decision.wheel.filename: decision.wheel for decision in decisions if decision.wheel}
    return [
        fetch(wheel, places, folder, limits=limits, report=lambda line: print(line, file=sys.stderr, flush=True))
        for wheel in wheels.values()
    ]


def _manifest_of(places: Iterable[Place], limits: Limits) -> Manifest:
    """The manifest of the first place that has one; that of a folder without one is made of its wheels."""
    tried = []
    for place in places:
        try:
            return parse_manifest(read_text(place, MANIFEST_NAME, limits=limits), f"{place}/{MANIFEST_NAME}")
        except FileNotThereError as error:
            tried.append(error.what)
        if place.folder and (found := _wheels_in(place.folder)):
            return found
    raise ManifestError(
        f"no list of published wheels: {'; '.join(tried) or 'no place was named'}",
        fix=f"name the index of {PROJECT}'s wheels, or a folder of wheels, with --from or FLASH_ATTN_WHEELS",
    )


def _wheels_in(folder: Path) -> Manifest | None:
    paths = {path.name: path for path in sorted(folder.glob("**/flash_attn-*.whl"))}
    wheels = [read_wheel(path) for path in paths.values()]
    versions = {wheel.version.partition("+")[0] for wheel in wheels}
    if len(versions) > 1:
        raise ManifestError(
            f"{folder} has wheels of several versions: {', '.join(sorted(versions))}", fix="name one version's folder"
        )
    return Manifest(versions.pop(), tuple(wheels)) if wheels else None
