#!/usr/bin/env python3
"""Drives the real page in headless Chromium (scripts/install-browser.sh) and keeps screenshots.

    scripts/test-page.py RUNS [--lockstep target/release/lockstep] [--out target/screenshots]

RUNS is a directory with run folders. Every view of every run is opened, wide and on a phone, in light and dark; a run is
added, changed and deleted while it is shown; and a run with hostile names and log lines must have no effect.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

VIEWS = ["Charts", "Doctor", "Ranks", "Timeline", "Logs", "Plan"]
HOSTILE = "<img src=x onerror=window.hacked=1>"


def hostile_run(runs):
    folder = runs / HOSTILE
    (folder / "logs").mkdir(parents=True)
    lines = [json.dumps({"step": step, "steps": 40, "loss": 5 / step, "tokens_per_s": 1000, "elapsed_s": step}) for step in range(1, 21)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\nnot json\n")
    (folder / "logs/rank-0.log").write_text("<script>window.hacked = 1</script>\n</pre><b>bold</b>\n")
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--lockstep", default="target/release/lockstep")
    parser.add_argument("--out", type=Path, default=Path("target/screenshots"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="page-")) / "runs"
    shutil.copytree(args.runs, runs)
    hostile = hostile_run(runs)
    server = subprocess.Popen([args.lockstep, "dash", str(runs), "--port", "0"], stdout=subprocess.PIPE, text=True)
    address = server.stdout.readline().strip()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            check(browser, address, runs, hostile, args.out)
            browser.close()
    finally:
        server.terminate()
    print("all views work")


def check(browser, address, runs, hostile, out):
    names = sorted(path.name for path in runs.iterdir() if path.is_dir())
    for device, size in [("wide", (1400, 900)), ("phone", (390, 844))]:
        for scheme in ["light", "dark"]:
            context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
            page = context.new_page()
            errors, requests = [], []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: requests.append(request.url))
            page.goto(address)
            page.wait_for_selector("#runs li button")
            for name in names:
                page.locator("#runs button", has_text=name).first.click()
                for view in VIEWS:
                    page.locator(f"[data-view='{view}']").click()
                    page.locator("#view > *").first.wait_for()
                    page.wait_for_timeout(400)
                    safe = "hostile" if name == hostile.name else name
                    page.screenshot(path=out / f"{safe}-{view.lower()}-{device}-{scheme}.png", full_page=True)
                    width = page.evaluate("document.documentElement.scrollWidth")
                    assert width <= size[0] + 1, f"{name} {view} {device}: the page is {width} px wide"
            assert page.evaluate("window.hacked") is None, "hostile content was executed"
            assert not errors, errors
            assert all(url.startswith(address.split("?")[0].rstrip("/")) for url in requests), requests
            context.close()
    live(browser, address, runs, out)


def live(browser, address, runs, out):
    """A run that appears, changes and is deleted while it is shown."""
    page = browser.new_page()
    page.goto(address)
    folder = runs / "live"
    folder.mkdir()
    metrics = folder / "metrics.jsonl"

    def report(step):
        line = {"step": step, "steps": 50, "loss": 4 / step, "tokens_per_s": 10, "elapsed_s": step}
        with metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    report(1)
    page.locator("#runs button", has_text="live").first.click()
    for step in (2, 3):
        report(step)
        begun = time.time()
        page.locator("#head", has_text=f"step {step} of 50").wait_for()
        print(f"step {step} was shown after {time.time() - begun:.2f} s")
    # The keyboard reaches every view.
    page.locator("[data-view='Charts']").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "Doctor"
    shutil.rmtree(folder)
    page.locator("#view", has_text="deleted").wait_for()
    page.screenshot(path=out / "deleted.png")


if __name__ == "__main__":
    sys.exit(main())
