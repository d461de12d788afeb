"""A headless Chromium, driven by selenium. Both have to be there: these tests are run only when they are asked for."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "packaging")]

import pytest  # noqa: E402
from page_support import make_row_index  # noqa: E402
from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.remote.webdriver import WebDriver  # noqa: E402

from buildtools.index import serving  # noqa: E402

# Nothing but the page: no sandbox (root in a container has none), and no connection of the browser's own.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def _program(*names: str) -> str:
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.fail(f"no {' or '.join(names)} on PATH: `apt-get install chromium chromium-driver`", pytrace=False)
    return found


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    options = webdriver.ChromeOptions()
    options.binary_location = _program("chromium", "chromium-browser", "google-chrome")
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(_program("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an index of all x86-64 rows."""
    folder = tmp_path_factory.mktemp("index")
    make_row_index(folder)
    return folder / "index"


@pytest.fixture(scope="session")
def url(index: Path) -> Iterator[str]:
    with serving(index) as address:
        yield address
