"""The kernel table: kernels.toml read, checked, and multiplied out into rows.

A `Row` is one kernel by key; a `Kernel` is a row for one arch, with its tile constants, shared memory and macros: all
that the compiler needs beside the source text.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .archs import Arch, parse_arch
from .errors import ArchError, SharedMemoryError, SubsetError, TableError, nearest

OPS = ("fwd", "bwd", "decode", "rotary", "round")
DTYPES = ("fp16", "bf16", "e4m3")
MASKS = ("full", "causal", "general")  # FA_MASK is the place of the row's mask in this tuple
REQUIRED_TILES = ("block_m", "block_n", "warps", "stages", "min_blocks")
SPLIT = "split"  # 1: two thread blocks serve each key block of bwd; the archive tells the host library

_TOP_KEYS = ("version", "archs", "families", "kernel")
_ARCH_KEYS = ("smem", "like")
_FAMILY_KEYS = ("folder", "min_capability", "archs", "any_arch")
_KERNEL_KEYS = (
    "op", "family", "source", "entry_points", "dtypes", "head_dims", "masks", "smem", "tiles", "overrides",
)  # fmt: skip
_OVERRIDE_KEYS = ("dtypes", "head_dims", "masks", "archs", "tiles", "allow_spills")
_SPILL_KEYS = ("bytes", "reason")
_RESERVED_MACROS = ("head_dim", "bf16", "mask", "smem_bytes")
_MAX_KEY = 63  # char key[64] of the archive, NUL included


@dataclass(frozen=True)
class ArchLimits:
    """`smem`: bytes one block may have. `like`: the arch whose overrides also hold here, or None."""

    arch: Arch
    smem: int
    like: Arch | None


@dataclass(frozen=True)
class Family:
    """A folder of csrc/kernels.

    `archs` are those of a complete kernel set. With `any_arch` the family can also be compiled for every other arch
    from `min_capability` on; without, its code is for `archs` alone.
    """

    name: str
    folder: str
    min_capability: int
    archs: tuple[Arch, ...]
    any_arch: bool

    def built_for(self, archs: Iterable[Arch]) -> list[Arch]:
        """Those that this family is compiled for when a user asks for `archs`: "90" asks for its 90a code too."""
        asked = list(archs)
        if self.any_arch:
            return [arch for arch in asked if arch.number >= self.min_capability]
        numbers = {arch.number for arch in asked if not arch.ptx and not arch.suffix}
        return [arch for arch in self.archs if arch in asked or arch.number in numbers]


@dataclass(frozen=True)
class AllowedSpills:
    """Spilled bytes that a row may have, and why."""

    bytes: int
    reason: str


@dataclass(frozen=True)
class Override:
    """Constants that replace others where every selector that is given matches."""

    dtypes: tuple[str, ...] | None
    head_dims: tuple[int, ...] | None
    masks: tuple[str, ...] | None
    archs: tuple[Arch, ...] | None
    tiles: tuple[tuple[str, int], ...]
    allow_spills: AllowedSpills | None

    def matches(self, row: Row, arch: Arch, like: Arch | None) -> bool:
        return (
            (self.dtypes is None or row.dtype in self.dtypes)
            and (self.head_dims is None or row.head_dim in self.head_dims)
            and (self.masks is None or row.mask in self.masks)
            and (self.archs is None or arch in self.archs or (like is not None and like in self.archs))
        )


@dataclass(frozen=True)
class Row:
    """One kernel of the table; compiled once per arch."""

    op: str
    family: str
    dtype: str
    head_dim: int
    mask: str
    source: str = field(compare=False)  # "sm80/fwd.cu", below csrc/kernels
    entry_points: tuple[str, ...] = field(compare=False)  # the first is the kernel that the archive describes
    tiles: tuple[tuple[str, int], ...] = field(compare=False)
    overrides: tuple[Override, ...] = field(compare=False)
    smem: str = field(compare=False)

    @property
    def key(self) -> str:
        return f"{self.op}-{self.family}-{self.dtype}-d{self.head_dim}-{self.mask}"


@dataclass(frozen=True)
class Kernel:
    """A row for one arch: everything that decides the compiled bytes, except source text and compiler."""

    key: str
    arch: Arch
    source: str
    entry_points: tuple[str, ...]
    head_dim: int
    tiles: Mapping[str, int]
    smem_bytes: int
    macros: tuple[str, ...]  # "FA_HEAD_DIM=64"
    allow_spills: AllowedSpills | None

    @property
    def name(self) -> str:
        """`KEY.ARCH`, which names the files of this kernel in the build folder."""
        return f"{self.key}.{self.arch}"

    @property
    def threads(self) -> int:
        return 32 * self.tiles["warps"]

    @property
    def split(self) -> int:
        return self.tiles.get(SPLIT, 0)


@dataclass(frozen=True)
class KernelTable:
    """kernels.toml, checked. `rows` are sorted by key."""

    archs: Mapping[Arch, ArchLimits]
    families: Mapping[str, Family]
    rows: tuple[Row, ...]

    def limits(self, arch: Arch) -> ArchLimits:
        """What `arch` allows. PTX of any number is held to the limits of the table's PTX."""
        if arch in self.archs:
            return self.archs[arch]
        if arch.ptx:
            for known in self.archs.values():
                if known.arch.ptx:
                    return ArchLimits(arch, known.smem, known.like or known.arch)
        names = ", ".join(str(known) for known in self.archs)
        raise ArchError(
            f'arch "{arch}" is not in the kernel table',
            why="its shared memory decides the tile constants",
            fix=f"{nearest(str(arch), map(str, self.archs))}known archs: {names}; a new one is a line of [archs]",
        )

    def kernel(self, row: Row, arch: Arch) -> Kernel:
        """`row` for `arch`. SharedMemoryError if its tiles do not fit."""
        limits = self.limits(arch)
        tiles = dict(row.tiles)
        allow_spills = None
        for override in row.overrides:
            if override.matches(row, arch, limits.like):
                tiles.update(override.tiles)
                allow_spills = override.allow_spills or allow_spills
        smem_bytes = evaluate(row.smem, {**tiles, "head_dim": row.head_dim}, where=f"kernel {row.key}: smem")
        if smem_bytes > limits.smem:
            constants = ", ".join(f"{name} = {value}" for name, value in tiles.items())
            raise SharedMemoryError(
                f"kernel {row.key} needs {smem_bytes} bytes of shared memory on arch {arch}, which has {limits.smem}",
                why=f"{row.smem} with {constants}, head_dim = {row.head_dim}",
                fix=f'give it smaller tiles in kernels.toml: an entry of [[kernel.overrides]] with archs = ["{arch}"]',
            )
        macros = {
            "head_dim": row.head_dim,
            "bf16": int(row.dtype == "bf16"),
            "mask": MASKS.index(row.mask),
            "smem_bytes": smem_bytes,
            **tiles,
        }
        return Kernel(
            key=row.key,
            arch=arch,
            source=row.source,
            entry_points=row.entry_points,
            head_dim=row.head_dim,
            tiles=tiles,
            smem_bytes=smem_bytes,
            macros=tuple(f"FA_{name.upper()}={value}" for name, value in macros.items()),
            allow_spills=allow_spills,
        )

    def kernels(self, rows: Iterable[Row], archs: Mapping[str, Iterable[Arch]]) -> list[Kernel]:
        """Every row for every arch of `archs[family]`, sorted by key and arch name.

        Machine code for 8.0 also runs on 8.6: an arch gets code of its own only where its constants differ from those
        of an earlier one of its generation.
        """
        result: list[Kernel] = []
        for row in rows:
            kernels = [self.kernel(row, arch) for arch in sorted(archs[row.family])]
            result += [k for k in kernels if not any(k.arch.runs(e.arch) and k.macros == e.macros for e in kernels)]
        return sorted(result, key=lambda kernel: (kernel.key, str(kernel.arch)))

    def select(self, patterns: Iterable[str] | None = None, head_dims: Iterable[int] | None = None) -> list[Row]:
        """The rows whose key matches any of `patterns` (globs) and whose head dim is one of `head_dims`."""
        patterns = None if patterns is None else list(patterns)
        head_dims = None if head_dims is None else list(head_dims)
        keys = [row.key for row in self.rows]
        for pattern in patterns or ():
            if not fnmatch.filter(keys, pattern):
                raise SubsetError(
                    f'FLASH_ATTN_KERNELS: "{pattern}" matches none of the {len(keys)} kernels of the table',
                    fix=f"{nearest(pattern, keys)}`python -m buildtools table` lists them",
                )
        built = sorted({row.head_dim for row in self.rows})
        for head_dim in head_dims or ():
            if head_dim not in built:
                raise SubsetError(
                    f"FLASH_ATTN_HEAD_DIMS: the table has no head dim {head_dim}",
                    fix=f"choose from {', '.join(map(str, built))}; a smaller head dim runs in the next larger kernel",
                )
        rows = [
            row
            for row in self.rows
            if (patterns is None or any(fnmatch.fnmatchcase(row.key, pattern) for pattern in patterns))
            and (head_dims is None or row.head_dim in head_dims)
        ]
        if not rows:
            raise SubsetError(
                "FLASH_ATTN_KERNELS and FLASH_ATTN_HEAD_DIMS together leave no kernel",
                why=f"patterns {patterns}, head dims {head_dims}",
                fix="widen one of them; `python -m buildtools table` lists the kernels",
            )
        return rows


