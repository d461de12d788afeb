"""One class per kind of failure, each with its own exit code.

The text of an error says what happened (with the values found), why it matters and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BuildError(Exception):
    """Base of everything that buildtools raises on purpose.

    `what` happened, with the values found; `why` it stops the build; `fix`: what to do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        text = what
        if why:
            text += f"\n  why: {why}"
        if fix:
            text += f"\n  what to do: {fix}"
        super().__init__(text)


class VariableError(BuildError):
    """An environment variable has a value that cannot be understood."""

    exit_code = 10


class TableError(BuildError):
    """kernels.toml or matrix.toml is not valid."""

    exit_code = 11


class ArchError(BuildError):
    """A GPU architecture cannot be named, or nothing can be built for it."""

    exit_code = 12


class SubsetError(BuildError):
    """A subset of the kernel table holds no kernel."""

    exit_code = 13


class SharedMemoryError(BuildError):
    """A kernel's tile constants need more shared memory than an arch has."""

    exit_code = 14


class SourceError(BuildError):
    """A source file of a kernel or of the host library is not there."""

    exit_code = 15


class NvrtcNotFoundError(BuildError):
    """No usable NVRTC library."""

    exit_code = 16


class KernelCompileError(BuildError):
    """NVRTC refused a kernel."""

    exit_code = 17


class ResourceError(BuildError):
    """A kernel compiled but spills registers, or serialises its matrix instructions."""

    exit_code = 18


class NinjaError(BuildError):
    """ninja is missing, or failed for a reason of its own."""

    exit_code = 19


class HostCompilerError(BuildError):
    """The C++ compiler of the host library is missing, too old or broken."""

    exit_code = 20


class HostCompileError(BuildError):
    """The host library did not compile."""

    exit_code = 21


class ArchiveError(BuildError):
    """A kernel set file is damaged, or not one."""

    exit_code = 22


class PlatformError(BuildError):
    """This operating system or machine cannot build what was asked for."""

    exit_code = 23


class MetadataError(BuildError):
    """pyproject.toml lacks something that a wheel needs."""

    exit_code = 24


class IndexPageError(BuildError):
    """A package index cannot be written from these files."""

    exit_code = 25


class WheelDifferenceError(BuildError):
    """A wheel that was built twice is not the same twice."""

    exit_code = 26


class WheelError(BuildError):
    """A wheel cannot be put together: something that belongs into it is missing."""

    exit_code = 27


class TorchHeadersError(BuildError):
    """The headers of the torch that a host library is for are not there and cannot be had."""

    exit_code = 28


class TorchVersionError(BuildError):
    """The torch that is installed is one that no host library is for."""

    exit_code = 29


class NoWheelError(BuildError):
    """No published wheel fits, and compiling is not allowed."""

    exit_code = 30


class ManifestError(BuildError):
    """The list of published wheels is missing, damaged, or not of this version."""

    exit_code = 31


class FactError(BuildError):
    """A fact about another machine cannot be understood."""

    exit_code = 32


class DownloadError(BuildError):
    """Base of what can go wrong between a published wheel and this machine. `transient`: another try may help."""

    exit_code = 33
    transient = False


class FileNotThereError(DownloadError):
    """The place has no such file (404, or a folder without it)."""

    exit_code = 34


class AccessDeniedError(DownloadError):
    """The server does not give the file to this client (401, 403, 407)."""

    exit_code = 35


class ServerError(DownloadError):
    """The server answered with an error of its own."""

    exit_code = 36
    transient = True


class ConnectionFailedError(DownloadError):
    """No connection, or one that broke off: no network, no such host, refused, reset, a certificate."""

    exit_code = 37
    transient = True


class SilentServerError(DownloadError):
    """Nothing came for longer than the time-out."""

    exit_code = 38


class SlowServerError(DownloadError):
    """Something comes, but so slowly that it would take hours."""

    exit_code = 39


class TruncatedError(DownloadError):
    """The server ended the file before its end."""

    exit_code = 40
    transient = True


class NotAWheelError(DownloadError):
    """What came is no wheel, such as a page that says so in words."""

    exit_code = 41


class AlteredFileError(DownloadError):
    """A wheel came, but not the one that was published: size or sha256 differ."""

    exit_code = 42


class RedirectError(DownloadError):
    """The server sends us to a host that the user did not name."""

    exit_code = 43


class TargetFolderError(DownloadError):
    """The folder for the wheel cannot be written."""

    exit_code = 44


class DiskFullError(DownloadError):
    """There is no room for the wheel."""

    exit_code = 45


class AlteredWheelError(BuildError):
    """A wheel's members are not what its own RECORD says, or cannot be read."""

    exit_code = 46


class NotVerifiedError(BuildError):
    """A wheel cannot be built again here, or not all of it: an input that it records is another one here."""

    exit_code = 47


class OverBudgetError(BuildError):
    """A wheel is larger than matrix.toml allows."""

    exit_code = 48


class GeneratedFileError(BuildError):
    """A file that is generated from the tables is not what they say now."""

    exit_code = 49


class JitDisabledError(BuildError):
    """A kernel would have to be compiled at first use, and FLASH_ATTN_JIT forbids that."""

    exit_code = 50


class CacheError(BuildError):
    """The folder for kernels that are compiled at first use cannot be written."""

    exit_code = 51


class InterruptedBuildError(BuildError):
    """The build was stopped from outside."""

    exit_code = 130


def nearest(value: str, choices: Iterable[str]) -> str:
    """`did you mean "x"? ` for the choice most like `value`, or an empty string."""
    found = difflib.get_close_matches(value, list(choices), n=1, cutoff=0.5)
    return f'did you mean "{found[0]}"? ' if found else ""
