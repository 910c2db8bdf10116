"""The report in a real browser, from a file: charts show their values at the pointer and at keys, the console stays silent."""

from __future__ import annotations

import shutil

import pytest

from bayesadam.paper.reporting.page import Report, page
from bayesadam.paper.reporting.runs import Finished
from processes import eventually

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
    browser.execute_script("document.querySelector('#pruning .fold').open = true")
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


def resize(browser, width):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def test_a_phone_folds_what_is_long_and_a_wide_screen_shows_it(browser):
    folds = "return [...document.querySelectorAll('details.fold')].map((one) => one.open)"
    height = "return document.documentElement.scrollHeight"
    resize(browser, 390)
    eventually(lambda: not any(browser.execute_script(folds)))
    assert browser.execute_script(folds)
    folded = browser.execute_script(height)
    browser.execute_script("for (const one of document.querySelectorAll('details.fold')) one.open = true")
    assert browser.execute_script(height) > 1.3 * folded
    resize(browser, 1280)
    eventually(lambda: all(browser.execute_script(folds)))
    assert not any(one.is_displayed() for one in browser.find_elements("css selector", ".fold > summary"))
    resize(browser, 390)
    eventually(lambda: not any(browser.execute_script(folds)))
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert all(browser.execute_script(folds))


def test_charts_and_tables_use_the_width(browser):
    resize(browser, 1280)
    chart, table = (browser.find_element("css selector", f"#pruning {name}") for name in (".chart", "table"))
    assert table.rect["x"] > chart.rect["x"] + chart.rect["width"]
    assert table.rect["x"] + table.rect["width"] > 1200
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1280


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_text_contrast_with_the_background(browser, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    text = browser.execute_script("return getComputedStyle(document.querySelector('.chart svg text')).fill")
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = [sum(map(int, colour.strip("rgb()").split(","))) / 3 for colour in (text, paper)]
    assert abs(brightness[0] - brightness[1]) > 128
