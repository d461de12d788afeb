"""What the page for people asks, and every answer: `choose` for each combination of what can be picked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .choose import Facts, PublishedWheel, Variant, choose, known_cxx11_abi
from .matrix import Matrix

# What people call the GPUs, and their compute capability as 10 * major + minor.
_GPUS = (
    (90, "H100, H200, GH200"), (100, "B200, GB200"), (103, "B300, GB300"), (120, "RTX 50xx, RTX PRO 6000"),
    (121, "GB10 (DGX Spark)"), (110, "Thor"), (89, "RTX 40xx, L4, L40S"), (86, "RTX 30xx, A10, A40"),
    (87, "Jetson Orin"), (80, "A100, A30"), (75, "T4, RTX 20xx"), (70, "V100"),
)  # fmt: skip
# Value, label, (sys.platform, machine, C library), advice.
_SYSTEMS = (
    ("linux-x86_64", "Linux x86-64", ("linux", "x86_64", ("glibc", 2, 28)), ""),
    ("linux-aarch64", "Linux aarch64 (Arm)", ("linux", "aarch64", ("glibc", 2, 28)), ""),
    ("linux-old", "Linux x86-64, glibc before 2.28 (CentOS 7)", ("linux", "x86_64", ("glibc", 2, 17)), ""),
    ("linux-musl", "Linux x86-64, musl (Alpine)", ("linux", "x86_64", ("musl", 1, 2)), ""),
    ("windows", "Windows", ("win32", "amd64", None), "in WSL 2, Windows runs the wheel for Linux"),
    ("macos", "macOS", ("darwin", "arm64", None), "there are no NVIDIA GPUs for macOS"),
)
_NEWEST_PYTHON = 14


@dataclass(frozen=True)
class Option:
    """One thing to pick. `facts`: what it says of the machine; `before`: a command to run first; `hint`: advice."""

    value: str
    label: str
    facts: dict[str, Any]
    before: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Question:
    """`start` is the number of the option that is picked to begin with."""

    name: str
    label: str
    noun: str
    options: tuple[Option, ...]
    start: int = 0


def questions(wheels: Sequence[PublishedWheel]) -> tuple[Question, ...]:
    """What is asked: the wheels, there or planned, decide which versions are told apart."""
    single = {wheel.variant.torch for wheel in wheels if wheel.variant.cxx11_abi is not None}
    newest = max(single, default=(0, 0))
    stable = min((w.variant.torch for w in wheels if w.variant.cxx11_abi is None), default=(newest[0], newest[1] + 1))
    oldest, python = min({*single, stable}), min(wheel.variant.python for wheel in wheels)
    torch = [
        Option(f"{stable[0]}.{stable[1]}+", f"{stable[0]}.{stable[1]} or newer", {"torch": "{}.{}.0".format(*stable)}),
        Option("none", "not installed yet", {}, before="pip install torch"),
    ]
    for minor in range(stable[1] - 1, oldest[1] - 1, -1):
        version = f"{stable[0]}.{minor}"
        abi = known_cxx11_abi(f"{version}.0")
        torch.append(Option(version, version, {"torch": f"{version}.0", "cxx11_abi": abi}))
        if not abi:  # there are builds with the other one
            facts = {"torch": f"{version}.0", "cxx11_abi": True}
            torch.append(Option(f"{version}-abi1", f"{version}, C++11 ABI (NVIDIA's builds)", facts))
    before = f"{stable[0]}.{oldest[1] - 1}"
    torch.append(Option(f"{before}-", f"{before} or older", {"torch": f"{before}.0", "cxx11_abi": False}))
    torch.append(Option(f"{stable[0] + 1}.0+", f"{stable[0] + 1}.0 or newer", {"torch": f"{stable[0] + 1}.0.0"}))
    pythons = [Option(f"3.{n}", f"3.{n}", {"python": (3, n)}) for n in range(python[1], _NEWEST_PYTHON + 1)]
    after = f"3.{_NEWEST_PYTHON + 1}"
    pythons.append(Option(f"{after}+", f"{after} or newer", {"python": (3, _NEWEST_PYTHON + 1)}))
    pythons.append(Option(f"3.{python[1] - 1}-", f"3.{python[1] - 1} or older", {"python": (3, python[1] - 1)}))
    systems = [
        Option(value, label, {"system": system, "machine": machine, "libc": libc}, hint=hint)
        for value, label, (system, machine, libc), hint in _SYSTEMS
    ]
    gpus = [Option(f"{n // 10}.{n % 10}", f"{n // 10}.{n % 10} · {label}", {"gpus": (n,)}) for n, label in _GPUS]
    gpus.append(Option("none", "none (a slow reference on the CPU)", {}))
    return (
        Question("torch", "PyTorch", "PyTorch", tuple(torch)),
        Question("python", "Python", "Python", tuple(pythons), start=max(0, min(2, len(pythons) - 3))),
        Question("system", "Operating system", "operating system", tuple(systems)),
        Question("gpu", "GPU, by compute capability", "GPU", tuple(gpus)),
    )


@dataclass
class Choice:
    """Every answer, by the numbers of the options that are picked, one for each question."""

    asked: tuple[Question, ...]
    wheels: Sequence[PublishedWheel]
    planned: Sequence[PublishedWheel] = ()
    found: dict[tuple[int, ...], dict[str, Any]] = field(init=False, default_factory=dict)
    _same: dict[tuple[int, ...], tuple[int, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        picks = list(itertools.product(*(range(len(question.options)) for question in self.asked)))
        self._same = self._representatives(picks)
        decisions = {pick: choose(self.facts(pick), self.wheels) for pick in picks if self._same[pick] == pick}
        numbers = {wheel.filename: number for number, wheel in enumerate(self.wheels)}
        has_wheel = {pick for pick, decision in decisions.items() if decision.wheel}
        for pick, decision in decisions.items():
            if decision.wheel:
                self.found[pick] = {"wheel": numbers[decision.wheel.filename]}
                continue
            nearest = decision.rejected[0]
            self.found[pick] = {
                "nearest": nearest.wheel.filename,
                "reasons": list(nearest.reasons),
                "advice": self._advice(pick, has_wheel),
                "source": self._compiles(pick),
            }
        self.found = {pick: self.found[self._same[pick]] for pick in picks}

    def _representatives(self, picks: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Each pick, and the same with the first of the Pythons that every wheel is for: they have one answer."""
        place = next(place for place, question in enumerate(self.asked) if question.name == "python")
        newest = max(wheel.variant.python for wheel in (*self.wheels, *self.planned))
        good = [n for n, option in enumerate(self.asked[place].options) if option.facts["python"] >= newest]
        return {pick: (*pick[:place], good[0], *pick[place + 1 :]) if pick[place] in good else pick for pick in picks}

    def single_misses(self) -> list[tuple[Question, Option, dict[str, Any]]]:
        """What has no wheel where everything else is as it is to begin with."""
        misses = []
        for place, question in enumerate(self.asked):
            for number, option in enumerate(question.options):
                pick = [other.start for other in self.asked]
                pick[place] = number
                answer = self.found[tuple(pick)]
                if "wheel" not in answer:
                    misses.append((question, option, answer))
        return misses

    def facts(self, pick: Sequence[int]) -> Facts:
        facts = Facts(system="linux", machine="x86_64", python=(3, 12))
        for question, number in zip(self.asked, pick, strict=True):
            facts = replace(facts, **question.options[number].facts)
        return facts

    def _advice(self, pick: tuple[int, ...], has_wheel: set[tuple[int, ...]]) -> list[str]:
        """The single changes after which there is a wheel, or the row of the matrix that it would be."""
        picked = [question.options[number] for question, number in zip(self.asked, pick, strict=True)]
        advice = [option.hint for option in picked if option.hint]
        newest, single = (0, *pick[1:]), False
        for place, question in enumerate(self.asked):
            others = ((*pick[:place], number, *pick[place + 1 :]) for number in range(len(question.options)))
            options = [question.options[other[place]] for other in others if self._same[other] in has_wheel]
            labels = [option.label for option in options if option.value != "none"]
            if labels:
                single = True
                more = f", or {len(labels) - 3} more" if len(labels) > 3 else ""
                advice.append(f"there is a wheel for another {question.noun}: {'; '.join(labels[:3])}{more}")
        if self._same[newest] not in has_wheel and not self._compiles(pick) and self._compiles(newest):
            single = True
            advice.append(f"with PyTorch {self.asked[0].options[0].label}, it compiles from source there, without nvcc")
        row = choose(self.facts(pick), self.planned).wheel
        if row:
            advice.append(
                f"matrix.toml has the row {row.filename} for it, whose wheel is not on this index: in the source tree, "
                f"python -m buildtools wheel --row {row.filename} makes it"
            )
        elif not single and not self._compiles(pick):
            advice.append("no single change is enough: more than one of these has to be another")
        return advice

    def _compiles(self, pick: tuple[int, ...]) -> bool:
        """The sdist compiles there: it makes the stable wheel for the machine that it is built on.

        The C library has to be as new as a wheel's all the same: torch's own wheels need it too.
        """
        facts = self.facts(pick)
        local = []
        for wheel in self.wheels:
            policy = wheel.variant.platform.split("_")[:3]  # manylinux_2_28
            if wheel.variant.cxx11_abi is None:
                platform = "_".join((*policy, facts.machine))
                local.append(replace(wheel, variant=replace(wheel.variant, platform=platform)))
        return choose(facts, local).wheel is not None


def planned_wheels(matrix: Matrix, wheels: Sequence[PublishedWheel]) -> list[PublishedWheel]:
    """The rows of the matrix that the index has no wheel of, as wheels that are called like their rows."""
    planned = []
    for row in matrix.wheels.values() if wheels else ():
        host, kernels = row.host_library, row.kernel_set
        stable = host.per_torch is None
        variant = Variant(
            torch=host.per_torch or _pair(host.torch),
            cxx11_abi=None if stable else host.cxx11_abi,
            compiler=tuple(map(int, kernels.version.split("."))),
            archs=kernels.archs,
            platform=host.platform,
            python=wheels[0].variant.python,
        )
        key = (variant.torch, variant.cxx11_abi, variant.compiler, variant.platform)
        if key not in {(w.variant.torch, w.variant.cxx11_abi, w.variant.compiler, w.variant.platform) for w in wheels}:
            planned.append(PublishedWheel(row.name, "", 0, variant))
    return planned


def _pair(text: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)
