"""The report in a real browser, from a file: no wider than the screen, light and dark, and the console stays silent."""

from __future__ import annotations

import shutil
from io import BytesIO

import pytest
from matplotlib.figure import Figure

from bayesadam.paper.claims import Finished
from bayesadam.paper.report import Report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not both installed"),
]
FRACTIONS = [0.0, 0.5, 0.9]
PROBLEMS = ("mushroom", "financial", "jester", "statlog", "adult", "covertype", "census")


def finished(experiment, settings, results):
    metrics = {"command": experiment, "settings": settings, "results": results}
    picture = BytesIO()
    Figure(figsize=(12, 4)).savefig(picture, format="png", dpi=150)
    return Finished(experiment, experiment, metrics, picture.getvalue())


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    rows = {"fractions": FRACTIONS, "accuracy": [[0.98, 0.97, 0.5], [0.98, 0.96, 0.4]]}
    pruning = finished("pruning", {"data": "mnist", "n_seeds": 2, "epochs": 100}, {"badam": {"snr": rows}})
    cell = {"reward_ratio": [0.5, 0.6], "regret_ratio": [0.5, 0.4], "points": [1, 2]}
    cell |= {"regret_mean": [1.0, 2.0], "regret_sd": [0.1, 0.1]}
    settings = {"problems": PROBLEMS, "agents": ["badam"], "runs": 2, "rounds": None, "settings": "paper"}
    bandits = finished("bandits", settings, {problem: {"badam": cell} for problem in PROBLEMS})
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(Report({"pruning": [pruning], "bandits": [bandits]}, {}).page(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def browser(address):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.get(address)
    yield driver
    messages = driver.get_log("browser")
    driver.quit()
    assert messages == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_no_wider_than_the_screen(browser, width):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    pictures = browser.find_elements("css selector", "main img")
    assert len(pictures) == 2
    assert all(0 < picture.rect["width"] <= width for picture in pictures)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrasts_with_the_background(browser, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    text = browser.execute_script("return getComputedStyle(document.body).color")
    brightness = [sum(map(int, colour.strip("rgb()").split(","))) / 3 for colour in (text, paper)]
    assert abs(brightness[0] - brightness[1]) > 128
