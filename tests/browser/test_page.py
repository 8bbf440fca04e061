"""The page in a real browser: it draws without errors, the worked row answers clicks and keys, and its arithmetic is Python's."""

import json
import shutil

import numpy as np
import pytest
from fake_dumps import KINDS, write_arm, write_run

from dm_plugin.review import worked_row
from dm_plugin.review.report import build_payload, render
from dm_plugin.review.runs import discover

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium found on PATH; install one to run the page tests")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    with playwright.sync_playwright() as p:
        instance = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield instance
        instance.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    write_run(root, layers=4, steps=range(0, 60, 10))
    write_arm(
        root, "planted", kind=KINDS["matched"], layers=24, layer_kind=lambda i: KINDS["stale" if i == 17 else "matched"]
    )
    arms = discover([root], [])
    file = root / "page.html"
    file.write_text(render(build_payload(arms, [], title="A test")))
    return file


@pytest.fixture
def page(browser, page_file):
    errors = []
    tab = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light").new_page()
    tab.on("pageerror", lambda e: errors.append(str(e)))
    tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    tab.on(
        "request",
        lambda r: errors.append(f"asked the network for {r.url}") if not r.url.startswith(("file:", "data:")) else None,
    )
    tab.goto(f"file://{page_file}")
    yield tab
    assert errors == []
    tab.close()


def test_replayed_deltas_are_shown_for_the_chosen_layer(browser, tmp_path) -> None:
    write_arm(
        tmp_path,
        "live",
        kind=KINDS["bf16"].__class__(key=4e-3, tap=False, replayed=True, backend="te:FusedAttention:FP8"),
        layers=2,
    )
    file = tmp_path / "page.html"
    file.write_text(render(build_payload(discover([tmp_path], []), [], title="Live")))
    tab = browser.new_page()
    tab.goto(f"file://{file}")
    table = tab.get_by_role("region", name="replayed deltas")
    text = " ".join(table.inner_text().split())
    assert "What another delta would have given" in tab.locator("#detail-grid").inner_text()
    for word in ("stale 0.011", "matched 1.4e-8", "stock FP8 casts 0.018", "0.064"):
        assert word in text, text
    tab.close()


def test_a_watched_page_reloads_when_a_dump_lands_and_keeps_the_view(browser, tmp_path) -> None:
    import threading

    from dm_plugin.review import serve

    write_arm(tmp_path, "matched", layers=3, steps=(0, 10))

    def build() -> str:
        return render(build_payload(discover([tmp_path], []), [], title="Live"))

    server = serve.server(tmp_path, build, every=0.2)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        errors: list[str] = []
        tab = browser.new_page()
        tab.on("pageerror", lambda e: errors.append(str(e)))
        tab.on("console", lambda m: errors.append(m.text) if m.type == "error" and "favicon" not in m.text else None)
        tab.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        tab.select_option("#layer", label="layer 2")
        assert "steps 10" in tab.locator("#arm-meta").inner_text()
        write_arm(tmp_path, "matched", layers=3, steps=(0, 10, 20, 30, 40))
        tab.locator("#arm-meta", has_text="–40").wait_for(timeout=20000)
        assert tab.locator("#layer").evaluate("s => s.selectedOptions[0].text") == "layer 2"
        assert [e for e in errors if "404" not in e] == []
        tab.close()
    finally:
        server.shutdown()
        server.server_close()


def test_a_click_on_another_delta_changes_the_shown_row_sum(page) -> None:
    before = page.locator("#row-sum").inner_text()
    page.locator("label:has(#mode-matched)").click()
    after = page.locator("#row-sum").inner_text()
    assert before != after
    assert "e-" in after  # round-off
    assert page.locator("#mode-matched").is_checked()
    row = worked_row.preset_row("typical")
    expected = worked_row.work(row, worked_row.Choice(mode="stale")).row_sum
    assert float(before.replace("−", "-").replace("+", "")) == pytest.approx(expected, rel=5e-3)


def test_a_slider_moved_by_key_changes_the_row(page) -> None:
    before = page.locator("#row-sum").inner_text(), page.locator("#logit-out-3").inner_text()
    page.locator("#logit-3").focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert (page.locator("#row-sum").inner_text(), page.locator("#logit-out-3").inner_text()) != before
    assert float(page.locator("#logit-out-3").inner_text()) == pytest.approx(float(before[1]) + 0.4, abs=0.03)


def test_formats_presets_and_centring_answer(page) -> None:
    seen = {page.locator("#row-sum").inner_text()}
    page.locator("#format-p").select_option("none")
    seen.add(page.locator("#row-sum").inner_text())
    page.locator("[data-preset=offset]").click()
    seen.add(page.locator("#row-sum").inner_text())
    page.locator("#centre").check()
    seen.add(page.locator("#row-sum").inner_text())
    assert len(seen) == 4
    assert page.locator("[data-preset=offset]").get_attribute("aria-pressed") == "true"


