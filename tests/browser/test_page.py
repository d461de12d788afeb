"""The page for people in a real browser: what is picked, the command, keyboard, phone, dark, and no scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_support import MATRIX, VERSION
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.ui import WebDriverWait

from buildtools.manifest import read_manifest

pytestmark = pytest.mark.browser


@pytest.fixture(autouse=True)
def _as_it_was(browser: WebDriver) -> Iterator[None]:
    """Each test begins with an empty page and a desktop's window."""
    browser.get("about:blank")
    yield
    for command in ("Emulation.clearDeviceMetricsOverride", "Emulation.setEmulatedMedia"):
        browser.execute_cdp_cmd(command, {})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def pick(browser: WebDriver, **wanted: str) -> None:
    for name, value in wanted.items():
        Select(browser.find_element(By.NAME, name)).select_by_value(value)


def answer(browser: WebDriver) -> str:
    return browser.find_element(By.ID, "answer").text


def command(browser: WebDriver) -> str:
    return browser.find_element(By.ID, "command").text


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ({}, "stable"),
        ({"torch": "2.9"}, "torch2.9.cxx11abi1"),
        ({"torch": "2.6", "python": "3.10", "gpu": "8.0"}, "torch2.6.cxx11abi0"),
        ({"torch": "2.4", "gpu": "none"}, "torch2.4.cxx11abi0"),
        ({"python": "3.15+", "gpu": "12.1"}, "stable"),
        ({"gpu": "11.0"}, "cu13"),
    ],
)
def test_what_is_picked_gives_command_wheel_and_hash(
    browser: WebDriver, url: str, index: Path, wanted: dict[str, str], kind: str
) -> None:
    browser.get(url)
    pick(browser, **wanted)
    kernel_set = MATRIX.kernel_sets.get(kind, MATRIX.default_kernel_set)
    compiler = f"nvrtc {kernel_set.version}"
    (wheel,) = [wheel for wheel in read_manifest(index / "wheels.json").wheels if wheel.kind == kind]
    assert command(browser) == f"pip install flash-attn=={VERSION} --index-url {url}{kind}/"
    for text in (wheel.filename, wheel.sha256, "sm_90", "d128", compiler, "MB"):
        assert text in answer(browser)
    link = browser.find_element(By.CSS_SELECTOR, "#answer a").get_attribute("href")
    assert link == f"{url}{kind}/flash-attn/{wheel.filename}#sha256={wheel.sha256}"


def test_the_command_installs_that_wheel(browser: WebDriver, url: str, index: Path, tmp_path: Path) -> None:
    browser.get(url)
    pick(browser, torch="2.6")
    words = command(browser).split()
    arguments = ["download", *words[2:], "--no-deps", "--isolated", "--only-binary=:all:", "--no-cache-dir"]
    arguments += ["--platform=manylinux_2_28_x86_64", "--python-version=3.12", f"--dest={tmp_path}"]
    environ = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env=environ, timeout=120)
    (got,) = tmp_path.iterdir()
    assert got.name in answer(browser)
    assert got.read_bytes() == next(index.glob(f"*/flash-attn/{got.name}")).read_bytes()


def test_copy(browser: WebDriver, url: str) -> None:
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, (error) => done(`${error}`))"
    allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": url}
    browser.execute_cdp_cmd("Browser.grantPermissions", allowed)
    browser.get(url)
    pick(browser, torch="2.9")
    button = browser.find_element(By.TAG_NAME, "button")
    button.click()
    WebDriverWait(browser, 10).until(lambda _: button.text != "Copy")
    assert button.text == "Copied"
    assert browser.execute_async_script(read) == command(browser)


def test_where_nothing_may_be_copied_the_command_is_selected(browser: WebDriver, url: str) -> None:
    browser.get(url)
    browser.execute_script("navigator.clipboard.writeText = () => Promise.reject(new Error('no'))")
    button = browser.find_element(By.TAG_NAME, "button")
    button.click()
    WebDriverWait(browser, 10).until(lambda _: button.text == "Selected")
    assert browser.execute_script("return `${getSelection()}`").strip() == command(browser)


