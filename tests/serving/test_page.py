"""The page at /, in headless Chromium: figures, tables, a chat round trip, and how it looks on a phone and a desk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import say

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_the_page_needs_nothing_from_elsewhere(inside: Any) -> None:
    answer = inside.get("/")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = answer.body.decode() + inside.get("/page.js").body.decode() + inside.get("/page.css").body.decode()
    links = re.findall(r"""(?:src|href|url|fetch|@import)\s*[=(]\s*["'`]([^"'`]+)""", text)
    assert links
    assert all(link.startswith(("/", "data:")) for link in links), links
    hosts = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}  # a name space, not an address
    assert not hosts


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(params=[400, 1400])
def page(browser: Any, live: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": request.param, "height": 900})
    page.faults = []
    page.on("console", lambda message: page.faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.goto(live.url)
    page.wait_for_selector(".dot.good")
    yield page
    assert page.faults == []
    page.close()


def test_it_shows_the_server(page: Any) -> None:
    assert page.inner_text("#status-text") == "ready"
    assert "tiny" in page.inner_text("#model")
    page.wait_for_selector("#kernels tbody tr")
    assert page.inner_text("#kernels tbody tr td:nth-child(1)") == "norm.rms_norm"
    assert page.inner_text("#kernels tbody tr td:nth-child(2)") == "reference"
    assert "pages in use" in page.inner_text("#memory-text")
    assert page.inner_text("#memory dd") == "1 MiB"


def test_a_chat_round_trip(page: Any) -> None:
    page.wait_for_selector("#model:has-text('tiny')")
    page.check("#thinking")
    page.fill("#input", say("I wonder.</think>Hello <b>you</b> & 안녕 👋"))
    page.press("#input", "Enter")
    page.wait_for_selector(".message.assistant .answer:has-text('👋')")
    assert page.inner_text(".message.assistant .answer") == "Hello <b>you</b> & 안녕 👋"
    assert page.inner_text(".message.assistant .reasoning") == "I wonder."
    page.wait_for_selector("#send:enabled")
    page.fill("#input", say("Second</think>again"))
    page.click("#send")
    page.wait_for_selector(".message:nth-child(4) .answer:has-text('again')")
    page.wait_for_selector("#send:enabled")
    page.click("#clear")
    assert page.query_selector_all(".message") == []


def test_an_error_is_shown(page: Any) -> None:
    page.wait_for_selector("#model:has-text('tiny')")
    page.fill("#input", say("some words", fail=2))
    page.press("#input", "Enter")
    page.wait_for_selector(".message.error")
    assert "the generation failed" in page.inner_text(".message.error")
    page.faults.clear()  # the browser itself notes an answer of status 500


def test_it_is_readable(page: Any) -> None:
    """Nothing is cut off sideways, letters are large enough, and everything has a name for those who do not see."""
    page.wait_for_selector("#kernels tbody tr")
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.evaluate(
        "[...document.querySelectorAll('h1, h2, p, td, th, dt, dd, label, button')]"
        ".filter(e => e.offsetParent).map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    outside = page.evaluate(
        "[...document.querySelectorAll('section')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert outside == 0
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, textarea, button')].filter(e => !e.labels?.length"
        " && !e.ariaLabel && !e.textContent.trim()).length"
    )
    assert unnamed == 0


def test_a_key_is_asked_for(browser: Any, start_server: Any, tmp_path: Path) -> None:
    server = start_server("--api-key", "sesame").wait_ready()
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_selector("#key-form:not([hidden])")
    page.fill("#key", "sesame")
    page.click("#key-form button")
    page.wait_for_selector(".dot.good")
    page.wait_for_selector("#model:has-text('tiny')")
    page.close()
