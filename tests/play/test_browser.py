"""The page in a real browser: a click changes the bands, the sliders move them, the console stays silent."""

import shutil
from dataclasses import replace

import pytest
import torch

from bayesadam.play import learners
from floats import approx
from play.serving import serving
from processes import PATIENCE, eventually

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not both installed"),
]
METHODS = ("badam", "gp", "mc-dropout", "bbb", "vadam", "ensemble")


@pytest.fixture(scope="module")
def server():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, serving() as server:
        patch.setattr(learners, "PANELS", tuple(replace(panel, budget=100) for panel in learners.PANELS))
        yield server
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1360,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(PATIENCE)
    yield driver
    driver.quit()


@pytest.fixture
def page(server, browser):
    """A page of its own with five points, everything heard."""
    browser.get("about:blank")
    browser.get(f"{server.url}#p=-1.5,-0.6;-0.7,0.5;0.1,0.2;0.8,-0.5;1.6,0.8&w=10")
    settle(browser)
    yield browser
    assert browser.get_log("browser") == []


def settle(browser):
    eventually(lambda: browser.execute_script("return document.documentElement.dataset.last") == "done")


def bands(browser, method):
    return browser.execute_script(
        "return ['mean', 'band1', 'band2', 'noise'].map(k =>"
        " document.querySelector(`[data-method=${arguments[0]}] .${k}`).getAttribute('d'))",
        method,
    )


def click(browser, method, x, y, *, drag=None):
    """At a place of the plane, by the real mouse."""
    svg = browser.find_element("css selector", f"[data-method={method}] .plane")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
    size = svg.rect
    actions = webdriver.ActionChains(browser)
    actions.move_to_element_with_offset(svg, round(x / 6 * size["width"]), round(-y / 4 * size["height"]))
    if drag:
        actions.click_and_hold()
        actions.move_by_offset(round(drag[0] / 6 * size["width"]), round(-drag[1] / 4 * size["height"])).release()
    else:
        actions.click()
    browser.execute_script("document.documentElement.dataset.last = ''")
    actions.perform()


def points(browser):
    return browser.execute_script("return document.querySelectorAll('[data-method=gp] .dot').length")


def last_point(browser):
    """As the address has it."""
    found = browser.execute_script("return new URLSearchParams(location.hash.slice(1)).get('p')")
    return [float(value) for value in found.split(";")[-1].split(",")]


def test_every_plane_has_its_bands(page):
    for method in METHODS:
        assert all(path.startswith("M") and "NaN" not in path for path in bands(page, method))
    assert points(page) == 5


def test_a_click_in_any_plane_changes_the_bands_of_all(page):
    before = {method: bands(page, method) for method in METHODS}
    click(page, "vadam", 2.4, -1.2)
    settle(page)
    assert points(page) == 6
    for method in METHODS:
        assert all(old != new for old, new in zip(before[method], bands(page, method), strict=True))
    assert [approx(v, abs=0.05) for v in last_point(page)] == [2.4, -1.2]


def test_a_click_on_a_point_removes_it_and_a_drag_moves_it(page):
    click(page, "badam", 0.1, 0.2)
    settle(page)
    assert points(page) == 4
    click(page, "badam", 1.6, 0.8, drag=(0.5, -1))
    settle(page)
    assert points(page) == 4
    assert [approx(v, abs=0.05) for v in last_point(page)] == [2.1, -0.2]


def test_the_prior_slider_moves_badams_band_and_trains_nothing(page):
    before, steps = bands(page, "badam"), page.execute_script(STEPS)
    page.execute_script("document.documentElement.dataset.last = ''")
    slide(page, "prior_precision", 900)
    settle(page)
    after = bands(page, "badam")
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert page.execute_script(STEPS) == steps


STEPS = "return document.querySelector('[data-method=badam]').dataset.steps"


def slide(browser, name, tick):
    browser.execute_script(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        " s.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        tick,
    )


def test_the_keyboard_adds_and_removes(page):
    svg = page.find_element("css selector", "[data-method=gp] .plane")
    keys = webdriver.Keys
    page.execute_script("arguments[0].focus(); document.documentElement.dataset.last = ''", svg)
    svg.send_keys(keys.ARROW_UP * 5, keys.ENTER)
    settle(page)
    assert points(page) == 6
    svg.send_keys(keys.ENTER)
    eventually(lambda: points(page) == 5)
    settle(page)


def test_clear_and_examples(page):
    page.find_element("id", "clear").click()
    eventually(lambda: bands(page, "badam")[0] is None)
    page.execute_script("document.documentElement.dataset.last = ''")
    page.find_element("css selector", "[data-example=paper]").click()
    # Not `settle`: the answer to the clearing may come after its mark was taken away.
    eventually(lambda: points(page) == 40 and (bands(page, "gp")[0] or "").startswith("M"))
    settle(page)


def test_reset_brings_back_points_sliders_and_fresh_networks(page):
    slide(page, "prior_precision", 900)
    page.find_element("css selector", "#units option[value=relu]").click()
    page.execute_script("document.documentElement.dataset.last = ''")
    page.find_element("id", "reset").click()
    eventually(lambda: points(page) == 40 and page.execute_script(SHOWN) == ["5", "50", "tanh", "40"])
    settle(page)


SHOWN = (
    "const text = (id) => document.getElementById(id).textContent;"
    " return [text('prior_precision-value'), text('width-value'), document.getElementById('units').value,"
    " text('n_data-value')]"
)


def test_a_laptop_shows_the_whole_page_at_once(server, browser):
    metrics = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get("about:blank")
        browser.get(f"{server.url}#p=0,0;1,1&w=10")
        settle(browser)
        whole = "const e = document.documentElement; return [e.scrollWidth, e.scrollHeight]"
        assert browser.execute_script(whole) == [1280, 800]
        assert not browser.execute_script(CUT_OFF)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# Elements that reach beyond the box around them, or beyond the window.
CUT_OFF = """
return [...document.querySelectorAll('.panel > *, .head > *, #legend > *, #buttons *, .slider > *')].filter((e) => {
  const own = e.getBoundingClientRect(), around = e.closest('.panel, #legend, #controls').getBoundingClientRect();
  return own.right > around.right + 1 || own.bottom > around.bottom + 1 || own.bottom > innerHeight;
}).map((e) => e.outerHTML.slice(0, 90))
"""


def test_many_clicks_at_once_end_in_the_bands_of_the_last(page):
    for number in range(8):
        click(page, "badam", -2.6 + 0.4 * number, 1.5)
    settle(page)
    assert points(page) == 13
    eventually(lambda: page.execute_script("return document.querySelectorAll('.stale').length") == 0)


def test_a_phone_needs_no_sideways_scrolling(server, browser):
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get(f"{server.url}#p=0,0")
        settle(browser)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_server_that_stops_is_said_in_words(browser):
    with serving() as server:
        browser.get(f"{server.url}#p=")
        settle(browser)
    browser.find_element("css selector", "[data-example=few]").click()
    eventually(lambda: "has stopped" in browser.find_element("id", "trouble").text)
    browser.get_log("browser")
