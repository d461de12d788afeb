"""kernels.toml and matrix.toml: what a valid table means, and what is said of an invalid one."""

from __future__ import annotations

import pytest
from buildtools_support import MATRIX, ROOT, TABLE

from buildtools.archs import Arch, parse_arch
from buildtools.errors import ArchError, SharedMemoryError, SubsetError, TableError
from buildtools.kernels import KernelTable, evaluate, load_table, parse_table, read_toml
from buildtools.matrix import Matrix, load_matrix, parse_matrix


def table_of(text: str, tmp_path) -> KernelTable:
    path = tmp_path / "kernels.toml"
    path.write_text(text)
    return load_table(path)


def matrix_of(text: str, tmp_path) -> Matrix:
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    return load_matrix(path, table_of(TABLE, tmp_path))


# --- the project's own tables ------------------------------------------------------------------------------------


def test_own_tables_are_valid_and_agree():
    table = load_table(ROOT / "kernels.toml")
    matrix = load_matrix(ROOT / "matrix.toml", table)
    built = {arch for kernel_set in matrix.kernel_sets.values() for arch in kernel_set.archs}
    for family in table.families.values():
        assert built.issuperset(family.archs), f"no kernel set compiles {family.name} for all its archs"


def test_own_table_has_every_kernel_that_the_api_promises():
    keys = {row.key for row in load_table(ROOT / "kernels.toml").rows}
    expected = {
        f"{op}-sm80-{dtype}-d{head_dim}-{mask}"
        for op in ("fwd", "bwd")
        for dtype in ("fp16", "bf16")
        for head_dim in (64, 96, 128, 192, 256)
        for mask in ("full", "causal", "general")
    }
    assert expected <= keys


def test_every_torch_of_the_matrix_has_a_row_and_a_wheel():
    """Torch 2.4 to 2.9 one row each, with the C++ ABI of PyPI's wheels of that version; one stanza makes a wheel."""
    matrix = load_matrix(ROOT / "matrix.toml")
    rows = {wheel.host_library.per_torch: wheel.host_library for wheel in matrix.wheels.values()}
    assert {minor: row.cxx11_abi for minor, row in rows.items() if minor is not None} == {
        (2, 4): False, (2, 5): False, (2, 6): False, (2, 7): True, (2, 8): True, (2, 9): True,
    }  # fmt: skip
    assert {wheel.host_library.name for wheel in matrix.wheels.values()} == set(matrix.host_libraries)
    labels = [(matrix.label(wheel), wheel.host_library.platform) for wheel in matrix.wheels.values()]
    assert len(set(labels)) == len(labels), "two wheels of one platform have one version"
    assert matrix.label(matrix.wheels["default"]) == ""


def test_every_kernel_set_has_wheels_and_the_default_one_has_all_host_libraries():
    """A wheel of another kernel set takes the place of none of the default set's, which serve every driver."""
    matrix = load_matrix(ROOT / "matrix.toml")
    hosts = {name: set() for name in matrix.kernel_sets}
    for wheel in matrix.wheels.values():
        hosts[wheel.kernel_set.name].add(wheel.host_library.name)
    assert hosts.pop(matrix.default_kernel_set.name) == set(matrix.host_libraries)
    assert all(hosts.values())
    default = set(matrix.default_kernel_set.archs)
    assert all(set(matrix.kernel_sets[name].archs) > default for name in hosts)


# --- meaning -----------------------------------------------------------------------------------------------------


def test_rows_are_the_product_sorted_by_key(tmp_path):
    keys = [row.key for row in table_of(TABLE, tmp_path).rows]
    assert keys == ["bwd-sm80-bf16-d64-causal", "fwd-sm80-bf16-d128-full", "fwd-sm80-bf16-d64-full"]


