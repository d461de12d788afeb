"""Environment variables and the names of archs: every accepted form, and what is said of the others."""

from __future__ import annotations

import itertools

import pytest
from buildtools_support import TABLE, clean_environ

from buildtools import archs as arch_names
from buildtools.archs import Arch, format_archs, native_archs, parse_arch, parse_archs
from buildtools.build import Compiler, choose_archs
from buildtools.errors import ArchError, VariableError
from buildtools.kernels import load_table
from buildtools.matrix import KernelSet
from buildtools.variables import read_variables
from buildtools.wheel import DEFAULT_EPOCH, source_date_epoch

BOOLEANS = {
    "FORCE_BUILD": "force_build",
    "FLASH_ATTENTION_FORCE_BUILD": "force_build",
    "SKIP_CUDA_BUILD": "skip_cuda_build",
    "FLASH_ATTENTION_SKIP_CUDA_BUILD": "skip_cuda_build",
    "FORCE_CXX11_ABI": "force_cxx11_abi",
    "FLASH_ATTENTION_FORCE_CXX11_ABI": "force_cxx11_abi",
    "FLASH_ATTN_NO_BUILD": "no_build",
}


@pytest.mark.parametrize("variable", BOOLEANS)
@pytest.mark.parametrize(
    ("text", "value"),
    [(text, True) for text in ("1", "true", "TRUE", "True", "yes", "YES", "on", " on ")]
    + [(text, False) for text in ("0", "false", "FALSE", "no", "No", "off")],
)
def test_boolean(variable, text, value):
    assert getattr(read_variables({variable: text}), BOOLEANS[variable]) is value


@pytest.mark.parametrize("variable", BOOLEANS)
@pytest.mark.parametrize("text", ["maybe", "2", "y", "-1", "truee", "\uff11"])
def test_boolean_that_is_none(variable, text):
    with pytest.raises(VariableError, match=rf"{variable}={text} is neither true nor false[\s\S]*1, true, yes, on"):
        read_variables({variable: text})


def test_nothing_set_and_empty_are_the_same():
    names = [
        "FORCE_BUILD",
        "MAX_JOBS",
        "FLASH_ATTN_CUDA_ARCHS",
        "FLASH_ATTN_HEAD_DIMS",
        "FLASH_ATTN_LOCAL_VERSION",
        "CXX",
    ]
    assert read_variables(dict.fromkeys(names, "")) == read_variables({})


def test_two_names_of_one_variable_may_agree_but_not_contradict():
    assert read_variables({"FORCE_BUILD": "1", "FLASH_ATTENTION_FORCE_BUILD": "yes"}).force_build
    with pytest.raises(VariableError, match="FORCE_BUILD=1 and FLASH_ATTENTION_FORCE_BUILD=0 contradict"):
        read_variables({"FORCE_BUILD": "1", "FLASH_ATTENTION_FORCE_BUILD": "0"})


@pytest.mark.parametrize("text", ["64,128", "64;128", "64 128", " 64, 128,", "64,64,128"])
def test_head_dims(text):
    assert read_variables({"FLASH_ATTN_HEAD_DIMS": text}).head_dims == (64, 128)


@pytest.mark.parametrize("text", ["d64", "64,x", "-64", "0", "6.4", "\u0666\u0664"])
def test_head_dims_that_are_none(text):
    with pytest.raises(VariableError, match="FLASH_ATTN_HEAD_DIMS"):
        read_variables({"FLASH_ATTN_HEAD_DIMS": text})


@pytest.mark.parametrize("text", [",", " ; "])
def test_list_that_names_nothing(text):
    with pytest.raises(VariableError, match="names nothing"):
        read_variables({"FLASH_ATTN_KERNELS": text})


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_max_jobs_that_is_none(text):
    with pytest.raises(VariableError, match=f"MAX_JOBS={text}"):
        read_variables({"MAX_JOBS": text})


