"""The report in a real browser, from a file: charts show their values at the pointer and at keys, the console stays silent."""

from __future__ import annotations

import shutil

import pytest

from bayesadam.experiments.reporting.page import Report, page
from bayesadam.experiments.reporting.runs import Finished

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not both installed")
FRACTIONS = [0.0, 0.5, 0.9]


@pytest.fixture
def browser(tmp_path):
    rows = {"fractions": FRACTIONS, "accuracy": [[0.98, 0.97, 0.5], [0.98, 0.96, 0.4]]}
    settings = {"data": "mnist", "n_seeds": 2, "epochs": 100}
    metrics = {"command": "pruning", "settings": settings, "results": {"badam": {"snr": rows}}}
    run = Finished("pruning", "pruning", metrics, "0" * 64)
    (tmp_path / "report.html").write_text(page(Report({"pruning": [run]}, {})), encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=390,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.get((tmp_path / "report.html").as_uri())
    yield driver
    messages = driver.get_log("browser")
    driver.quit()
    assert messages == []


def test_values_show_at_the_pointer_and_at_keys(browser):
    chart = browser.find_element("css selector", ".chart svg")
    tip = browser.find_element("css selector", ".chart .tip")
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    webdriver.ActionChains(browser).move_to_element_with_offset(chart, -chart.size["width"] // 2 + 8, 0).perform()
    assert tip.text.split() == ["0", "%", "pruned", "Badam,", "signal-to-noise", "ratio", "98.00", "%"]
    chart.send_keys(webdriver.Keys.END)
    assert tip.text.split() == ["90", "%", "pruned", "Badam,", "signal-to-noise", "ratio", "45.00", "%"]
    chart.send_keys(webdriver.Keys.ARROW_LEFT)
    assert "50 % pruned" in tip.text
    chart.send_keys(webdriver.Keys.ESCAPE)
    assert not tip.is_displayed()
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_text_contrast_with_the_background(browser, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    text = browser.execute_script("return getComputedStyle(document.querySelector('.chart svg text')).fill")
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = [sum(map(int, colour.strip("rgb()").split(","))) / 3 for colour in (text, paper)]
    assert abs(brightness[0] - brightness[1]) > 128