def test_kernel_holds_macros_of_row_and_tiles(tmp_path):
    table = table_of(TABLE.replace("min_blocks = 1 }", "min_blocks = 1, my_switch = 0 }"), tmp_path)
    kernel = table.kernel(table.rows[1], Arch(80))
    assert kernel.name == "fwd-sm80-bf16-d128-full.80"
    assert kernel.threads == 128
    assert kernel.source == "sm80/fwd.cu"
    assert set(kernel.macros) == {
        "FA_HEAD_DIM=128", "FA_BF16=1", "FA_MASK=0", f"FA_SMEM_BYTES={(64 + 2 * 2 * 64) * 128 * 2}", "FA_BLOCK_M=64",
        "FA_BLOCK_N=64", "FA_WARPS=4", "FA_STAGES=2", "FA_MIN_BLOCKS=1", "FA_MY_SWITCH=0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "stages"), [("80", 2), ("90", 2), ("86", 1), ("89", 1), ("ptx80", 1), ("ptx90", 1), ("90a", 2)]
)
def test_override_holds_for_its_archs_and_those_like_them(tmp_path, arch, stages):
    table = table_of(TABLE, tmp_path)
    assert table.kernel(table.rows[1], parse_arch(arch)).tiles["stages"] == stages


def test_later_override_wins_and_selectors_are_all_needed(tmp_path):
    more = '[[kernel.overrides]]\ndtypes = ["bf16"]\nmasks = ["full"]\nhead_dims = [64]\ntiles = { warps = 2 }\n'
    text = TABLE.replace('[[kernel]]\nop = "bwd"', f'{more}\n[[kernel]]\nop = "bwd"')
    table = table_of(text, tmp_path)
    warps = {row.key: table.kernel(row, Arch(80)).tiles["warps"] for row in table.rows}
    assert warps == {"bwd-sm80-bf16-d64-causal": 8, "fwd-sm80-bf16-d128-full": 4, "fwd-sm80-bf16-d64-full": 2}


def test_unknown_arch_is_named_with_the_nearest(tmp_path):
    table = table_of(TABLE, tmp_path)
    with pytest.raises(ArchError, match=r'"88" is not in the kernel table[\s\S]*did you mean "8[069]"'):
        table.kernel(table.rows[0], Arch(88))


def test_shared_memory_is_checked_before_compiling(tmp_path):
    table_of(TABLE.replace("stages = 2", "stages = 4"), tmp_path)  # 144 KiB of 163
    found = r"fwd-sm80-bf16-d128-full needs 180224 bytes .* on arch 80, which has 166912"
    with pytest.raises(SharedMemoryError, match=found):
        table_of(TABLE.replace("stages = 2", "stages = 5"), tmp_path)


def test_closed_family_is_built_for_its_archs_and_a_plain_number_asks_for_them(tmp_path):
    text = TABLE.replace("any_arch = true", "any_arch = false").replace('["80", "90", "ptx80"]', '["90a"]')
    family = table_of(text, tmp_path).families["sm80"]
    assert family.built_for([Arch(90)]) == [Arch(90, "a")]
    assert family.built_for([Arch(90, "a")]) == [Arch(90, "a")]
    assert family.built_for([Arch(80), Arch(120), Arch(90, ptx=True)]) == []


# --- subsets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "head_dims", "count"),
    [(None, None, 3), (["fwd-*"], None, 2), (None, [64], 2), (["fwd-*"], [64], 1), (["*-d128-*", "bwd-*"], None, 2)],
)
def test_select(tmp_path, patterns, head_dims, count):
    assert len(table_of(TABLE, tmp_path).select(patterns, head_dims)) == count


@pytest.mark.parametrize(
    ("patterns", "head_dims", "message"),
    [
        (["fwd-sm80-bf16-d64-ful"], None, 'did you mean "fwd-sm80-bf16-d64-full"'),
        (["fwd-*", "*-fp8-*"], None, r'"\*-fp8-\*" matches none of the 3 kernels'),
        (None, [96], "no head dim 96[\\s\\S]*64, 128"),
        (["bwd-*"], [128], "together leave no kernel"),
    ],
)
def test_select_says_what_is_wrong(tmp_path, patterns, head_dims, message):
    with pytest.raises(SubsetError, match=message):
        table_of(TABLE, tmp_path).select(patterns, head_dims)


# --- the smem expression -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"), [("a + b * 2", 13), ("(a + b) * 2", 16), ("a - b", -2), ("b // 2", 2), ("7", 7)]
)
def test_evaluate(expression, value):
    assert evaluate(expression, {"a": 3, "b": 5}, where="smem") == value