@pytest.mark.parametrize(
    ("text", "label"), [("cu12", "cu12"), ("+CU12_Torch-2.6", "cu12.torch.2.6"), ("007", "7"), ("", None)]
)
def test_local_version(text, label):
    assert read_variables({"FLASH_ATTN_LOCAL_VERSION": text}).local_version == label


@pytest.mark.parametrize("text", ["cu12..1", "-cu12", "cu 12", "é", "a/b"])
def test_local_version_that_is_none(text):
    with pytest.raises(VariableError, match="no local version label"):
        read_variables({"FLASH_ATTN_LOCAL_VERSION": text})


def test_variables_without_effect_are_noted():
    notes = read_variables({"NVCC_THREADS": "4", "FLASH_ATTN_CUDA_ARCH": "80"}).notes
    assert "NVCC_THREADS has no effect" in notes[1]
    assert 'did you mean "FLASH_ATTN_CUDA_ARCHS"?' in notes[0]
    assert (
        read_variables({"FLASH_ATTN_JIT": "0", "FLASH_ATTN_TEST_TORCH": "torch", "FLASH_ATTN_ENGINE": "x"}).notes == ()
    )


@pytest.mark.parametrize(("text", "epoch"), [("", DEFAULT_EPOCH), ("1700000000", 1700000000), ("0", 315532800)])
def test_source_date_epoch(text, epoch):
    assert source_date_epoch({"SOURCE_DATE_EPOCH": text}) == epoch


@pytest.mark.parametrize("text", ["now", "-1", "1e9"])
def test_source_date_epoch_that_is_none(text):
    with pytest.raises(VariableError, match="SOURCE_DATE_EPOCH"):
        source_date_epoch({"SOURCE_DATE_EPOCH": text})


# --- archs -------------------------------------------------------------------------------------------------------


def parse(text: str, variable: str = "FLASH_ATTN_CUDA_ARCHS") -> str:
    archs = parse_archs(text, variable=variable, all_archs=[Arch(80), Arch(90)], native=lambda: [Arch(89)])
    return format_archs(archs)


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("80;90", "80;90"),
        ("8.0,9.0a", "80;90a"),
        ("90a", "90a"),
        ("9.0 8.0", "90;80"),
        ("9.0+PTX", "90;ptx90"),
        ("80;90+ptx", "80;90;ptx90"),
        ("sm_90a", "90a"),
        ("compute_80", "ptx80"),
        ("ptx80", "ptx80"),
        ("10.0;12.0", "100;120"),
        ("100,120", "100;120"),
        ("80;8.0;80", "80"),
        ("all", "80;90"),
        ("ALL;ptx80", "80;90;ptx80"),
        ("native", "89"),
        ("Ampere;Hopper", "80;86;90"),
        ("Ada+PTX", "89;ptx89"),
    ],
)
def test_archs(text, archs):
    assert parse(text) == archs


@pytest.mark.parametrize(
    "text",
    [
        "junk",
        "8",
        "8.0.0",
        "90b",
        "9.0+SASS",
        "sm90x",
        "-80",
        "80:90",
        "ptx90a",
        "",
        " ; ",
        "1000",
        "\u0668\u0660",
        "8.0a+",
        "+PTX",
    ],
)
def test_archs_that_are_none(text):
    with pytest.raises(ArchError) as caught:
        parse(text)
    message = str(caught.value)
    assert "FLASH_ATTN_CUDA_ARCHS=" in message
    for form in ("`80;90`", "`8.0,9.0a`", "`90a`", "`native`", "`all`"):
        assert form in message


def test_format_is_the_inverse_of_parse():
    for number, suffix, ptx in itertools.product((75, 80, 89, 90, 100, 121), ("", "a"), (False, True)):
        if not (suffix and ptx):
            arch = Arch(number, suffix, ptx)
            assert parse_arch(str(arch)) == arch
            assert parse(format_archs([arch, Arch(80)])) == format_archs(dict.fromkeys([arch, Arch(80)]))