def test_torch_comes_first_where_there_is_none(browser: WebDriver, url: str) -> None:
    browser.get(url)
    pick(browser, torch="none")
    assert command(browser).splitlines() == [
        "pip install torch", f"pip install flash-attn=={VERSION} --index-url {url}stable/"
    ]  # fmt: skip


def test_none_and_why(browser: WebDriver, url: str) -> None:
    browser.get(url)
    pick(browser, system="windows", gpu="7.0")
    for text in ("None, because", "it is for Linux, this is win32", "no kernel for compute capability 7.0", "WSL 2"):
        assert text in answer(browser)
    assert "pip install" not in answer(browser)
    pick(browser, system="linux-aarch64", gpu="9.0")
    assert "it is for x86_64, this machine is aarch64" in answer(browser)
    assert command(browser) == f"pip install {url}stable/flash-attn/flash_attn-{VERSION}.tar.gz"


def test_the_address_holds_the_choice(browser: WebDriver, url: str) -> None:
    browser.get(url)
    pick(browser, torch="2.8", system="linux-aarch64")
    address = browser.current_url
    browser.get("about:blank")
    browser.get(address)
    assert Select(browser.find_element(By.NAME, "torch")).first_selected_option.text == "2.8"
    assert "aarch64" in answer(browser)
    browser.get(f"{url}#torch=nonsense&gpu=8.0")
    assert Select(browser.find_element(By.NAME, "gpu")).first_selected_option.text.startswith("8.0")


def test_by_keyboard_alone(browser: WebDriver, url: str) -> None:
    browser.get(url)
    seen = []
    for _ in range(6):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        active = browser.switch_to.active_element
        seen.append(active.get_attribute("name") or active.text)
        assert active.value_of_css_property("outline-style") == "solid", seen
        if seen[-1] == "torch":
            active.send_keys("2.7")
    assert seen[1:] == ["torch", "python", "system", "gpu", "Copy"]
    assert "torch2.7.cxx11abi1" in command(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser: WebDriver, url: str, scheme: str) -> None:
    """Every text has the contrast to what is behind it that WCAG AA asks for."""
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    script = (Path(__file__).parent / "contrast.js").read_text()
    for torch in ("2.9", "3.0+"):
        browser.get(url)
        pick(browser, torch=torch)
        checked, low = browser.execute_script(script)
        assert checked > 100
        assert not low


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_no_width_has_to_be_scrolled_sideways(browser: WebDriver, url: str, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(url)
    for torch in ("2.6", "2.6-abi1"):
        pick(browser, torch=torch)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    if width < 500:
        heights = browser.execute_script(
            "return [...document.querySelectorAll('select, button')].map(e => e.offsetHeight)"
        )
        assert min(heights) >= 44  # a finger's


def test_without_scripts(browser: WebDriver, url: str, index: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.get(url)
    assert not browser.find_element(By.ID, "chooser").is_displayed()
    text = browser.find_element(By.TAG_NAME, "body").text
    for wheel in read_manifest(index / "wheels.json").wheels:
        assert wheel.filename in text
        assert wheel.sha256 in text
        assert f"--index-url INDEX/{wheel.kind}/" in text
    assert "INDEX/ is the address of this page" in text
    assert "it is for x86_64, this machine is aarch64" in text


def test_nothing_else_is_loaded_and_nothing_is_complained_about(browser: WebDriver, url: str) -> None:
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(url)
    pick(browser, torch="2.9", gpu="7.5")
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [item["params"]["request"]["url"] for item in messages if item["method"] == "Network.requestWillBeSent"]
    assert [address for address in sent if not address.startswith("data:")] == [url]
    assert browser.get_log("browser") == []


def test_from_a_folder(browser: WebDriver, index: Path) -> None:
    browser.get((index / "index.html").as_uri())
    pick(browser, torch="2.5")
    assert command(browser).endswith(f"--index-url {index.as_uri()}/torch2.5.cxx11abi0/")