@pytest.mark.parametrize(
    "expression",
    ["a / b", "a ** b", "a if b else 1", "f(a)", "a.b", "-a", "True", "1.5", "'a'", "a;b", "", "a +", "a // 0", "blok",
     "__import__('os')", "[a]", "(a, b)", "a < b", "\0"],
)  # fmt: skip
def test_evaluate_refuses_everything_else(expression):
    with pytest.raises(TableError, match="smem"):
        evaluate(expression, {"a": 3, "b": 5}, where="smem")


# --- invalid tables ----------------------------------------------------------------------------------------------

BAD_TABLES = {
    "syntax": ("version = 1", "version = = 1", r"not valid TOML: .*line 1"),
    "version": ("version = 1", "version = 2", "version = 2"),
    "unknown-section": ("[archs]", "[arch]", 'unknown key "arch"[\\s\\S]*did you mean "archs"'),
    "no-kernels": (TABLE[TABLE.index("[[kernel]]") :], "", 'key "kernel" is missing'),
    "arch-name": ("90a = {", "9x = {", '"9x" names no arch'),
    "arch-spelling": ("90a = {", "sm_90a = {", '"sm_90a" is written "90a"'),
    "arch-key": ('like = "86"', 'lke = "86"', 'archs.89: unknown key "lke"[\\s\\S]*did you mean "like"'),
    "arch-like": ('like = "86"', 'like = "85"', "archs.89.like = '85'"),
    "arch-smem-text": ("80 = { smem = 166912 }", '80 = { smem = "163 KB" }', "'163 KB' is not an integer"),
    "arch-smem-negative": ("80 = { smem = 166912 }", "80 = { smem = -1 }", "-1 is not positive"),
    "family-key": ("any_arch", "any_archs", 'unknown key "any_archs"[\\s\\S]*did you mean "any_arch"'),
    "family-key-missing": ("min_capability = 80\n", "", 'key "min_capability" is missing'),
    "family-arch": ('archs = ["80", "90", "ptx80"]', 'archs = ["80", "90b"]', "'90b'[\\s\\S]*did you mean \"90a?\""),
    "family-arch-too-old": ("min_capability = 80", "min_capability = 90", '"80" is below min_capability = 90'),
    "family-switch": ("any_arch = true", "any_arch = 1", "1 is not true or false"),
    "kernel-key": ('source = "fwd.cu"', 'sources = "fwd.cu"', 'kernel\\[0\\]: unknown key "sources"'),
    "kernel-family": ('family = "sm80"', 'family = "sm08"', "'sm08'[\\s\\S]*did you mean \"sm80\""),
    "kernel-op": ('op = "fwd"', 'op = "forward"', "op = 'forward'[\\s\\S]*choose from fwd, bwd"),
    "kernel-dtype": ('dtypes = ["bf16"]', 'dtypes = ["bfloat16"]', "'bfloat16'[\\s\\S]*did you mean \"bf16\""),
    "kernel-dtype-text": ('dtypes = ["bf16"]', 'dtypes = "bf16"', "'bf16' is not a list"),
    "kernel-dtype-none": ('dtypes = ["bf16"]', "dtypes = []", "dtypes is empty"),
    "kernel-dtype-twice": ('dtypes = ["bf16"]', 'dtypes = ["bf16", "bf16"]', "repeats a value"),
    "kernel-mask": ('masks = ["full"]', 'masks = ["casual"]', "'casual'[\\s\\S]*did you mean \"causal\""),
    "head-dim-odd": ("head_dims = [64, 128]", "head_dims = [60, 128]", "60 is not a multiple of 8"),
    "head-dim-twice": ("head_dims = [64, 128]", "head_dims = [64, 64]", "repeats a value"),
    "head-dim-boolean": ("head_dims = [64, 128]", "head_dims = [true]", "True is not an integer"),
    "tiles-missing": ("head_dims = [64, 128]", "head_dims = [64, 96, 128]", 'tiles: key "96" is missing'),
    "tiles-superfluous": ("head_dims = [64, 128]", "head_dims = [64]", 'tiles: unknown key "128"'),
    "tile-misspelt": ("block_m = 64", "blok_m = 64", '"block_m" is missing \\(is "blok_m" meant to be it\\?\\)'),
    "tile-zero": ("block_m = 64", "block_m = 0", "block_m = 0 is not positive"),
    "tile-text": ("warps = 4", 'warps = "4"', "warps = '4' is not an integer"),
    "tile-too-many-warps": ("warps = 4", "warps = 64", "at most 1,024 threads"),
    "tile-reserved": ("warps = 4", "warps = 4, bf16 = 1", '"bf16" cannot be a tile constant'),
    "tile-split": ("min_blocks = 1 }", "min_blocks = 1, split = 2 }", "split = 2 is neither 0 nor 1"),
    "tile-uneven": ("warps = 4", "warps = 4, split = 1", "split must be given for every head dim or for none"),
    "smem-name": ("stages * block_n)", "stags * block_n)", '"stags" is not a tile[\\s\\S]*did you mean "stages"'),
    "smem-syntax": ("* head_dim * 2", "* head_dim *", "is not an expression"),
    "smem-operator": ("* head_dim * 2", "* head_dim / 2", "only integers, tile constants"),
    "override-key": ("tiles = { stages", "tile = { stages", 'unknown key "tile"[\\s\\S]*did you mean "tiles"'),
    "override-tile": ("{ stages = 1 }", "{ stage = 1 }", 'unknown key "stage"[\\s\\S]*did you mean "stages"'),
    "override-head-dim": ("head_dims = [128]", "head_dims = [256]", "256 is not one of this entry's head dims"),
    "override-arch": ('archs = ["86", "ptx80"]', 'archs = ["68"]', "archs = '68'"),
    "override-nothing": ("tiles = { stages = 1 }", "", "changes nothing"),
    "spills-without-reason": ("tiles = { stages = 1 }", "allow_spills = { bytes = 8 }", 'key "reason" is missing'),
    "spills-empty-reason": (
        "tiles = { stages = 1 }", 'allow_spills = { bytes = 8, reason = " " }', "reason is empty",
    ),
    "row-twice": ('op = "bwd"\nfamily = "sm80"\nsource', 'op = "fwd"\nfamily = "sm80"\nsource', None),
}  # fmt: skip


