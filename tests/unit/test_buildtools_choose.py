"""The choice of a published wheel: pure, from facts and a manifest. Field cases 9 and 16."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from buildtools.choose import Facts, PublishedWheel, TorchVersion, Variant, choose, known_cxx11_abi, parse_facts
from buildtools.errors import FactError, ManifestError
from buildtools.manifest import Manifest, parse_manifest

HERE = Facts("linux", "x86_64", (3, 11), ("glibc", 2, 36), "2.13.0+cu130", True, "580.95", (13, 0), (90,))
ARCHS = "80.86.90.100.120.ptx80"


def published(torch: str, platform: str = "manylinux_2_28_x86_64", compiler: str = "12.9.86", archs: str = ARCHS):
    """A wheel whose variant begins with `torch`, such as torch2.6-cxx11abi0."""
    variant = Variant.parse(f"{torch}-nvrtc{compiler}-{archs}-{platform}-py3.10")
    labels = [] if compiler.startswith("12") else [f"cu{compiler.split('.')[0]}"]
    if variant.cxx11_abi is not None:
        labels.append(torch.replace("-", "."))
    version = "+".join(filter(None, ("2.9.0", ".".join(labels))))
    return PublishedWheel(f"flash_attn-{version}-py3-none-{platform}.whl", "0" * 64, 1000, variant)


STABLE = published("torch2.10+-stable")
WHEELS = [
    STABLE,
    *(published(f"torch2.{minor}-cxx11abi0") for minor in (4, 5, 6)),
    *(published(f"torch2.{minor}-cxx11abi1") for minor in (6, 7, 8, 9)),
]


def chosen(facts: Facts, wheels=WHEELS) -> str | None:
    """The beginning of the variant that is chosen."""
    decision = choose(facts, wheels)
    assert len(decision.rejected) + bool(decision.wheel) == len(wheels)
    assert all(rejection.reasons for rejection in decision.rejected)
    assert choose(facts, wheels[::-1]) == decision
    return str(decision.wheel.variant).partition("-nvrtc")[0] if decision.wheel else None


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.kind)
def test_parse_and_str_of_a_variant_are_inverses(wheel: PublishedWheel) -> None:
    assert Variant.parse(str(wheel.variant)) == wheel.variant
    assert str(Variant.parse(str(wheel.variant))) == str(wheel.variant)


@pytest.mark.parametrize(
    "text", ["", "torch2.6", "torch2.6-stable-nvrtc12.9-80-any-py3.10", "torch2.6+-cxx11abi0-nvrtc12.9-80-any-py3.10"]
)
def test_what_is_no_variant_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match="is no variant of a wheel"):
        Variant.parse(text)


@pytest.mark.parametrize(
    ("torch", "abi", "expected"),
    [
        ("2.10.0", True, "torch2.10+-stable"),
        ("2.13.0+cu130", True, "torch2.10+-stable"),
        ("2.99.1+rocm7.0", True, "torch2.10+-stable"),
        ("2.12.0a0+gitdeadbee", True, "torch2.10+-stable"),  # the ABI is frozen, for builds from git too
        ("2.10.0a0+b4e4ee8", True, None),  # before 2.10
        ("2.10.0rc1", True, None),
        ("2.10.0.dev20260101+cu128", True, None),
        ("2.6.0+cu124", False, "torch2.6-cxx11abi0"),
        ("2.6.0+cu126", True, "torch2.6-cxx11abi1"),
        ("2.6.1", False, "torch2.6-cxx11abi0"),
        ("2.6", False, "torch2.6-cxx11abi0"),
        ("2.6.0+cpu.cxx11.abi", True, "torch2.6-cxx11abi1"),
        ("2.6.0", None, None),
        ("2.6.0a0+git1234567", False, None),
        ("2.6.0+git1234567", False, None),
        ("2.6.0+b465a5843b.nv24.09", False, None),
        ("2.6.0rc3", False, None),
        ("2.7.0.dev20250101", True, None),
        ("2.5.1", True, None),
        ("2.3.1", False, None),
        ("1.13.1", False, None),
        ("3.0.0", True, None),
        ("3.10.0+cu140", True, None),
        ("unknown", True, None),
        (None, None, "torch2.10+-stable"),
    ],
)
def test_torch(torch: str | None, abi: bool | None, expected: str | None) -> None:
    """Case 9, and the rule that what is not known is a miss."""
    assert chosen(replace(HERE, torch=torch, cxx11_abi=abi)) == expected


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"machine": "aarch64"}, "it is for x86_64, this machine is aarch64"),
        ({"system": "win32", "machine": "AMD64", "libc": None}, "it is for Linux, this is win32"),
        ({"system": "darwin", "machine": "arm64", "libc": None}, "it is for Linux, this is darwin"),
        ({"libc": ("glibc", 2, 17)}, "it needs glibc 2.28 or newer, found glibc 2.17"),
        ({"libc": ("musl", 1, 2)}, "it needs glibc 2.28 or newer, found musl 1.2"),
        ({"python": (3, 9)}, "it needs Python 3.10 or newer, found 3.9"),
        ({"torch": "3.0.0"}, "torch 3 is newer than what it was made for (torch 2)"),
        ({"cuda": (11, 8)}, "need a driver for CUDA 12 or newer (525.60.13 or newer), driver 580.95 serves CUDA 11.8"),
        ({"gpus": (75,)}, f"it has no kernel for compute capability 7.5 (it has {ARCHS.replace('.', ' ')})"),
    ],
)
def test_a_reason_for_each_thing_that_does_not_fit(facts: dict, reason: str) -> None:
    """Case 16: other machines get an answer, and it says why."""
    decision = choose(replace(HERE, **facts), [STABLE])
    assert decision.wheel is None
    (rejection,) = decision.rejected
    assert len(rejection.reasons) == 1
    assert reason in rejection.reasons[0]
    assert reason in decision.text()
    assert str(decision.facts) in decision.text()


@pytest.mark.parametrize("python", [(3, 10), (3, 15), (4, 0)])
def test_every_newer_python_is_served(python: tuple[int, int]) -> None:
    assert chosen(replace(HERE, python=python), [STABLE]) == "torch2.10+-stable"


@pytest.mark.parametrize(
    ("gpus", "cuda", "fits"),
    [
        ((), None, True),  # a login node
        ((89,), (12, 0), True),  # machine code of 8.6
        ((103,), (12, 9), True),
        ((75, 90), (12, 4), True),  # one of two can be used
        ((110,), (13, 0), True),  # by PTX
        ((110,), (12, 8), False),  # which this driver is too old for
        ((110,), None, True),
    ],
)
def test_gpus(gpus: tuple[int, ...], cuda: tuple[int, int] | None, fits: bool) -> None:
    assert bool(choose(replace(HERE, gpus=gpus, cuda=cuda), [STABLE]).wheel) == fits


def test_the_kernel_set_with_machine_code_for_the_gpu_is_preferred() -> None:
    cu13 = published("torch2.10+-stable", compiler="13.5.20", archs="80.90.110.ptx80")
    wheels = [cu13, STABLE]
    assert choose(HERE, wheels).wheel is STABLE  # both have 90, and this one runs on older drivers
    decision = choose(replace(HERE, gpus=(110,), cuda=(13, 5)), wheels)
    assert decision.wheel is cu13
    assert "has machine code for more of the GPUs" in decision.text()
    decision = choose(replace(HERE, gpus=(110,), cuda=(12, 9)), wheels)
    assert decision.wheel is STABLE
    assert "need a driver for CUDA 13 or newer (580.65.06 or newer), driver" in decision.text()


@pytest.mark.parametrize(("driver", "fits"), [("570.124.06", False), ("580.65.06", True), (None, True)])
def test_machine_code_of_cuda_13_needs_a_driver_of_580(driver: str | None, fits: bool) -> None:
    """Also where the driver tells its own version alone, as in /proc, and not the CUDA that it serves."""
    cu13 = published("torch2.10+-stable", compiler="13.5.20", archs="80.90.110.ptx80")
    decision = choose(replace(HERE, cuda=None, driver=driver), [cu13])
    assert bool(decision.wheel) == fits
    assert fits or f"(580.65.06 or newer), found driver {driver}" in decision.text()


def test_arch_specific_code_is_for_that_arch_alone() -> None:
    special = published("torch2.10+-stable", archs="90a")
    assert choose(replace(HERE, gpus=(90,)), [special]).wheel
    assert choose(replace(HERE, gpus=(100,)), [special]).wheel is None


def test_the_trace_has_the_nearest_first() -> None:
    """Case 5: the key, and the nearest wheels with a reason each."""
    decision = choose(replace(HERE, torch="2.5.1+cu124", cxx11_abi=True), WHEELS)
    assert decision.wheel is None
    first = decision.rejected[0]
    assert first.wheel.kind == "torch2.5.cxx11abi0"
    assert first.reasons == ("it is for _GLIBCXX_USE_CXX11_ABI=0, this torch has 1",)
    lines = decision.text().splitlines()
    assert lines[0].endswith("torch2.5.1+cu124-cxx11abi1-linux_x86_64-glibc2.36-py3.11-cuda13.0-gpu90")
    assert lines[1] == "  none of the 8 published wheels fits"
    assert lines[2].startswith(
        "  not flash_attn-2.9.0+torch2.5.cxx11abi0-py3-none-manylinux_2_28_x86_64.whl: it is for _GLIB"
    )
    assert lines[-1] == "  and 5 more, further off"
    assert json.loads(json.dumps(decision.as_json()))["rejected"][0]["reasons"] == list(first.reasons)


def test_nothing_published_is_a_miss() -> None:
    assert "none of the 0 published wheels fits" in choose(HERE, []).text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.13.0+cpu", ((2, 13, 0), False, "cpu")),
        ("2.4.0a0+07cecf4168.nv24.05", ((2, 4, 0), True, "07cecf4168.nv24.05")),
        ("2.9.0.post1", ((2, 9, 0), False, "")),
        ("2.7.0.dev20250101+cu126", ((2, 7, 0), True, "cu126")),
    ],
)
def test_versions_of_torch(text: str, expected: tuple) -> None:
    version = TorchVersion.parse(text)
    assert version is not None
    assert (version.release, version.pre, version.local) == expected


@pytest.mark.parametrize(
    ("torch", "abi"),
    [("2.4.1", False), ("2.6.0+cu124", False), ("2.6.0+cu126", True), ("2.6.0+cpu.cxx11.abi", True), ("2.7.0", True)],
)
def test_the_abi_of_releases_is_known(torch: str, abi: bool) -> None:
    assert known_cxx11_abi(torch) is abi
    assert known_cxx11_abi(f"{torch.partition('+')[0]}+git1234567") is None


def test_facts_of_another_machine() -> None:
    facts = parse_facts("torch=2.6,abi=0,platform=manylinux_2_28_x86_64,python=3.12,driver=12.4,gpu=8.0+90", HERE)
    assert facts == Facts("linux", "x86_64", (3, 12), ("glibc", 2, 28), "2.6", False, None, (12, 4), (80, 90))
    assert chosen(facts) == "torch2.6-cxx11abi0"
    assert parse_facts("torch=2.6", HERE).cxx11_abi is False  # of the release
    assert parse_facts("platform=win_amd64", HERE).libc is None
    assert parse_facts("platform=macosx_14_0_arm64", HERE).machine == "arm64"
    assert parse_facts("platform=musllinux_1_2_x86_64", HERE).libc == ("musl", 1, 2)
    assert parse_facts("", HERE) == replace(HERE, torch=None, cxx11_abi=None, driver=None, cuda=None, gpus=())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torhc=2.6", 'did you mean "torch"'),
        ("torch", "says nothing"),
        ("torch=new", "such as torch=2.6"),
        ("abi=2", "abi=0 or abi=1"),
        ("platform=amiga", "such as platform=manylinux_2_28_x86_64"),
        ("python=three", "such as python=3.12"),
        ("gpu=fast", "such as gpu=90"),
    ],
)
def test_facts_that_cannot_be_understood(text: str, message: str) -> None:
    with pytest.raises(FactError, match=message):
        parse_facts(text, HERE)


# --- the manifest --------------------------------------------------------------------------------------------------


def test_a_manifest_is_read_back_and_its_text_does_not_depend_on_order() -> None:
    first = Manifest("2.9.0", tuple(WHEELS), ("https://index.example/",)).text()
    assert first == Manifest("2.9.0", tuple(reversed(WHEELS)), ("https://index.example/",)).text()
    again = parse_manifest(first.encode(), "wheels.json")
    assert sorted(map(str, again.wheels)) == sorted(map(str, WHEELS))
    assert again.text() == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=2), "is of format 2"),
        (lambda data: data.pop("wheels"), "is damaged: 'wheels'"),
        (lambda data: data.update(version="2.8.0"), "is not of version 2.8.0"),
        (lambda data: data["wheels"].append(data["wheels"][0]), "listed twice"),
        (lambda data: data["wheels"][0].pop("sha256"), "lacks sha256"),
        (lambda data: data["wheels"][0].update(sha256="abc"), "has no sha256"),
        (lambda data: data["wheels"][0].update(size=-1), "has no size"),
        (lambda data: data["wheels"][0].update(filename="../evil.whl"), "is no file name of a wheel"),
        (lambda data: data["wheels"][0].update(platform="win_amd64"), "is no file name of a wheel"),
        (lambda data: data["wheels"][0].update(torch="==2.6"), "is no host library"),
        (lambda data: data["wheels"][0].update(abi="cxx11abi7"), "is no host library"),
        (lambda data: data["wheels"][0]["kernel_set"].update(archs=["fast"]), "names no GPU architecture"),
    ],
)
def test_a_damaged_manifest_is_refused(change, message: str) -> None:
    data = json.loads(Manifest("2.9.0", (STABLE,)).text())
    change(data)
    with pytest.raises(ManifestError, match=message):
        parse_manifest(json.dumps(data).encode(), "wheels.json")
    with pytest.raises(ManifestError, match="is damaged"):
        parse_manifest(b"<html>", "wheels.json")