# --- reading -----------------------------------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict; TableError names the file and line of a syntax error."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TableError(f"{path.name} cannot be read: {error.strerror}", fix=f"it belongs at {path}") from None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{path.name} is not valid TOML: {error}") from None


def load_table(path: Path) -> KernelTable:
    """kernels.toml, or TableError naming the key that is wrong."""
    return parse_table(read_toml(path), path.name)


def parse_table(data: Mapping[str, Any], name: str = "kernels.toml") -> KernelTable:
    check_keys(data, _TOP_KEYS, where=name, required=_TOP_KEYS)
    if data["version"] != 1:
        raise TableError(f"{name}: version = {data['version']!r}", why="this builder reads version 1")
    archs = _parse_archs(expect(data["archs"], dict, f"{name}: archs"), name)
    families = {
        key: _parse_family(key, expect(value, dict, f"{name}: families.{key}"), archs, name)
        for key, value in expect(data["families"], dict, f"{name}: families").items()
    }
    rows: dict[str, Row] = {}
    for index, product in enumerate(expect(data["kernel"], list, f"{name}: kernel")):
        for row in _parse_product(
            expect(product, dict, f"{name}: kernel"), f"{name}: kernel[{index}]", archs, families
        ):
            if row.key in rows:
                raise TableError(f"{name}: kernel {row.key} is there twice", fix="remove one of its [[kernel]] entries")
            rows[row.key] = row
    if not rows:
        raise TableError(f"{name}: kernel is empty", why="there is nothing to compile")
    table = KernelTable(archs, families, tuple(rows[key] for key in sorted(rows)))
    for row in table.rows:  # every arch of a complete set must fit, whatever subset is being built
        for arch in families[row.family].archs:
            table.kernel(row, arch)
    return table


