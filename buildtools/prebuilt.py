"""What the wheel hook does before it compiles: look for a published wheel that fits, and download it.

Only an sdist with a manifest knows published wheels. A working tree is compiled: its sources may have been edited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .choose import Decision, PublishedWheel, choose
from .errors import DownloadError, ManifestError, NoWheelError, VariableError
from .facts import read_facts
from .manifest import MANIFEST_NAME, Manifest, read_manifest
from .variables import Variables

if TYPE_CHECKING:
    from .fetch import Limits

# Each asks for a wheel that nobody has published.
_OF_OWN_BUILDS = {
    "FLASH_ATTN_KERNELS": "kernels",
    "FLASH_ATTN_HEAD_DIMS": "head_dims",
    "FLASH_ATTN_LOCAL_VERSION": "local_version",
}


@dataclass(frozen=True)
class Plan:
    """`wheel` is to be fetched from `places`; where it is None, the sources are to be compiled, `because`.

    `decision` is None where no choice was made.
    """

    wheel: PublishedWheel | None = None
    places: tuple[str, ...] = ()
    decision: Decision | None = None
    because: str = ""


def make_plan(root: Path, environ: Mapping[str, str], variables: Variables, search_path: Sequence[str]) -> Plan:
    """What to do in the tree `root`; needs no network. NoWheelError where that is to compile and it is forbidden."""
    plan = _plan(root, environ, variables, search_path)
    if plan.wheel is None and variables.no_build:
        trace = f"\n{plan.decision.text()}" if plan.decision else ""
        raise NoWheelError(
            f"FLASH_ATTN_NO_BUILD is set, and there is no published wheel to install: {plan.because}{trace}",
            why="nothing was compiled and nothing installed",
            fix="unset FLASH_ATTN_NO_BUILD to compile from source, or take one of the environments above",
        )
    return plan


def _plan(root: Path, environ: Mapping[str, str], variables: Variables, search_path: Sequence[str]) -> Plan:
    if variables.force_build:
        if variables.no_build:
            raise VariableError("FORCE_BUILD and FLASH_ATTN_NO_BUILD contradict each other", fix="unset one")
        return Plan(because="FORCE_BUILD is set")
    manifest = published(root)
    if manifest is None:
        return Plan(because=f"this source tree has no list of published wheels ({MANIFEST_NAME} of an sdist)")
    asked = [name for name, field in _OF_OWN_BUILDS.items() if getattr(variables, field) is not None]
    if (
        variables.cuda_archs_from == "FLASH_ATTN_CUDA_ARCHS"
    ):  # TORCH_CUDA_ARCH_LIST is set for all of a machine's builds
        asked.append(variables.cuda_archs_from)
    if asked:
        return Plan(because=f"{' and '.join(asked)} asks for a build of its own")
    decision = choose(read_facts(environ, search_path, variables.force_cxx11_abi), manifest.wheels)
    if decision.wheel is None:
        return Plan(decision=decision, because="no published wheel fits")
    places = (variables.wheels,) if variables.wheels else manifest.places
    if not places:
        because = f"{decision.wheel.filename} fits, but nothing says where it is: set FLASH_ATTN_WHEELS"
        return Plan(decision=decision, because=because)
    return Plan(decision.wheel, places, decision)


def published(root: Path) -> Manifest | None:
    """The manifest of an unpacked sdist, or None. ManifestError if it is damaged or of another version."""
    path = root / MANIFEST_NAME
    if not (root / "PKG-INFO").is_file() or not path.is_file():
        return None
    from .metadata import load_project

    manifest, version = read_manifest(path), load_project(root).base_version
    if manifest.version != version:
        raise ManifestError(f"{path} lists the wheels of {manifest.version}, and the sources are of {version}")
    return manifest


def obtain(plan: Plan, folder: Path, *, limits: Limits | None = None, report: Callable[[str], object] = print) -> Path:
    """Fetch the plan's wheel into `folder`; a DownloadError has the whole story in one message."""
    from .fetch import Limits, fetch, parse_places  # not for a choice alone: it takes its time to import

    assert plan.wheel is not None
    assert plan.decision is not None
    report(plan.decision.text())
    places = [place for text in plan.places for place in parse_places(text)]
    try:
        return fetch(plan.wheel, places, folder, limits=limits or Limits(), report=report)
    except DownloadError as error:
        story = f"{plan.wheel.filename}, from {', '.join(map(str, places))}, is {_CHOSEN}\n{plan.decision.text()}"
        raise type(error)(
            error.what,
            why=". ".join(filter(None, (error.why, story))),
            fix="; ".join(filter(None, (error.fix, "or set FORCE_BUILD=1 to compile from source"))),
        ) from None


_CHOSEN = "the wheel for this environment; nothing was installed, and no compiler was started:"