@pytest.mark.parametrize("defect", BAD_TABLES)
def test_invalid_table(tmp_path, defect):
    old, new, message = BAD_TABLES[defect]
    assert old in TABLE
    text = TABLE.replace(old, new, 1)
    if defect == "row-twice":
        text, message = text.replace('masks = ["causal"]', 'masks = ["full"]'), "fwd-sm80-bf16-d64-full is there twice"
    with pytest.raises(TableError, match=message) as caught:
        table_of(text, tmp_path)
    assert str(caught.value).startswith("kernels.toml")


def test_table_that_is_not_there(tmp_path):
    with pytest.raises(TableError, match="cannot be read"):
        load_table(tmp_path / "kernels.toml")


@pytest.mark.parametrize("value", [None, 1, "x", [], [1], {"a": 1}])
@pytest.mark.parametrize("key", ["version", "archs", "families", "kernel"])
def test_any_value_of_a_wrong_type_is_a_table_error(tmp_path, key, value):
    path = tmp_path / "kernels.toml"
    path.write_text(TABLE)
    data = read_toml(path)
    if key == "version" and value == 1:
        return
    data[key] = value
    with pytest.raises(TableError):
        parse_table(data)


# --- the matrix --------------------------------------------------------------------------------------------------


def test_matrix_wheel_is_a_kernel_set_and_a_host_library(tmp_path):
    matrix = matrix_of(MATRIX, tmp_path)
    wheel = matrix.wheels["default"]
    assert wheel.kernel_set.pin == "nvidia-cuda-nvrtc-cu12==12.9.86"
    assert wheel.kernel_set is matrix.default_kernel_set
    assert wheel.host_library.platform == "manylinux_2_28_x86_64"
    assert [str(arch) for arch in wheel.kernel_set.archs] == ["80", "90", "ptx80"]