def check_keys(data: Mapping[str, Any], allowed: Iterable[str], *, where: str, required: Iterable[str] = ()) -> None:
    """TableError for a key that is not allowed (with the nearest that is), or one that is missing."""
    allowed = tuple(allowed)
    for key in data:
        if key not in allowed:
            raise TableError(
                f'{where}: unknown key "{key}"', fix=f"{nearest(key, allowed)}allowed keys: {', '.join(allowed)}"
            )
    for key in required:
        if key not in data:
            raise TableError(f'{where}: key "{key}" is missing')


def expect(value: Any, kind: type, where: str) -> Any:
    """`value`, or TableError if it is not of `kind`."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {int: "an integer", str: "a string", list: "a list", dict: "a table", bool: "true or false"}
        raise TableError(f"{where} = {value!r} is not {names.get(kind, kind.__name__)}")
    return value


def choice_of(value: Any, choices: Iterable[str], where: str) -> str:
    """`value` if it is one of `choices`, or TableError with the nearest."""
    choices = tuple(choices)
    if value not in choices:
        raise TableError(f"{where} = {value!r}", fix=f"{nearest(str(value), choices)}choose from {', '.join(choices)}")
    return str(value)


def arch_name(value: Any, archs: Iterable[Arch], where: str) -> Arch:
    """The arch of [archs] that `value` names exactly as it is written there, or TableError."""
    known = {str(arch): arch for arch in archs}
    return known[choice_of(value, known, where)]


def _parse_archs(data: Mapping[str, Any], name: str) -> dict[Arch, ArchLimits]:
    parsed: dict[Arch, str] = {}
    for key in data:
        try:
            arch = parse_arch(key)
        except ArchError:
            raise TableError(f'{name}: archs: "{key}" names no arch', fix='write "80", "90a" or "ptx80"') from None
        if str(arch) != key:
            raise TableError(f'{name}: archs: "{key}" is written "{arch}" in the table')
        parsed[arch] = key
    result = {}
    for arch, key in parsed.items():
        where = f"{name}: archs.{key}"
        entry = expect(data[key], dict, where)
        check_keys(entry, _ARCH_KEYS, where=where, required=("smem",))
        like = arch_name(entry["like"], parsed, f"{where}.like") if "like" in entry else None
        result[arch] = ArchLimits(arch, _positive(entry["smem"], f"{where}.smem"), like)
    return result


def _parse_family(key: str, data: Mapping[str, Any], archs: Mapping[Arch, ArchLimits], name: str) -> Family:
    where = f"{name}: families.{key}"
    check_keys(data, _FAMILY_KEYS, where=where, required=_FAMILY_KEYS)
    if not re.fullmatch(r"[a-z][a-z0-9]*", key):
        raise TableError(f"{where}: a family's name is lower-case letters and digits: it is a part of the kernel's key")
    min_capability = _positive(data["min_capability"], f"{where}.min_capability")
    named = tuple(arch_name(value, archs, f"{where}.archs") for value in expect(data["archs"], list, f"{where}.archs"))
    for arch in named:
        if arch.number < min_capability:
            raise TableError(f'{where}.archs: "{arch}" is below min_capability = {min_capability}')
    return Family(
        name=key,
        folder=expect(data["folder"], str, f"{where}.folder"),
        min_capability=min_capability,
        archs=named,
        any_arch=expect(data["any_arch"], bool, f"{where}.any_arch"),
    )


def _parse_product(
    data: Mapping[str, Any], where: str, archs: Mapping[Arch, ArchLimits], families: Mapping[str, Family]
) -> list[Row]:
    check_keys(data, _KERNEL_KEYS, where=where, required=[key for key in _KERNEL_KEYS if key != "overrides"])
    op = choice_of(data["op"], OPS, f"{where}.op")
    family = families[choice_of(data["family"], families, f"{where}.family")]
    dtypes = _strings(data["dtypes"], f"{where}.dtypes", DTYPES)
    masks = _strings(data["masks"], f"{where}.masks", MASKS)
    head_dims = _head_dims(data["head_dims"], f"{where}.head_dims")
    entry_points = _strings(data["entry_points"], f"{where}.entry_points")
    smem = expect(data["smem"], str, f"{where}.smem")
    tiles = _parse_tiles(expect(data["tiles"], dict, f"{where}.tiles"), head_dims, where)
    constants = set().union(*tiles.values())
    names = sorted(constants | {"head_dim"})
    evaluate(smem, dict.fromkeys(names, 1), where=f"{where}.smem")
    overrides = tuple(
        _parse_override(
            expect(item, dict, f"{where}.overrides"), f"{where}.overrides[{index}]", archs, constants, head_dims
        )
        for index, item in enumerate(expect(data.get("overrides", []), list, f"{where}.overrides"))
    )
    rows = [
        Row(
            op=op,
            family=family.name,
            dtype=dtype,
            head_dim=head_dim,
            mask=mask,
            source=f"{family.folder}/{expect(data['source'], str, f'{where}.source')}",
            entry_points=entry_points,
            tiles=tuple(tiles[head_dim].items()),
            overrides=overrides,
            smem=smem,
        )
        for dtype in dtypes
        for head_dim in head_dims
        for mask in masks
    ]
    for row in rows:
        if len(row.key) > _MAX_KEY:
            raise TableError(
                f"{where}: key {row.key} has {len(row.key)} characters", why=f"the archive holds {_MAX_KEY}"
            )
    return rows


def _parse_tiles(data: Mapping[str, Any], head_dims: tuple[int, ...], where: str) -> dict[int, dict[str, int]]:
    check_keys(data, map(str, head_dims), where=f"{where}.tiles", required=map(str, head_dims))
    result = {}
    for head_dim in head_dims:
        here = f"{where}.tiles.{head_dim}"
        tiles = expect(data[str(head_dim)], dict, here)
        for key in REQUIRED_TILES:
            if key not in tiles:
                raise TableError(f'{here}: key "{key}" is missing{_typo(key, tiles)}')
        result[head_dim] = {key: _constant(key, value, here) for key, value in tiles.items()}
    names = set(result[head_dims[0]])
    for head_dim, tiles in result.items():
        if set(tiles) != names:
            odd = sorted(set(tiles) ^ names)
            raise TableError(f"{where}.tiles.{head_dim}: {', '.join(odd)} must be given for every head dim or for none")
    return result


def _parse_override(
    data: Mapping[str, Any],
    where: str,
    archs: Mapping[Arch, ArchLimits],
    constants: set[str],
    head_dims: tuple[int, ...],
) -> Override:
    check_keys(data, _OVERRIDE_KEYS, where=where)
    tiles = expect(data.get("tiles", {}), dict, f"{where}.tiles")
    check_keys(tiles, sorted(constants), where=f"{where}.tiles")
    chosen = _head_dims(data["head_dims"], f"{where}.head_dims") if "head_dims" in data else None
    for head_dim in chosen or ():
        if head_dim not in head_dims:
            raise TableError(f"{where}.head_dims: {head_dim} is not one of this entry's head dims {list(head_dims)}")
    spills = None
    if "allow_spills" in data:
        entry = expect(data["allow_spills"], dict, f"{where}.allow_spills")
        check_keys(entry, _SPILL_KEYS, where=f"{where}.allow_spills", required=_SPILL_KEYS)
        reason = expect(entry["reason"], str, f"{where}.allow_spills.reason")
        if not reason.strip():
            raise TableError(f"{where}.allow_spills.reason is empty", why="a spill is only allowed for a stated reason")
        spills = AllowedSpills(_positive(entry["bytes"], f"{where}.allow_spills.bytes"), reason)
    if not tiles and spills is None:
        raise TableError(f"{where} changes nothing", fix="give it tiles or allow_spills, or remove it")
    return Override(
        dtypes=_strings(data["dtypes"], f"{where}.dtypes", DTYPES) if "dtypes" in data else None,
        head_dims=chosen,
        masks=_strings(data["masks"], f"{where}.masks", MASKS) if "masks" in data else None,
        archs=tuple(
            arch_name(value, archs, f"{where}.archs") for value in expect(data["archs"], list, f"{where}.archs")
        )
        if "archs" in data
        else None,
        tiles=tuple((key, _constant(key, value, f"{where}.tiles")) for key, value in tiles.items()),
        allow_spills=spills,
    )


def _typo(key: str, there: Iterable[str]) -> str:
    """` (is "blok_m" meant to be it?)` if something like the missing `key` is there."""
    like = nearest(key, [name for name in there if name not in REQUIRED_TILES])
    return f" (is {like[len('did you mean ') : -2]} meant to be it?)" if like else ""


def _constant(key: str, value: Any, where: str) -> int:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", key) or key in _RESERVED_MACROS:
        raise TableError(
            f'{where}: "{key}" cannot be a tile constant',
            why=f"it becomes the macro FA_{key.upper()}; {', '.join(_RESERVED_MACROS)} are set by the builder",
        )
    if key in REQUIRED_TILES:
        number = _positive(value, f"{where}.{key}")
    else:  # a switch may be 0
        number = int(expect(value, int, f"{where}.{key}"))
        if number < 0:
            raise TableError(f"{where}.{key} = {number} is negative")
    if key == SPLIT and number > 1:
        raise TableError(f"{where}.{SPLIT} = {number} is neither 0 nor 1")
    if key == "warps" and number > 32:
        raise TableError(f"{where}.warps = {number}", why="a block has at most 1,024 threads, 32 warps")
    return number


def _positive(value: Any, where: str) -> int:
    number = int(expect(value, int, where))
    if number <= 0:
        raise TableError(f"{where} = {number} is not positive")
    return number


def _strings(value: Any, where: str, choices: Iterable[str] | None = None) -> tuple[str, ...]:
    items = tuple(
        expect(item, str, where) if choices is None else choice_of(item, choices, where)
        for item in expect(value, list, where)
    )
    if not items:
        raise TableError(f"{where} is empty")
    if len(set(items)) != len(items):
        raise TableError(f"{where} = {list(items)} repeats a value")
    return items


def _head_dims(value: Any, where: str) -> tuple[int, ...]:
    items = tuple(_positive(item, where) for item in expect(value, list, where))
    if not items or len(set(items)) != len(items):
        raise TableError(f"{where} = {list(items)} is empty or repeats a value")
    for item in items:
        if item % 8:
            raise TableError(f"{where}: {item} is not a multiple of 8", why="rows are moved 16 bytes at a time")
    return items


# --- the smem expression -----------------------------------------------------------------------------------------


def evaluate(expression: str, names: Mapping[str, int], *, where: str) -> int:
    """Integer arithmetic with + - * // and parentheses over `names`; anything else is a TableError."""
    try:
        tree = _parse(expression)
    except (SyntaxError, ValueError) as error:
        raise TableError(f"{where} = {expression!r} is not an expression: {error.args[0]}") from None
    return _evaluate(tree, names, f"{where} = {expression!r}")


@functools.cache
def _parse(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _evaluate(node: ast.expr, names: Mapping[str, int], where: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise TableError(
                f'{where}: "{node.id}" is not a tile constant',
                fix=f"{nearest(node.id, names)}names that can be used: {', '.join(names)}",
            )
        return names[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, names, where), _evaluate(node.right, names, where)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            if right == 0:
                raise TableError(f"{where}: division by zero")
            return left // right
    raise TableError(f"{where}: only integers, tile constants, + - * // and parentheses are understood")