def test_the_page_computes_the_row_as_python_does(page) -> None:
    for preset in worked_row.PRESETS:
        row = worked_row.preset_row(preset.key)
        for mode in worked_row.MODES:
            for o_format, centre in (("bf16", False), ("e4m3", True)):
                choice = {"mode": mode, "p": "e4m3", "do": "e5m2", "v": "e4m3", "o": o_format, "centre": centre}
                given = {"logits": row.logits.tolist(), "do": row.do.tolist(), "v": row.v.tolist()}
                js = page.evaluate(f"workRow({json.dumps(given)}, {json.dumps(choice)})")
                py = worked_row.work(row, worked_row.Choice(mode, "e4m3", "e5m2", "e4m3", o_format, centre))
                np.testing.assert_allclose(js["ds"], py.ds, rtol=1e-5, atol=3e-6)
                np.testing.assert_allclose(
                    [js["probability"], js["gradient"], js["storage"]],
                    [py.probability, py.gradient, py.storage],
                    rtol=1e-6,
                    atol=1e-9,
                )


def test_e4m3_rounding_in_the_page_is_exact(page) -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [rng.normal(0, 100, 400), rng.normal(0, 0.01, 200), [448, 464, 465, 1e9, 2**-10, 1.5 * 2**-9, 0, -17.5]]
    )
    for fmt in ("e4m3", "e5m2", "bf16"):
        js = page.evaluate(f"{json.dumps(values.tolist())}.map((x) => roundTo(x, '{fmt}'))")
        np.testing.assert_array_equal(js, worked_row.round_to(values, fmt))


def test_layers_are_chosen_by_click_and_by_keyboard_and_the_address_remembers(page) -> None:
    page.get_by_role("button", name="planted").first.click()
    rows = page.locator("#verdicts li button")
    assert "layer 17" in rows.first.inner_text()
    assert "mismatch" in rows.first.inner_text()
    rows.nth(1).focus()
    page.keyboard.press("Enter")
    chosen = page.locator("#layer").input_value()
    assert chosen in page.evaluate("decodeURIComponent(location.hash)")
    page.reload()
    assert page.locator("#layer").input_value() == chosen
    page.locator("#worse").click()
    assert "layers.17." in page.locator("#layer").input_value()


def test_charts_have_names_and_tables_and_read_out_by_arrow_keys(page) -> None:
    charts = page.locator("svg.chart[role=img]")
    assert charts.count() > 8
    for i in range(charts.count()):
        assert charts.nth(i).get_attribute("aria-label") or charts.nth(i).get_attribute("aria-hidden")
    chart = page.locator("#detail-grid svg.chart[tabindex='0']").first
    chart.focus()
    page.keyboard.press("ArrowLeft")
    assert "step" in page.locator("#detail-grid .readout").first.inner_text()
    details = page.locator("#detail-grid details.table").first
    details.locator("summary").click()
    assert details.locator("tbody tr").count() >= 6


def test_charts_with_long_arm_labels_stay_inside_their_cards(browser, tmp_path) -> None:
    """Guards: names beside lines ran into the next card, and a tick at zero read -2.8e-17."""
    for name in ("bf16", "stale", "matched"):
        about = write_arm(tmp_path, name, layers=2, steps=range(0, 60, 10)) / "arm.json"
        about.write_text(
            json.dumps(json.loads(about.read_text()) | {"label": f"sm90 casts with the {name} delta, long"})
        )
    file = tmp_path / "page.html"
    file.write_text(render(build_payload(discover([tmp_path], []), [], title="Long labels")))
    for width in (1200, 400):
        tab = browser.new_context(viewport={"width": width, "height": 900}).new_page()
        tab.goto(f"file://{file}")
        outside = tab.evaluate(
            """[...document.querySelectorAll('figure svg text')].filter((t) => { const a = t.getBoundingClientRect(),
            b = t.closest('figure').getBoundingClientRect(); return a.right > b.right + 1 || a.left < b.left - 1; }).map((t) => t.textContent)"""
        )
        assert outside == []
        ticks = tab.evaluate("[...document.querySelectorAll('.axes text')].map((t) => t.textContent)")
        assert "0" in ticks
        assert not [t for t in ticks if "e-1" in t]
        tab.close()


def test_the_code_table_shows_the_largest_magnitudes(page) -> None:
    rows = page.locator("#detail-grid figure", has_text="What the codes could not hold").locator("tbody tr")
    assert rows.count() >= 6
    assert all(float(x) > 0 for x in rows.locator("td:last-child").all_inner_texts())


def test_the_parts_chart_follows_the_chosen_delta(page) -> None:
    parts = page.locator("#row-parts text.ink")
    before = parts.all_text_contents()
    page.locator("label:has(#mode-matched)").click()
    after = parts.all_text_contents()
    assert before != after
    assert after[:3] == ["0", "0", "0"]  # nothing comes from P, dO or the stored O


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1200, "dark")])
def test_narrow_and_dark_draw_without_sideways_scrolling(browser, page_file, width, scheme) -> None:
    errors = []
    tab = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    tab.on("pageerror", lambda e: errors.append(str(e)))
    tab.goto(f"file://{page_file}")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("document.documentElement.dataset.theme") == scheme
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.locator("#theme").click()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert errors == []
    tab.close()