BAD_MATRICES = {
    "unknown-section": ("[wheels.default]", "[wheel.default]", 'unknown key "wheel"[\\s\\S]*did you mean "wheels"'),
    "version": ("version = 1", "version = 0", "version = 0"),
    "kernel-set-key": ("requirement =", "requirements =", 'kernel_sets.cu12: unknown key "requirements"'),
    "kernel-set-version": ('"12.9.86"', '"12.9.*"', '"12.9.\\*" is not a version'),
    "kernel-set-arch": ('archs = ["80"', 'archs = ["800"', "'800'"),
    "kernel-set-archs-none": ('archs = ["80", "90", "ptx80"]', "archs = []", "archs is empty"),
    "kernel-set-name": ("[kernel_sets.cu12]", '[kernel_sets."CU 12"]', "lower-case letters"),
    "host-abi": ('abi = "stable"', 'abi = "stabel"', "'stabel'[\\s\\S]*did you mean \"stable\""),
    "host-torch": ('torch = ">=2.10"', 'torch = "2.10"', '"2.10" is not understood'),
    "host-machine": ('machine = "x86_64"', 'machine = "x86-64"', "'x86-64'[\\s\\S]*did you mean \"x86_64\""),
    "host-platform": ('"manylinux_2_28_x86_64"', '"manylinux_2_28_aarch64"', "did you mean \"manylinux_2_28_x86_64\""),
    "host-cxx11-abi": ("cxx11_abi = true", 'cxx11_abi = "yes"', "'yes' is not true or false"),
    "host-per-torch": ('abi = "stable"', 'abi = "torch"', 'torch = ">=2.10" is no single torch'),
    "host-headers-needless": ("cxx11_abi = true", 'cxx11_abi = true\nheaders = "2.10.0"', "does not fit torch >=2.10"),
    "host-headers-missing": ('abi = "stable"\ntorch = ">=2.10"', 'abi = "torch"\ntorch = "==2.6.*"', 'headers = ""'),
    "budget-key": ("wheel_kib", "wheel_kb", 'unknown key "wheel_kb"[\\s\\S]*did you mean "wheel_kib"'),
    "budget-none": ("wheel_kib = 40000", "wheel_kib = 0", "0 is not positive"),
    "wheel-kernel-set": ('kernel_set = "cu12"', 'kernel_set = "cu21"', "'cu21'[\\s\\S]*did you mean \"cu12\""),
    "wheel-host": ('host_library = "stable-x86_64"', 'host_library = "stable"', "choose from stable-x86_64"),
    "wheel-key-missing": ('host_library = "stable-x86_64"', "", 'key "host_library" is missing'),
    "wheels-none": ('[wheels.default]\nkernel_set = "cu12"\nhost_library = "stable-x86_64"', "[wheels]", "is empty"),
    "tool-gxx": ('minimum_gxx = "9"', "minimum_gxx = 9", "9 is not a string"),
    "tool-peak": ("job_peak_mib = 400", "job_peak_mib = 0", "0 is not positive"),
    "image-tag": (
        "[images]", '[images.manylinux_2_28_x86_64]\nimage = "quay.io/x:latest"\npython = "cp312"', "names no digest",
    ),
    "image-platform": ("[images]", "[images.manylinux_2_17_x86_64]", "manylinux_2_17_x86_64"),
    "requirements-key": ('tools = ["pytest"]', 'tool = ["pytest"]', 'unknown key "tool"[\\s\\S]*did you mean "tools"'),
}  # fmt: skip


@pytest.mark.parametrize("defect", BAD_MATRICES)
def test_invalid_matrix(tmp_path, defect):
    old, new, message = BAD_MATRICES[defect]
    assert old in MATRIX
    with pytest.raises(TableError, match=message) as caught:
        matrix_of(MATRIX.replace(old, new, 1), tmp_path)
    assert str(caught.value).startswith("matrix.toml")


def test_matrix_archs_are_checked_without_a_table_too(tmp_path):
    path = tmp_path / "matrix.toml"
    path.write_text(MATRIX.replace('archs = ["80"', 'archs = ["eighty"'))
    with pytest.raises(TableError, match='"eighty" names no GPU architecture'):
        parse_matrix(read_toml(path))
