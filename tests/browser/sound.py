"""What holds for every page of the console: usable by everybody, in light and dark, wide and narrow."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from tests.browser.visitor import NARROW, WIDE

# The scheme changes nothing but colours, so that in the dark only the rules of colour are asked. The width
# changes no colour, so that the contrast, which takes most of the time of axe, is not asked again.
COLOUR = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
REST = {"rules": {"color-contrast": {"enabled": False}}}
LOOKS: tuple[tuple[dict[str, int], str, dict[str, object]], ...] = (
    (WIDE, "light", {}),
    (WIDE, "dark", COLOUR),
    (NARROW, "light", REST),
)
# Links beside other words that only their colour tells apart. Axe finds those that it can judge, which
# depends on where they happen to lie.
UNTOLD = """djangos => {
    const found = [];
    for (const link of document.querySelectorAll("#content a")) {
        const style = getComputedStyle(link);
        const isPlain = style.display === "inline" && style.textDecorationLine === "none";
        if (!isPlain || !link.checkVisibility() || link.closest(djangos)) continue;
        let block = link.parentElement;
        while (getComputedStyle(block).display.startsWith("inline")) block = block.parentElement;
        const rest = block.cloneNode(true);
        rest.querySelectorAll("a, button, input, select").forEach(each => each.remove());
        if (/[\\p{L}\\p{N}]/u.test(rest.textContent)) found.push(link.outerHTML);
    }
    return found;
}"""
# Of Django's own templates: links told by colour alone, a search without label.
DJANGOS = [".breadcrumbs", "#toolbar", ".paginator"]
# Preloading fetches what style sheets import, from where the page is and not from where they are.
OPTIONS = {"resultTypes": ["violations"], "preload": False}
RUN = "([context, options]) => axe.run(context, options).then(results => results.violations)"


def assert_sound(page: Page) -> None:
    """Raise unless the page passes axe and is no wider than its window, in each look."""
    __tracebackhide__ = True
    page.evaluate(Axe().axe_script)
    problems = []
    try:
        for size, scheme, rules in LOOKS:
            page.set_viewport_size(size)  # type: ignore[arg-type]
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            look = f"{page.url}, {scheme}, {size['width']} pixels wide"
            problems += [f"{look}: {problem}" for problem in _problems(page, rules)]
    finally:
        page.set_viewport_size(WIDE)  # type: ignore[arg-type]
        page.emulate_media(color_scheme="light")
    if problems:
        pytest.fail("\n\n".join(problems), pytrace=False)


def _problems(page: Page, rules: dict[str, object]) -> list[str]:
    # A colour on its way from light to dark has a contrast that nobody ever sees for long.
    page.evaluate("document.getAnimations().forEach(animation => animation.finish())")
    violations = page.evaluate(RUN, [{"exclude": DJANGOS}, {**OPTIONS, **rules}])
    found = [
        f"{violation['impact']} {violation['id']}: {node['html']}\n{node['failureSummary']}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
    untold = page.evaluate(UNTOLD, ", ".join(DJANGOS))
    found += [f"told from the words beside it by its colour alone: {html}" for html in untold]
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found + [f"scrolls sideways by {wide} pixels"] * (wide > 0)