@pytest.mark.parametrize(("arch", "option"), [("90", "sm_90"), ("90a", "sm_90a"), ("ptx80", "compute_80")])
def test_gpu_architecture(arch, option):
    assert parse_arch(arch).gpu_architecture == option


def test_native_without_a_driver_says_so(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(ArchError, match=r"no NVIDIA driver: libcuda.so.1[\s\S]*name the archs instead"):
        native_archs()


# --- the choice of archs -----------------------------------------------------------------------------------------


@pytest.fixture
def choose(tmp_path, monkeypatch):
    path = tmp_path / "kernels.toml"
    path.write_text(TABLE)
    table = load_table(path)
    kernel_set = KernelSet("cu12", "nvidia-cuda-nvrtc-cu12", "12.9.86", (Arch(80), Arch(90), Arch(80, ptx=True)))
    monkeypatch.setattr(arch_names, "native_archs", lambda: [Arch(89)])

    def run(supported=(75, 80, 86, 89, 90), **environ: str) -> tuple[str, list[str]]:
        notes: list[str] = []
        compiler = Compiler(tmp_path / "libnvrtc.so.12", "a test", "12.9.86", frozenset(supported))
        variables = read_variables(environ)
        chosen = choose_archs(table, list(table.rows), kernel_set, variables, compiler, notes)
        return format_archs(chosen["sm80"]), notes

    return run


def test_archs_of_the_kernel_set_by_default(choose):
    assert choose() == ("80;90;ptx80", [])


def test_archs_that_the_compiler_lacks_are_left_out_with_a_note(choose):
    chosen, notes = choose(supported=(75, 80))
    assert chosen == "80;ptx80"
    assert "cannot compile for 90" in notes[0]


@pytest.mark.parametrize(
    ("variable", "text", "chosen"),
    [
        ("FLASH_ATTN_CUDA_ARCHS", "86", "86"),
        ("FLASH_ATTN_CUDA_ARCHS", "90a", "90a"),
        ("FLASH_ATTN_CUDA_ARCHS", "native", "89"),
        ("FLASH_ATTN_CUDA_ARCHS", "all", "80;90;ptx80"),
        ("TORCH_CUDA_ARCH_LIST", "9.0", "90"),
        ("TORCH_CUDA_ARCH_LIST", "7.5 8.0 9.0+PTX", "80;90;ptx90"),
    ],
)
def test_archs_asked_for(choose, variable, text, chosen):
    assert choose(**{variable: text})[0] == chosen


def test_own_variable_goes_before_torchs(choose):
    assert choose(FLASH_ATTN_CUDA_ARCHS="80", TORCH_CUDA_ARCH_LIST="9.0")[0] == "80"


def test_archs_too_old_are_an_error_where_they_were_meant_and_a_note_where_not(choose):
    with pytest.raises(ArchError, match=r"FLASH_ATTN_CUDA_ARCHS=7.5;8.0: no kernel can be built for 75[\s\S]*8.0"):
        choose(FLASH_ATTN_CUDA_ARCHS="7.5;8.0")
    assert "75 is below 80 and left out" in choose(TORCH_CUDA_ARCH_LIST="7.5;8.0")[1][0]
    with pytest.raises(ArchError, match=r"TORCH_CUDA_ARCH_LIST=7\.5: no kernel can be built for 75"):
        choose(TORCH_CUDA_ARCH_LIST="7.5")


def test_arch_that_the_compiler_cannot_name(choose):
    with pytest.raises(ArchError, match=r"nvrtc 12.9.86 of a test cannot compile for 90[\s\S]*it knows 80, 86"):
        choose(supported=(75, 80, 86), FLASH_ATTN_CUDA_ARCHS="90")


def test_arch_that_is_not_in_the_table(choose):
    with pytest.raises(ArchError, match='"88" is not in the kernel table'):
        choose(FLASH_ATTN_CUDA_ARCHS="88")


def test_clean_environ_steers_nothing():
    assert read_variables(clean_environ()) == read_variables({})
