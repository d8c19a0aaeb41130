"""The pages in headless Chromium: at a phone's and a desk's width, light and dark, without a
request or overflow.
"""

import functools
import http.server
import re
import shutil
import subprocess
import threading

import pytest

from armature.pages import compare, history, report
from armature.sweeps import report as sweep_report
from armature.sweeps.trials import Sweep, Trial
from tests import needs
from tests.pages.run_files import HOSTILE, write

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)


def browse(address: str, profile, *flags: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """All pages, and a page that shows each in a frame of a width and tells its measures."""
    if BROWSER is None:
        needs.absent("there is no Chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("pages")
    run = write(folder / "a", name=HOSTILE, text=HOSTILE)
    other = write(folder / "b", name="b" * 120, offset=0.3)
    (folder / "report.html").write_text(report.make(run))
    (folder / "compare.html").write_text(compare.make([history.read(run), history.read(other)]))
    keys = ("optimizer.lr", "model.layers", HOSTILE)
    values = [{keys[0]: f"{10**-i}", keys[1]: str(i), keys[2]: "a" * 120} for i in range(9)]
    trials = [
        Trial(
            i,
            folder / str(i),
            "finished",
            120,
            3.0 + i / 7,
            value,
            "val/loss",
            "min",
            {},
            (0, None),
        )
        for i, value in enumerate(values)
    ]
    sweep = Sweep(folder / HOSTILE.replace("/", "_"), keys, tuple(trials), asked=9)
    (folder / "sweep.html").write_text(sweep_report.html(sweep, dict.fromkeys(keys, 1 / 3)))
    return folder


@pytest.fixture(scope="module")
def server(pages):
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            asked.append(self.path)

    measure = (
        "<iframe id=f style='border:0;height:900px'></iframe>"
        "<script>const[p,w]=location.search.slice(1).split('&');"
        "f.style.width=w+'px';f.onload=()=>{const d=f.contentDocument,e=d.documentElement;"
        "document.title=[e.scrollWidth,d.querySelectorAll('svg').length,d.scripts.length,"
        "Math.max(...[...d.images].map(i=>i.naturalWidth),0),"
        "getComputedStyle(d.body).backgroundColor].join('|')};"
        "f.src=p</script>"
    )
    (pages / "measure.html").write_text(measure)
    handler = functools.partial(Handler, directory=str(pages))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("page", "width", "theme"),
    [("report", 390, "light"), ("compare", 390, "dark"), ("sweep", 1280, "dark")],
)
def test_a_page_fits_its_window_and_asks_for_nothing(page, width, theme, server, tmp_path):
    address, asked = server
    asked.clear()
    flags = ["--dump-dom", "--virtual-time-budget=4000"]
    flags += (
        ["--blink-settings=preferredColorScheme=0"]
        if theme == "dark"
        else ["--blink-settings=preferredColorScheme=1"]
    )
    dom = browse(f"{address}/measure.html?{page}.html&{width}", tmp_path / "profile", *flags)
    found = re.search(r"<title>([^<]*)</title>", dom)
    assert found, dom[:500]
    scrolled, charts, scripts, image, ground = found[1].split("|")
    assert int(scrolled) <= width
    assert int(charts) >= (3 if page == "sweep" else 6)
    assert int(scripts) == 0
    assert int(image) == (8 if page == "report" else 0)
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[theme]
    assert {path.partition("?")[0] for path in asked} <= {
        "/measure.html",
        f"/{page}.html",
        "/favicon.ico",
    }
